"""Checkpoints that hosts still hold in memory: which are whole over all hosts, and what this host lacks of them.

On one host the folder is a whole checkpoint. With several, each host gets a view: a folder with links to the shards
that it holds and, for the others, sparse files of their headers, into which the pieces that its ranks need are fetched.
The reader and its checksums are those of the disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.fill import plan
from mega_rl.checkpoint.format.headers import StoredPiece, read_shard
from mega_rl.checkpoint.format.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_commit,
    parse_manifest,
)
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.checkpoint.format.shards import ShardRecord
from mega_rl.checkpoint.memory.files import read_from, write_into
from mega_rl.checkpoint.memory.hosts import Hosts
from mega_rl.checkpoint.memory.space import free_memory
from mega_rl.errors import RunError, UserError, UserErrors, in_units
from mega_rl.parallel.agreement import all_succeed, broadcast_json, failure_of, first_failure
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.transfers import FilePart, cut, transfer
from mega_rl.protocols import Ranks
from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError
from mega_rl.storage.untrusted import open_regular, read_at, read_file
from mega_rl.types import JsonObject, Piece

VIEW = ".view"  # of a host's folder; what a killed start has left is removed by the next


class Remnant(NamedTuple):
    """A checkpoint in memory, and the hosts that hold each shard whole."""

    step: int
    commit: str  # content of COMMIT, equal on all hosts of the same checkpoint
    holders: Mapping[str, Sequence[int]]  # host numbers by shard
    missing: Sequence[str]  # shards that no host holds whole
    faults: Sequence[str]  # of files that are there


def survey(base: Path, hosts: Hosts, *, newer_than: int) -> JsonObject:
    """Return as JSON what of this host's checkpoints this rank has read and found whole: its share of the shards.

    `steps`: {step, commit, shards, all, faults} of each complete folder; `faults`: a line for everything else there.
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
                continue  # another host's
            try:
                _verify_shard(folder, record, manifest)
                whole.append(record.file)
            except UserError as error:
                damage.append(error.problems[0] if isinstance(error, UserErrors) else str(error))
        names = [record.file for record in manifest.shards]
        step = folders.step_of(folder)
        steps.append({"step": step, "commit": commit, "shards": whole, "all": names, "faults": damage})
    return {"steps": steps, "faults": faults}


def candidates(reports: Sequence[JsonObject], hosts: Hosts) -> list[Remnant]:
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


def read_candidate(base: Path, candidate: Remnant, hosts: Hosts, ranks: Ranks) -> tuple[str, Manifest]:
    """Return the text of a candidate's manifest, from a host that has it, and what it says; collective.

    Raises UserError on all ranks alike.
    """
    source = hosts.ranks_on(next(host for of in candidate.holders.values() for host in of))[0]
    folder = folders.final(base, candidate.step)
    text = ""

    def read() -> None:
        nonlocal text
        if ranks.rank == source:
            text = _text(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)

    message = failure_of(read, ranks)
    if message is not None:
        raise UserError(message)
    text = broadcast_json(text, ranks, source=source)
    check_commit(candidate.commit.encode(), text.encode(), folder)
    return text, parse_manifest(text.encode(), folder / MANIFEST_FILE)


