"""Checkpoints of a run in its hosts' memory, from the first step to the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from mega_rl.checkpoint.format.manifest import Manifest
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.memory.hosts import Host, Hosts, MemoryPlace, this_host
from mega_rl.checkpoint.memory.restoring import restore_newest
from mega_rl.checkpoint.memory.writing import MemoryWriter, keep_only
from mega_rl.checkpoint.run_state import RunState
from mega_rl.config.schema import CheckpointConfig
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import broadcast_json, failure_of
from mega_rl.storage.disk import SaveError
from mega_rl.types import JsonObject, Metrics

log = logging.getLogger(__name__)


class MemoryCheckpoints:
    """Two checkpoints at most on every host: the newest complete one and the one that is being written.

    A host holds the shards of its ranks and, with several hosts, a copy of those of the host before it. All methods but
    `end` are collective. After a failed save the run goes on without it, or ends, as `checkpoint.on_error` says.
    """

    host: ClassVar[Callable[[], Host]] = staticmethod(this_host)

    def __init__(self, root: Path, run: RunState, settings: CheckpointConfig) -> None:
        """root: the run's folder of checkpoints on disk, whose lock guards those in memory too."""
        self._root = root
        self._run = run
        self._ranks = run.ranks
        self._on_error = settings.on_error
        self._is_on = settings.memory.interval > 0
        self._place: MemoryPlace | None = None
        self._writer: MemoryWriter | None = None
        self._held: int | None = None  # step of the newest complete one

    def restore(self, *, newer_than: int) -> Manifest | None:
        """Fill engines and rank states from the newest checkpoint that memory has whole, if it is of a later step.

        newer_than: newest step on disk, -1 without one. What is torn, damaged or of another run is ignored, with a line
        for each. None leaves the engines as they are.
        """
        here = self._place = self._locate()
        if not here.history:
            return None
        manifest = restore_newest(here, self._run, newer_than=newer_than)
        self._held = None if manifest is None else manifest.step
        return manifest

    def begin(self, *, restored: bool) -> None:
        """Make this history's folder and remove those of others; after `restore`, under the run's lock.

        restored: the run goes on from memory, so it stays the same history. Raises RunError as `save`.
        """
        before = self._place or self._locate()
        history = before.history
        if not restored:
            history = broadcast_json(place.new_history() if self._is_on else "", self._ranks)
        folder = place.folder_of(self._shm, before.run_dir, history)
        here = self._place = before._replace(history=history, folder=folder)

        def prepare() -> None:
            if self._ranks.rank == 0 and history != before.history:
                place.write_history(self._root, history)
            if here.hosts.is_first:
                place.remove_others(self._shm, here.run_dir, history=history)
                if restored and not place.unusable(folder):
                    keep_only(folder, self._held)
                if self._is_on:
                    place.make(folder, here.run_dir)

        failure = failure_of(prepare, self._ranks)
        if failure is not None:
            self._give_up(f"there are no checkpoints in memory: {failure}")
        elif self._is_on:
            self._writer = MemoryWriter(folder, here.hosts, self._run)

    def save(self, step: int, state: JsonObject) -> Metrics:
        """Save the state after `step` steps; complete when it returns.

        Returns `checkpoint/memory_s` and `checkpoint/memory_bytes`; nothing after a failure.

        Raises:
            RunError: on all ranks, when it failed and `on_error` is stop.
        """
        if self._writer is None:
            return {}
        begin = time.monotonic()
        try:
            nbytes = self._writer.save(step, state, beside=self._held is not None)
        except RunError as error:
            self._give_up(f"the checkpoint of step {step} in memory failed: {error}")
            return {}
        self._held = step
        return {"checkpoint/memory_s": time.monotonic() - begin, "checkpoint/memory_bytes": float(nbytes)}

    def end(self, *, keep: bool) -> None:
        """Remove what this host holds of the run; no collective. keep: leave it, for the next start to go on from."""
        here, self._place, self._writer = self._place, None, None
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

    @property
    def _shm(self) -> Path:
        return type(self).host().shm

    def _locate(self) -> MemoryPlace:
        """Return the place of the history that the run folder names; collective."""
        is_first = self._ranks.rank == 0
        names = [os.path.realpath(self._root.parent), place.read_history(self._root)] if is_first else []
        run_dir, history = broadcast_json(names, self._ranks)
        hosts = Hosts.gather(type(self).host(), self._ranks)
        return MemoryPlace(run_dir, history, hosts, place.folder_of(self._shm, run_dir, history))

    def _give_up(self, text: str) -> None:
        """Go on without checkpoints in memory, and free it; raises RunError with `on_error=stop`."""
        if self._on_error == "stop":
            raise RunError(text)
        self.end(keep=False)
        self._held = None
        if self._ranks.rank == 0:
            log.error("%s; training goes on without them", text)
