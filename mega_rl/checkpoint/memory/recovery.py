"""Restoring of checkpoints in memory: which are whole, and what this host lacks.

On one host the folder is a whole checkpoint. With several, each host gets a view: a folder with links to its own shards
and, for the others, sparse files of their headers, into which it fetches the pieces that its ranks need. The reader and
its checksums are those of the disk.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mega_rl import disk
from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_commit,
    parse_manifest,
)
from mega_rl.checkpoint.format.reader import Checkpoint, StoredPiece, read_header_bytes, read_shard
from mega_rl.checkpoint.format.shards import ShardRecord
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.memory.hosts import Hosts, MemoryPlace, send_files
from mega_rl.checkpoint.resume import DamagedError, plan, report_changes, restore_from
from mega_rl.checkpoint.run_state import RunState
from mega_rl.disk import SaveError
from mega_rl.errors import RunError, UserError, UserErrors, in_units
from mega_rl.parallel.agreement import all_succeed, failure_of, run_on_all, run_on_one
from mega_rl.parallel.transfers import FilePart, cut
from mega_rl.protocols import Ranks
from mega_rl.types import JsonObject, Piece
from mega_rl.untrusted import read_file

log = logging.getLogger(__name__)

VIEW = ".view"  # in a host's folder; the next start removes the remains of a killed one


class Remnant(NamedTuple):
    """A checkpoint in memory, and the hosts that hold each shard whole."""

    step: int
    commit: str  # content of COMMIT, equal on all hosts of the same checkpoint
    holders: Mapping[str, Sequence[int]]  # host numbers by shard
    missing: Sequence[str]  # shards that no host holds whole
    faults: Sequence[str]  # problems of existing files


def restore_newest(here: MemoryPlace, run: RunState, *, newer_than: int) -> Manifest | None:
    """Fill engines and rank states from the newest whole checkpoint after `newer_than`; collective.

    Logs a line for every checkpoint that it ignores. None leaves the engines as they are.
    """
    folder, hosts, ranks = here.folder, here.hosts, run.ranks
    fault = place.unusable(folder)
    nothing = {"steps": [], "faults": [fault] if fault and hosts.is_first else []}
    report = run_on_all(lambda: nothing if fault else _survey(folder, hosts, newer_than=newer_than), ranks)
    reports = ranks.gather_json(report)
    for each in reports:
        for line in each["faults"]:
            _ignore(line, ranks)
    for remnant in _remnants(reports, hosts):
        where = f"the checkpoint of step {remnant.step} in memory"
        if remnant.missing:
            _ignore([*remnant.faults, f"{where} lacks {', '.join(remnant.missing)}"][0], ranks)
            continue
        for fault in remnant.faults:
            _ignore(f"{fault}; its copy on another host is taken", ranks)
        try:
            manifest = _restore(here, run, remnant)
        except (DamagedError, RunError, UserError) as error:
            first, *_ = re.split("[;\n]", str(error))  # advice is about checkpoints on disk
            _ignore(f"{where}: {first}", ranks)
            continue
        if ranks.rank == 0:
            log.info("restored the checkpoint of step %d from memory", manifest.step)
            report_changes(manifest, run.config)
        return manifest
    return None


def _survey(base: Path, hosts: Hosts, *, newer_than: int) -> JsonObject:
    """Return, as JSON, the shards of this host's checkpoints that this rank verified.

    `steps`: {step, commit, shards, all, faults} of each complete folder; `faults`: a line for everything else.
    """
    local = hosts.ranks_on(hosts.own)
    share, of = local.index(hosts.rank), len(local)
    faults = [f"{path}: {why}" for path, why in folders.torn(base)] if share == 0 else []
    steps = []
    for folder in reversed(folders.complete(base)):
        if folders.step_of(folder) <= newer_than:
            continue
        try:
            manifest, commit = folders.read_manifest(folder), _text(folder / COMMIT_FILE, MAX_COMMIT_BYTES)
        except UserError as error:
            faults.append(str(error))
            continue
        whole: list[str] = []
        damage: list[str] = []
        for record in manifest.shards[share::of]:
            if not os.path.lexists(folder / record.file) and hosts.count > 1:
                continue  # another host has it
            try:
                pieces = read_shard(folder / record.file, record, manifest)
                Checkpoint(folder, manifest, {}).verify(pieces)
                whole.append(record.file)
            except UserError as error:
                damage.append(error.problems[0] if isinstance(error, UserErrors) else str(error))
        names = [record.file for record in manifest.shards]
        step = folders.step_of(folder)
        steps.append({"step": step, "commit": commit, "shards": whole, "all": names, "faults": damage})
    return {"steps": steps, "faults": faults}


def _remnants(reports: Sequence[JsonObject], hosts: Hosts) -> list[Remnant]:
    """Return the checkpoints that ranks report, newest first, complete and incomplete ones."""
    holders: dict[tuple[int, str], dict[str, list[int]]] = {}
    faults: dict[tuple[int, str], list[str]] = {}
    for rank, report in enumerate(reports):
        for one in report["steps"]:
            key = (one["step"], one["commit"])
            of_shard = holders.setdefault(key, {name: [] for name in one["all"]})
            faults.setdefault(key, []).extend(one["faults"])
            for name in one["shards"]:
                of_shard[name].append(hosts.of_rank[rank])
    return [
        Remnant(*key, of_shard, [name for name, those in of_shard.items() if not those], faults[key])
        for key, of_shard in sorted(holders.items(), key=lambda each: each[0][0], reverse=True)
    ]


def _restore(here: MemoryPlace, run: RunState, remnant: Remnant) -> Manifest:
    """Fill engines and rank states from one checkpoint; collective. Raises RunError or UserError on all ranks."""
    ranks, hosts = run.ranks, here.hosts
    source = hosts.ranks_on(next(host for of in remnant.holders.values() for host in of))[0]
    folder = folders.final(here.folder, remnant.step)
    text = run_on_one(lambda: _text(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES), ranks, source=source)
    check_commit(remnant.commit.encode(), text.encode(), folder)
    manifest = parse_manifest(text.encode(), folder / MANIFEST_FILE)
    if hosts.count == 1:
        return restore_from(folder, run)

    def make_folder() -> None:
        if hosts.is_first:
            place.make(here.folder, here.run_dir)

    def remove_view() -> None:
        if hosts.is_first:
            disk.remove_tree(here.folder / VIEW)

    all_succeed(make_folder, ranks)
    view = _View(here, remnant, text, manifest, ranks)
    try:
        view.make()
        return restore_from(view.folder, run, fetch=view.fetch)
    finally:
        failure_of(remove_view, ranks)


class _View:
    """A checkpoint as this host sees it, over several hosts."""

    def __init__(self, here: MemoryPlace, remnant: Remnant, text: str, manifest: Manifest, ranks: Ranks) -> None:
        self._here, self._hosts, self._ranks = here, here.hosts, ranks
        self._remnant, self._text = remnant, text
        self._records = manifest.shards
        self._source = folders.final(here.folder, remnant.step)
        self.folder = folders.final(here.folder / VIEW, remnant.step)

    def make(self) -> None:
        """Make the folder with links to own shards and the others' headers; collective.

        Raises RunError on all ranks.
        """
        all_succeed(self._link if self._hosts.is_first else lambda: None, self._ranks)
        for number, record in enumerate(self._records):
            holders = self._remnant.holders[record.file]
            if len(set(holders)) < self._hosts.count:
                self._share_header(record, source=self._hosts.reader_on(holders[0], number))

    def fetch(self, checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
        """Fetch the bytes that this host's ranks need for their pieces and this host lacks; collective.

        Raises RunError on all ranks.
        """
        copies, _ = plan(checkpoint, pieces)  # the load that follows reports its problems
        wanted = self._ranks.gather_json(_ranges(copy.source for copy in copies))
        parts = self._parts(wanted)

        def check_room() -> None:
            here = self._hosts.ranks_on(self._hosts.own)
            needed = sum(part.nbytes for part in parts if part.target in here)
            free, of = place.free_memory(self._here.folder.parent) if needed else (0, "")
            if free < needed:
                raise SaveError(f"{in_units(needed)} of other hosts are needed and {in_units(free)} are free in {of}")

        all_succeed(check_room, self._ranks)
        send_files(parts, self._ranks, source=self._source, target=self.folder)

    def _parts(self, wanted: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> list[FilePart]:
        """Return the transfers of the byte ranges that ranks want, once per host."""
        parts: list[FilePart] = []
        for host in range(self._hosts.count):
            for number, record in enumerate(self._records):
                holders = self._remnant.holders[record.file]
                if host in holders:
                    continue
                local = self._hosts.ranks_on(host)
                ranges = [each for rank in local for each in wanted[rank].get(record.file, ())]
                source = self._hosts.reader_on(holders[0], number)
                target = self._hosts.reader_on(host, number)
                for start, end in _joined(ranges):
                    parts += cut(source, target, record.file, start, end - start)
        return parts

    def _link(self) -> None:
        """Make the folder on this host."""
        disk.remove_tree(self._here.folder / VIEW)
        disk.make_folder(self.folder)
        disk.write_text(self.folder / MANIFEST_FILE, self._text)
        disk.write_text(self.folder / COMMIT_FILE, self._remnant.commit)
        for file, holders in self._remnant.holders.items():
            if self._hosts.own in holders:
                try:
                    os.link(self._source / file, self.folder / file, follow_symlinks=False)
                except OSError as error:
                    raise SaveError(f"{self.folder / file}: cannot be linked ({error.strerror})") from error

    def _share_header(self, record: ShardRecord, *, source: int) -> None:
        """Send a shard's header to the hosts that lack it; collective. Raises RunError."""
        header = b""

        def read() -> None:
            nonlocal header
            if self._ranks.rank == source:
                header = read_header_bytes(self._source / record.file, record)

        all_succeed(read, self._ranks)
        size = int(self._ranks.broadcast(torch.tensor(len(header)), source=source))
        sent = torch.frombuffer(bytearray(header or bytes(size)), dtype=torch.uint8)
        received = self._ranks.broadcast(sent, source=source)
        lacks = self._hosts.own not in self._remnant.holders[record.file]

        def write() -> None:
            if lacks and self._hosts.is_first:
                fd = disk.open_new(self.folder / record.file)
                try:
                    os.ftruncate(fd, record.nbytes)
                    disk.write_at(fd, 0, [received.numpy().data])
                finally:
                    os.close(fd)

        all_succeed(write, self._ranks)


def _ranges(pieces: Iterable[StoredPiece]) -> dict[str, list[list[int]]]:
    """Return the byte ranges [start, end) of pieces, joined, by file name."""
    ranges: dict[str, list[list[int]]] = {}
    for piece in pieces:
        ranges.setdefault(piece.file.name, []).append([piece.offset, piece.offset + piece.spec.nbytes])
    return {file: _joined(those) for file, those in ranges.items()}


def _joined(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return ranges in order, with those that touch or overlap joined."""
    joined: list[list[int]] = []
    for start, end in sorted(map(tuple, ranges)):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def _text(path: Path, limit: int) -> str:
    return read_file(path, limit).decode(errors="replace")


def _ignore(line: str, ranks: Ranks) -> None:
    if ranks.rank == 0:
        log.warning("ignored: %s", line)