class View:
    """A candidate as this host sees it, over several hosts."""

    def __init__(
        self, base: Path, candidate: Remnant, text: str, manifest: Manifest, hosts: Hosts, ranks: GroupRanks
    ) -> None:
        self._base, self._hosts, self._ranks = base, hosts, ranks
        self._candidate, self._text = candidate, text
        self._records = manifest.shards
        self._source = folders.final(base, candidate.step)
        self.folder = folders.final(base / VIEW, candidate.step)

    def make(self) -> None:
        """Make the folder with links to this host's shards and with the headers of the others; collective.

        Raises RunError on all ranks alike.
        """
        all_succeed(self._link if self._hosts.is_first else lambda: None, self._ranks)
        for number, record in enumerate(self._records):
            holders = self._candidate.holders[record.file]
            if len(set(holders)) < self._hosts.count:
                self._share_header(record, source=self._hosts.reader_on(holders[0], number))

    def fetch(self, checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
        """Fetch what the ranks of this host need for their pieces and this host lacks; collective.

        Raises RunError on all ranks alike.
        """
        copies, _ = plan(checkpoint, pieces)  # its problems are those of the load that follows
        wanted = self._ranks.gather_json(_ranges(copy.source for copy in copies))
        parts = self._parts(wanted)

        def check_room() -> None:
            here = self._hosts.ranks_on(self._hosts.own)
            needed = sum(part.nbytes for part in parts if part.target in here)
            free, of = free_memory(self._base.parent) if needed else (0, "")
            if free < needed:
                raise SaveError(f"{in_units(needed)} of other hosts are needed and {in_units(free)} are free in {of}")

        all_succeed(check_room, self._ranks)
        failure = transfer(
            parts,
            self._ranks,
            read=lambda part, buffer: read_from(self._source / part.file, part.start, buffer),
            write=lambda part, buffer: write_into(self.folder / part.file, part.start, buffer),
        )
        failure = first_failure(failure, self._ranks)
        if failure is not None:
            raise RunError(failure)

    def _parts(self, wanted: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> list[FilePart]:
        """Return the transfers for the byte ranges [start, end) that ranks want of shards, each host's once."""
        parts: list[FilePart] = []
        for host in range(self._hosts.count):
            for number, record in enumerate(self._records):
                holders = self._candidate.holders[record.file]
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
        disk.remove_tree(self._base / VIEW)
        disk.make_folder(self.folder)
        disk.write_text(self.folder / MANIFEST_FILE, self._text)
        disk.write_text(self.folder / COMMIT_FILE, self._candidate.commit)
        for file, holders in self._candidate.holders.items():
            if self._hosts.own in holders:
                try:
                    os.link(self._source / file, self.folder / file, follow_symlinks=False)
                except OSError as error:
                    raise SaveError(f"{self.folder / file}: cannot be linked ({error.strerror})") from error

    def _share_header(self, record: ShardRecord, *, source: int) -> None:
        """Send a shard's header from a rank that has it to the hosts that lack it; collective. Raises RunError."""
        header = b""

        def read() -> None:
            nonlocal header
            if self._ranks.rank == source:
                header = _header(self._source / record.file, record)

        all_succeed(read, self._ranks)
        size = int(self._ranks.broadcast(torch.tensor(len(header)), source=source))
        sent = torch.zeros(size, dtype=torch.uint8)
        if self._ranks.rank == source:
            sent = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        received = self._ranks.broadcast(sent, source=source)
        lacks = self._hosts.own not in self._candidate.holders[record.file]

        def write() -> None:
            if lacks and self._hosts.is_first:
                fd = disk.open_new(self.folder / record.file)
                try:
                    os.ftruncate(fd, record.nbytes)
                    disk.write_at(fd, 0, [received.numpy().data])
                finally:
                    os.close(fd)

        all_succeed(write, self._ranks)


def _verify_shard(folder: Path, record: ShardRecord, manifest: Manifest) -> None:
    """Compare every checksum of a shard. Raises UserError."""
    pieces = read_shard(folder / record.file, record, manifest)
    with Checkpoint(folder, manifest, {}) as checkpoint:
        checkpoint.verify(pieces)


def _header(path: Path, record: ShardRecord) -> bytes:
    """Return the bytes of a shard before its data. Raises UserError."""
    fd, _ = open_regular(path)
    try:
        prefix = read_at(fd, 0, 8, path)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else record.nbytes
        return prefix + read_at(fd, 8, min(length, record.nbytes), path)
    finally:
        os.close(fd)


def _ranges(pieces: Iterable[StoredPiece]) -> dict[str, list[list[int]]]:
    """Return the byte ranges [start, end) of pieces by the name of their file, as few as possible."""
    ranges: dict[str, list[list[int]]] = {}
    for piece in pieces:
        ranges.setdefault(piece.file.name, []).append([piece.offset, piece.offset + piece.spec.nbytes])
    return {file: _joined(those) for file, those in ranges.items()}


def _joined(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return ranges without those that touch or overlap, in order."""
    joined: list[list[int]] = []
    for start, end in sorted(map(tuple, ranges)):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def _text(path: Path, limit: int) -> str:
    return read_file(path, limit).decode(errors="replace")
