"""Checkpoints in the hosts' memory: shards, copies on the next host, one manifest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from mega_rl import disk
from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, now
from mega_rl.checkpoint.format.shards import ShardRecord, checksum, shard_name
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.memory.hosts import Host, Hosts, MemoryPlace, send_files, this_host
from mega_rl.checkpoint.memory.place import free_memory
from mega_rl.checkpoint.memory.recovery import VIEW, restore_newest
from mega_rl.checkpoint.run_state import RunState
from mega_rl.checkpoint.saving import merge_layouts, write_part
from mega_rl.config.schema import CheckpointConfig
from mega_rl.disk import SaveError
from mega_rl.errors import RunError, in_units
from mega_rl.parallel.agreement import all_succeed, broadcast_json, failure_of, run_on_all
from mega_rl.parallel.boxes import Piece
from mega_rl.parallel.comm import FilePart, cut
from mega_rl.types import JsonObject, Metrics

log = logging.getLogger(__name__)

SPARE = 0.05  # share of the written bytes that stays free for the run itself
HEADER_BYTES = 1 << 20  # per rank, next to its tensors

WrittenPart = tuple[ShardRecord, str]  # a rank's shard, and its layout as text


class MemoryCheckpoints:
    """At most two checkpoints per host: the newest complete one and a pending one.

    A host holds the shards of its ranks and, with several hosts, a copy of those of the host before it. The copy to the
    tmpfs is the snapshot, so training waits for it. All methods except `end` are collective. After a failed save the
    run continues without the tier, or ends, as `checkpoint.on_error` says.
    """

    host: ClassVar[Callable[[], Host]] = staticmethod(this_host)

    def __init__(self, root: Path, run: RunState, settings: CheckpointConfig) -> None:
        """root: the run's folder of checkpoints on disk, whose lock guards those in memory too."""
        self._root = root
        self._run = run
        self._ranks = run.ranks
        self._on_error = settings.on_error
        self._is_on = settings.memory.interval > 0
        self._is_ready = False  # whether `save` may write
        self._place: MemoryPlace | None = None
        self._held: int | None = None  # step of the newest complete one
        self._layouts: tuple[list[str], dict[str, WholeTensor]] | None = None  # checksums of layouts; their tensors

    def restore(self, *, newer_than: int) -> Manifest | None:
        """Fill engines and rank states from the newest whole checkpoint after `newer_than`.

        newer_than: newest step on disk, -1 without one. Ignores torn, damaged and foreign checkpoints, with a line for
        each. None leaves the engines as they are.
        """
        here = self._place = self._locate()
        if not here.history:
            return None
        manifest = restore_newest(here, self._run, newer_than=newer_than)
        self._held = None if manifest is None else manifest.step
        return manifest

    def begin(self, *, restored: bool) -> None:
        """Make this history's folder and remove those of others; after `restore`, under the run's lock.

        restored: the run resumes from memory, so it stays the same history. Raises RunError as `save`.
        """
        before = self._place or self._locate()
        history = before.history
        if not restored:
            history = broadcast_json(place.new_history() if self._is_on else "", self._ranks)
        folder = before.folder.with_name(f"{before.folder.name.partition('-')[0]}-{history}")
        here = self._place = before._replace(history=history, folder=folder)

        def prepare() -> None:
            if self._ranks.rank == 0 and history != before.history:
                place.write_history(self._root, history)
            if here.hosts.is_first:
                place.remove_others(folder)
                if restored and not place.unusable(folder):
                    keep_only(folder, self._held)
                if self._is_on:
                    place.make(folder)

        failure = failure_of(prepare, self._ranks)
        if failure is not None:
            self._give_up(f"there are no checkpoints in memory: {failure}")
        else:
            self._is_ready = self._is_on

    def save(self, step: int, state: JsonObject) -> Metrics:
        """Save the state after `step` steps; complete when it returns.

        Returns `checkpoint/memory_s` and `checkpoint/memory_bytes`; nothing after a failure.

        Raises RunError: on all ranks, when it failed and `on_error` is stop.
        """
        here = self._place
        if not self._is_ready or here is None:
            return {}
        begin = time.monotonic()
        try:
            pieces, numbers = self._run.collect()
            record = self._run.record(step, state, {}, numbers) | {"saved_at": now()}
            record = broadcast_json(record, self._ranks)
            sizes = self._ranks.gather_json(sum(piece.data.nbytes for piece in pieces) if pieces else -1)
            all_succeed(lambda: self._make_room(here, step, sizes), self._ranks)
            shards = self._write(here, step, pieces, record)
            # Only now, when every host has the new one: at every moment one of the two is on all hosts.
            all_succeed(lambda: keep_only(here.folder, step) if here.hosts.is_first else None, self._ranks)
        except RunError as error:
            self._give_up(f"the checkpoint of step {step} in memory failed: {error}")
            return {}
        self._held = step
        nbytes = sum(shard.nbytes for shard in shards)
        return {"checkpoint/memory_s": time.monotonic() - begin, "checkpoint/memory_bytes": float(nbytes)}

    def end(self, *, keep: bool) -> None:
        """Remove this host's checkpoints of the run; no collective. keep: leave them for the next start."""
        here, self._place, self._is_ready = self._place, None, False
        if here is None or not here.history or not here.hosts.is_first or place.unusable(here.folder):
            return
        if keep:
            if self._held is not None and self._ranks.rank == 0:
                log.warning("the checkpoint of step %d stays in memory, in %s", self._held, here.folder)
            return
        try:
            place.remove(here.folder)
        except SaveError as error:
            log.warning("a checkpoint in memory could not be removed: %s", error)

    def _locate(self) -> MemoryPlace:
        """Return the place of the history that the run folder names; collective."""
        is_first = self._ranks.rank == 0
        names = [os.path.realpath(self._root.parent), place.read_history(self._root)] if is_first else []
        run_dir, history = broadcast_json(names, self._ranks)
        host = type(self).host()
        return MemoryPlace(history, Hosts.gather(host, self._ranks), place.folder_of(host.shm, run_dir, history))

    def _give_up(self, text: str) -> None:
        """Continue without checkpoints in memory, and free it; raises RunError with `on_error=stop`."""
        if self._on_error == "stop":
            raise RunError(text)
        self.end(keep=False)
        self._held = None
        if self._ranks.rank == 0:
            log.error("%s; training continues without them", text)

    def _make_room(self, here: MemoryPlace, step: int, sizes: Sequence[int]) -> None:
        """Make the temporary folder of this host if there is memory for it. Raises SaveError."""
        hosts = here.hosts
        if not hosts.is_first:
            return
        folders.begin(here.folder, step)
        local = hosts.ranks_on(hosts.own)
        kept = [*local, *(rank for rank in range(self._ranks.size) if hosts.replica_of(rank) in local)]
        needed = round((1 + SPARE) * sum(sizes[rank] + HEADER_BYTES for rank in kept if sizes[rank] >= 0))
        needed *= 1 if self._held is not None else 2  # the next one is written next to this one
        free, of = free_memory(here.folder)
        if free < needed:
            raise SaveError(
                f"{type(self).host().name}: {in_units(needed)} are needed and {in_units(free)} are free in {of}; "
                "give it more, or set checkpoint.memory.interval=0"
            )

    def _write(
        self, here: MemoryPlace, step: int, pieces: Sequence[Piece], record: JsonObject
    ) -> tuple[ShardRecord, ...]:
        """Write, copy and publish the shards on all hosts. Raises RunError on all ranks."""
        work = folders.temporary(here.folder, step)
        own = shard_name(self._ranks.rank)

        part = run_on_all(lambda: write_part(work / own, pieces) if pieces else None, self._ranks)
        shards, tensors = self._gathered(part, work)
        if here.hosts.count > 1:
            self._copy(here.hosts, work, shards)
        manifest = Manifest(**record, tensors=tensors, shards=shards)

        def publish() -> None:
            if here.hosts.is_first:
                folders.publish(here.folder, manifest)

        all_succeed(publish, self._ranks)
        return shards

    def _gathered(self, part: WrittenPart | None, work: Path) -> tuple[tuple[ShardRecord, ...], dict[str, WholeTensor]]:
        """Return the shards of all ranks and their tensors; collective. Raises SaveError on all ranks.

        Layouts are the same in almost every step, so ranks exchange them only when one has changed.
        """
        own = None if part is None else [part[0].to_json(), checksum(part[1].encode())]
        records = [record for record in self._ranks.gather_json(own) if record is not None]
        digests = [digest for _, digest in records]
        if self._layouts is None or self._layouts[0] != digests:
            texts = self._ranks.gather_json("" if part is None else part[1])
            self._layouts = digests, merge_layouts(text for text in texts if text)
        return tuple(ShardRecord.from_json(shard, work) for shard, _ in records), self._layouts[1]

    def _copy(self, hosts: Hosts, work: Path, shards: Sequence[ShardRecord]) -> None:
        """Send every shard to the next host. Raises RunError on all ranks."""
        ranks = self._ranks
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
        send_files(parts, ranks, source=work, target=work)


def keep_only(folder: Path, step: int | None) -> None:
    """Remove the checkpoints of a folder except that of one step. Raises SaveError."""
    disk.remove_tree(folder / VIEW)
    folders.remove([p for p in folders.entries(folder) if folders.is_step_folder(p) and folders.step_of(p) != step])
