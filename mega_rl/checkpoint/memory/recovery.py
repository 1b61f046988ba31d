"""Restoring of checkpoints in memory: which are whole, and what this host lacks.

On one host the folder is a whole checkpoint. With several, each host gets a view: a folder with links to its own shards
and, for the others, sparse files of their headers, into which it fetches the pieces that its ranks need. The reader and
its checksums are those of the disk.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
from mega_rl.checkpoint.format.reader import Checkpoint, StoredPiece, read_shard
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.memory.hosts import Hosts, MemoryPlace, send_files
from mega_rl.checkpoint.resume import DamagedError, plan, report_changes, restore_from
from mega_rl.checkpoint.run_state import RunState
from mega_rl.disk import SaveError
from mega_rl.errors import RunError, UserError, UserErrors, in_units
from mega_rl.parallel.agreement import all_succeed, failure_of, run_on_all, run_on_one
from mega_rl.parallel.boxes import Piece
from mega_rl.parallel.comm import FilePart, cut
from mega_rl.protocols import Ranks
from mega_rl.types import JsonObject
from mega_rl.untrusted import read_file

log = logging.getLogger(__name__)

VIEW = ".view"  # in a host's folder; the next start removes the remains of a killed one


class Remnant(NamedTuple):
    """A checkpoint in memory, and the hosts that hold each shard whole."""

    step: int
    commit: str  # content of COMMIT, equal on all hosts of the same checkpoint
    holders: dict[str, list[int]]  # host numbers by shard
    headers: dict[str, int]  # bytes of the header of each shard that is whole somewhere
    faults: list[str]  # problems of existing files


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
        if missing := [name for name, of_shard in remnant.holders.items() if not of_shard]:
            _ignore([*remnant.faults, f"{where} lacks {', '.join(missing)}"][0], ranks)
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
        whole: dict[str, int] = {}
        damage: list[str] = []
        for record in manifest.shards[share::of]:
            if not os.path.lexists(folder / record.file) and hosts.count > 1:
                continue  # another host has it
            try:
                pieces = read_shard(folder / record.file, record, manifest)
                Checkpoint(folder, manifest, {}).verify(pieces)
                whole[record.file] = min(piece.offset for piece in pieces)
            except UserError as error:
                damage.append(error.problems[0] if isinstance(error, UserErrors) else str(error))
        names = [record.file for record in manifest.shards]
        step = folders.step_of(folder)
        steps.append({"step": step, "commit": commit, "shards": whole, "all": names, "faults": damage})
    return {"steps": steps, "faults": faults}


def _remnants(reports: Sequence[JsonObject], hosts: Hosts) -> list[Remnant]:
    """Return the checkpoints that ranks report, newest first, complete and incomplete ones."""
    remnants: dict[tuple[int, str], Remnant] = {}
    for rank, report in enumerate(reports):
        for one in report["steps"]:
            key = (one["step"], one["commit"])
            remnant = remnants.setdefault(key, Remnant(*key, {name: [] for name in one["all"]}, {}, []))
            remnant.faults.extend(one["faults"])
            remnant.headers.update(one["shards"])
            for name in one["shards"]:
                remnant.holders[name].append(hosts.of_rank[rank])
    return sorted(remnants.values(), key=lambda remnant: remnant.step, reverse=True)


def _restore(here: MemoryPlace, run: RunState, remnant: Remnant) -> Manifest:
    """Fill engines and rank states from one checkpoint; collective. Raises RunError or UserError on all ranks."""
    ranks, hosts = run.ranks, here.hosts
    source = hosts.ranks_on(next(host for of in remnant.holders.values() for host in of))[0]
    folder, view = folders.final(here.folder, remnant.step), folders.final(here.folder / VIEW, remnant.step)
    text = run_on_one(lambda: _text(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES), ranks, source=source)
    check_commit(remnant.commit.encode(), text.encode(), folder)
    manifest = parse_manifest(text.encode(), folder / MANIFEST_FILE)
    if hosts.count == 1:
        return restore_from(folder, run)

    def send(wanted: Sequence[Mapping[str, Iterable[Sequence[int]]]]) -> None:
        send_files(_parts(hosts, remnant, wanted), ranks, source=folder, target=view)

    def fetch(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
        """Fetch the bytes that this host's ranks need for their pieces and this host lacks."""
        copies, _ = plan(checkpoint, pieces)  # the load that follows reports its problems
        wanted = ranks.gather_json(_ranges(copy.source for copy in copies))
        all_succeed(lambda: _check_room(here, _parts(hosts, remnant, wanted)), ranks)
        send(wanted)

    def on_first(work: Callable[[], None]) -> Callable[[], None]:
        return work if hosts.is_first else lambda: None

    try:
        all_succeed(on_first(lambda: _make_view(here, remnant, manifest, text)), ranks)
        send([{file: [(0, size)] for file, size in remnant.headers.items()}] * ranks.size)
        return restore_from(view, run, fetch=fetch)
    finally:
        failure_of(on_first(lambda: disk.remove_tree(here.folder / VIEW)), ranks)


def _make_view(here: MemoryPlace, remnant: Remnant, manifest: Manifest, text: str) -> None:
    """Make this host's view: links to its own shards, sparse files for others. Raises SaveError."""
    folder, view = folders.final(here.folder, remnant.step), folders.final(here.folder / VIEW, remnant.step)
    place.make(here.folder)
    disk.remove_tree(here.folder / VIEW)
    disk.make_folder(view)
    disk.write_text(view / MANIFEST_FILE, text)
    disk.write_text(view / COMMIT_FILE, remnant.commit)
    for record in manifest.shards:
        file = view / record.file
        if here.hosts.own not in remnant.holders[record.file]:
            fd = disk.open_new(file)
            os.ftruncate(fd, record.nbytes)
            disk.close(fd)
            continue
        try:
            os.link(folder / record.file, file, follow_symlinks=False)
        except OSError as error:
            raise SaveError(f"{file}: cannot be linked ({error.strerror})") from error


def _parts(hosts: Hosts, remnant: Remnant, wanted: Sequence[Mapping[str, Iterable[Sequence[int]]]]) -> list[FilePart]:
    """Return the transfers of byte ranges that ranks want and their hosts lack, once per host."""
    parts: list[FilePart] = []
    for host in range(hosts.count):
        for number, (file, holders) in enumerate(remnant.holders.items()):
            if host in holders:
                continue
            ranges = [each for rank in hosts.ranks_on(host) for each in wanted[rank].get(file, ())]
            source, target = hosts.reader_on(holders[0], number), hosts.reader_on(host, number)
            for start, end in _joined(ranges):
                parts += cut(source, target, file, start, end - start)
    return parts


def _check_room(here: MemoryPlace, parts: Sequence[FilePart]) -> None:
    """Raise SaveError if this host's memory has no room for the parts that it gets."""
    needed = sum(part.nbytes for part in parts if part.target in here.hosts.ranks_on(here.hosts.own))
    free, of = place.free_memory(here.folder.parent) if needed else (0, "")
    if free < needed:
        raise SaveError(f"{in_units(needed)} of other hosts are needed and {in_units(free)} are free in {of}")


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
