"""Saving into the hosts' memory: every rank's shard, its copy on the next host, one manifest on all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, now
from mega_rl.checkpoint.format.shards import ShardRecord, checksum, shard_name
from mega_rl.checkpoint.memory.files import read_from, write_into
from mega_rl.checkpoint.memory.hosts import Hosts
from mega_rl.checkpoint.memory.recovery import VIEW
from mega_rl.checkpoint.memory.space import free_memory
from mega_rl.checkpoint.run_state import RunState
from mega_rl.checkpoint.saving.job import merge_layouts, write_part
from mega_rl.checkpoint.saving.staging import direct, plan
from mega_rl.errors import in_units
from mega_rl.parallel.agreement import all_succeed, broadcast_json, run_on_all
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.transfers import FilePart, cut, transfer
from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError
from mega_rl.types import JsonObject, Piece

SPARE = 0.05  # of what is written, left free for the run itself
HEADER_BYTES = 1 << 20  # of each rank, beside its tensors

WrittenPart = tuple[ShardRecord, str]  # a rank's shard, and its layout as text


class MemoryWriter:
    """Writer of a run's checkpoints into one folder of each host.

    The copy to the tmpfs is the snapshot: it is made in the step, since a copy to stage it would take as long and as
    much memory again.
    """

    def __init__(self, folder: Path, hosts: Hosts, run: RunState) -> None:
        """folder: on this host; it must be there."""
        self._folder = folder
        self._hosts = hosts
        self._run = run
        self._ranks = run.ranks
        self._layouts: tuple[list[str], dict[str, WholeTensor]] | None = None  # checksums of layouts; what they make up

    def save(self, step: int, state: JsonObject, *, beside: bool) -> int:
        """Save the state after `step` steps and remove older ones; return the bytes over all ranks; collective.

        beside: memory holds an older one. Raises RunError on all ranks alike.
        """
        pieces, numbers = self._run.collect()
        record = broadcast_json(self._run.record(step, state, {}, numbers) | {"saved_at": now()}, self._ranks)
        sizes = self._ranks.gather_json(sum(piece.data.nbytes for piece in pieces) if pieces else -1)
        all_succeed(lambda: self._make_room(step, sizes, beside=beside), self._ranks)
        shards = self._write(step, pieces, record)
        # Only now, when every host has the new one: at every moment one of the two is on all hosts.
        all_succeed(lambda: self._retire(step), self._ranks)
        return sum(shard.nbytes for shard in shards)

    def _make_room(self, step: int, sizes: Sequence[int], *, beside: bool) -> None:
        """Make the temporary folder of this host if there is memory for it. Raises SaveError."""
        hosts = self._hosts
        if not hosts.is_first:
            return
        folders.begin(self._folder, step)
        local = hosts.ranks_on(hosts.own)
        kept = [*local, *(rank for rank in range(self._ranks.size) if hosts.replica_of(rank) in local)]
        needed = round((1 + SPARE) * sum(sizes[rank] + HEADER_BYTES for rank in kept if sizes[rank] >= 0))
        needed *= 1 if beside else 2  # the next one is written beside this one
        free, of = free_memory(self._folder)
        if free < needed:
            raise SaveError(
                f"{hosts.names[hosts.own]}: {in_units(needed)} are needed and {in_units(free)} are free in {of}; "
                "give it more, or set checkpoint.memory.interval=0"
            )

    def _write(self, step: int, pieces: Sequence[Piece], record: JsonObject) -> tuple[ShardRecord, ...]:
        """Write, copy and publish the shards on all hosts. Raises RunError on all ranks alike."""
        work = folders.temporary(self._folder, step)
        laid_out, places, _ = plan(pieces)
        own = shard_name(self._ranks.rank)

        def write() -> WrittenPart | None:
            return write_part(work / own, places, direct(laid_out)) if pieces else None

        shards, tensors = self._gathered(run_on_all(write, self._ranks), work)
        self._copy(work, shards)
        manifest = Manifest(**record, tensors=tensors, shards=shards)

        def publish() -> None:
            if self._hosts.is_first:
                folders.publish(self._folder, step, manifest)

        all_succeed(publish, self._ranks)
        return shards

    def _gathered(self, part: WrittenPart | None, work: Path) -> tuple[tuple[ShardRecord, ...], dict[str, WholeTensor]]:
        """Return the shards of all ranks, and the tensors that they make up; collective.

        Layouts are the same in almost every step, so they are exchanged when one has changed. Raises SaveError on all
        ranks alike.
        """
        own = None if part is None else [part[0].to_json(), checksum(part[1].encode())]
        records = [record for record in self._ranks.gather_json(own) if record is not None]
        digests = [digest for _, digest in records]
        if self._layouts is None or self._layouts[0] != digests:
            texts = self._ranks.gather_json("" if part is None else part[1])
            self._layouts = digests, merge_layouts(text for text in texts if text)
        return tuple(ShardRecord.from_json(shard, work) for shard, _ in records), self._layouts[1]

    def _copy(self, work: Path, shards: Sequence[ShardRecord]) -> None:
        """Send every shard to the next host. Raises RunError on all ranks alike."""
        hosts, ranks = self._hosts, self._ranks
        if hosts.count == 1:
            return
        assert isinstance(ranks, GroupRanks), "several hosts have several ranks"
        by_name = {shard_name(rank): rank for rank in range(ranks.size)}
        parts: list[FilePart] = []
        for shard in shards:
            source = by_name[shard.file]
            target = hosts.replica_of(source)
            assert target is not None
            parts += cut(source, target, shard.file, 0, shard.nbytes)

        def make() -> None:
            for file in {part.file for part in parts if part.target == ranks.rank}:
                disk.close(disk.open_new(work / file))

        all_succeed(make, ranks)
        failure = transfer(
            parts,
            ranks,
            read=lambda part, buffer: read_from(work / part.file, part.start, buffer),
            write=lambda part, buffer: write_into(work / part.file, part.start, buffer),
        )
        all_succeed(lambda: _raise(failure), ranks)

    def _retire(self, step: int) -> None:
        if self._hosts.is_first:
            keep_only(self._folder, step)


def keep_only(folder: Path, step: int | None) -> None:
    """Remove the checkpoints of a folder but that of one step. Raises SaveError."""
    disk.remove_tree(folder / VIEW)
    folders.remove([p for p in folders.entries(folder) if folders.is_step_folder(p) and folders.step_of(p) != step])


def _raise(failure: str | None) -> None:
    if failure is not None:
        raise SaveError(failure)
