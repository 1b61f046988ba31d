"""Checkpoint store of a run: saving inline or in the background, resuming, retention, Hugging Face exports."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from mega_rl import disk
from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import RunLock
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, now
from mega_rl.checkpoint.format.shards import ShardRecord, shard_name
from mega_rl.checkpoint.memory.store import MemoryCheckpoints
from mega_rl.checkpoint.resume import resume
from mega_rl.checkpoint.run_state import RunState
from mega_rl.checkpoint.saving import SaveJob, Writer
from mega_rl.config.schema import CheckpointConfig
from mega_rl.disk import SaveError
from mega_rl.engines.base import ModelEngine
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import all_succeed, broadcast_json, failure_of, first_failure, run_on_one
from mega_rl.protocols import Ranks
from mega_rl.tracking import progress
from mega_rl.types import JsonObject, Metrics

log = logging.getLogger(__name__)

HEADER_BYTES = 1 << 20  # per rank, next to its tensors; a generous guess for the free-space check
BEAT_S = 1.0  # between collectives while ranks wait, so that a save may take longer than a collective's deadline
CLOSE_S = 30.0  # for a pending save at the end of a run


@dataclass
class _Save:
    """State of a pending save."""

    step: int
    begin: float
    nbytes: int  # over all ranks
    done: bool = False  # whether this rank has done its part


class RunCheckpoints:
    """Checkpoints of a run: one folder per step under `root`, complete or ignored.

    At most one save is pending. A failed save is reported on all ranks, its folder removed and the last good checkpoint
    kept; `settings.on_error` decides whether the run then continues.
    """

    def __init__(self, root: Path, run: RunState, settings: CheckpointConfig) -> None:
        """run: engines and rank states may be added until `restore`; the lock is taken before engines exist."""
        self._root = root.absolute()
        self.run = run
        self._ranks = run.ranks
        self._settings = settings
        self._memory = MemoryCheckpoints(self._root, run, settings)
        self._lock: RunLock | None = None
        self._restored: Path | None = None  # the checkpoint on disk that the run resumed from
        self._restored_step: int | None = None  # step of the checkpoint in memory that the run resumed from
        self._writing = Writer(copies=settings.async_save)
        self._current: _Save | None = None
        self._failed_saves = 0
        self._lost = ""  # message of the last save, if it failed
        self._metrics: Metrics = {}

    def __enter__(self) -> RunCheckpoints:
        """Take the lock of the run's checkpoints and return the store."""
        self.lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the store, without waiting for a pending save after a second Ctrl-C.

        Frees the memory tier at the end of a run whose last save succeeded. Raises RunError, on all ranks, at the
        regular end of a run whose last save failed with `on_error` continue: the run's end is in no checkpoint on disk.
        """
        self._memory.end(keep=kind is not None or self._current is not None or bool(self._lost))
        self.close(patience_s=0.0 if kind is KeyboardInterrupt else CLOSE_S)
        if kind is None and self._lost and self._settings.on_error == "continue":
            raise RunError(f"{self._lost}; it was the run's last one: the same command resumes from the one before it")

    def lock(self) -> None:
        """Keep other runs from writing under `root` until `close`; collective. Raises UserError on all ranks."""

        def take() -> None:
            if self._ranks.rank == 0:
                lock = RunLock(self._root)
                lock.take()
                self._lock = lock

        all_succeed(take, self._ranks, error=UserError)

    def save(self, step: int, state: JsonObject, *, metrics: Metrics | None = None) -> None:
        """Start to save the state after `step` steps; complete on return unless `async_save`; collective.

        Waits for a pending save first. `metrics`: of the step; finite ones go into the manifest.

        Raises RunError: on all ranks, when this save or the one before failed and `on_error` is stop.
        """
        begin = time.monotonic()
        self.finish()
        settings, rank = self._settings, self._ranks.rank
        pieces, numbers = self.run.collect()
        sizes = self._ranks.gather_json(sum(piece.data.nbytes for piece in pieces) if pieces else -1)
        job = SaveJob(folders.temporary(self._root, step), shard_name(rank), settings.timeout_s)
        if rank == 0:
            shards = [shard_name(other) for other, size in enumerate(sizes) if size >= 0]
            record = self.run.record(step, state, metrics or {}, numbers)
            job = job._replace(shards=shards, publish=partial(_publish, self._root, settings, record))
        save = self._current = _Save(step, begin, sum(size for size in sizes if size >= 0))
        failure = failure_of(lambda: self._make_room(save), self._ranks)
        if failure is None:
            failure = failure_of(lambda: self._writing.start(job, pieces), self._ranks)
        if failure is not None:
            self._fail(failure)
        elif not settings.async_save:
            self.finish()
        self._metrics["checkpoint/stall_s"] = time.monotonic() - begin

    def save_in_memory(self, step: int, state: JsonObject) -> None:
        """Save the state after `step` steps in the hosts' memory; complete on return; collective.

        Does nothing without `memory.interval`, or after a failure that the run survived. Raises RunError like `save`.
        """
        self._metrics |= self._memory.save(step, state)

    def poll(self) -> Metrics:
        """Return the metrics of saves since the last call; collective while one is pending.

        `checkpoint/seconds` and `checkpoint/bytes` of a completed save, `checkpoint/stall_s` that training waited for
        one, `checkpoint/failed_saves` of the run after a failure; `checkpoint/memory_s` and `checkpoint/memory_bytes`
        of a save in memory. Raises RunError like `save`.
        """
        self._look(0.0)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def finish(self) -> None:
        """Wait for a pending save, within its deadline; collective. Raises RunError like `save`."""
        while self._current is not None:
            if self._ranks.rank == 0:
                files = folders.temporary(self._root, self._current.step).glob("*")
                with contextlib.suppress(OSError):  # files may be renamed in between
                    progress.report(sum(file.stat().st_size for file in files), self._current.nbytes, unit="B")
            self._look(BEAT_S)

    def close(self, *, patience_s: float = CLOSE_S) -> None:
        """End the writer and release the lock; no collective, may be called twice.

        After an error a save may be pending. Waits up to `patience_s` for it: it completes if all ranks come here.
        """
        if self._current is not None and not self._current.done:
            log.warning("the run ends during the save of step %d: waiting up to %g s", self._current.step, patience_s)
            try:
                if self._writing.wait(patience_s) is None:
                    log.error("the save of step %d did not end in time and is lost", self._current.step)
            except SaveError as error:
                log.error("the save of step %d is lost: %s", self._current.step, error)
        self._current = None
        self._writing.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def restore(self) -> Manifest | None:
        """Fill engines and rank states; return the manifest or None to start afresh; collective.

        With `resume=auto` a checkpoint in the hosts' memory is preferred if its step is later than all on disk.

        Raises UserError: on all ranks: the checkpoint is damaged or not complete, or is of a run with another identity
        or other models.
        """
        if self._settings.resume == "auto":
            newest = run_on_one(lambda: _newest_step(self._root), self._ranks)
            manifest = self._memory.restore(newer_than=newest)
            if manifest is not None:
                self._restored_step = manifest.step
                return manifest
        restored = resume(self._root, self.run, self._settings)
        if restored is None:
            return None
        self._restored, manifest = restored
        return manifest

    def move_earlier_run(self, run_dir: Path) -> None:
        """Move the files of another history out of the run folder; collective.

        Call it after `restore`, under the lock. A run that resumes from a checkpoint in its folder, or from memory,
        moves only later checkpoints; any other run moves all files of an earlier run. Removes other histories from
        memory. Raises UserError on all ranks.
        """

        def move() -> None:
            if self._ranks.rank == 0:
                folders.begin_history(run_dir, self._restored, step_in_memory=self._restored_step)

        all_succeed(move, self._ranks, error=UserError)
        self._memory.begin(restored=self._restored_step is not None)

    def _make_room(self, save: _Save) -> None:
        """Make an empty temporary folder and check the free space, on rank 0. Raises SaveError."""
        if self._ranks.rank != 0:
            return
        folders.begin(self._root, save.step)
        needed, free = save.nbytes + HEADER_BYTES * self._ranks.size, disk.free_bytes(self._root)
        if free < needed:
            raise SaveError(
                f"{self._root}: {needed / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB are free; "
                "make room, or set checkpoint.keep to less"
            )

    def _look(self, wait_s: float) -> None:
        """Settle a pending save if it has ended on all ranks, or failed on any; collective."""
        save = self._current
        if save is None:
            return
        failure = None
        if not save.done:
            try:
                notes = self._writing.wait(wait_s)
            except SaveError as error:
                failure = str(error)
            else:
                save.done = notes is not None
                for note in notes or ():
                    log.warning("%s", note)
        if not save.done and failure is None and time.monotonic() > save.begin + self._settings.timeout_s + BEAT_S:
            failure = f"rank {self._ranks.rank} did not end within checkpoint.timeout_s={self._settings.timeout_s:g}"
        running, failed = self._ranks.max(torch.tensor([int(not save.done), int(failure is not None)])).tolist()
        if failed:
            self._fail(first_failure(failure, self._ranks) or "")
        elif not running:
            self._current, self._lost = None, ""
            seconds, folder = time.monotonic() - save.begin, folders.final(self._root, save.step)
            self._metrics |= {"checkpoint/seconds": seconds, "checkpoint/bytes": float(save.nbytes)}
            if self._ranks.rank == 0:
                log.info("saved %s (%.3f GB in %.1f s)", folder, save.nbytes / 1e9, seconds)

    def _fail(self, message: str) -> None:
        """Settle a save that failed, on all ranks; collective."""
        save, self._current = self._current, None
        assert save is not None
        self._writing.stop()
        self._ranks.sum(torch.zeros(1))  # a barrier: no rank writes any more
        self._failed_saves += 1
        self._metrics["checkpoint/failed_saves"] = float(self._failed_saves)
        self._lost = text = f"the checkpoint of step {save.step} failed: {message}"
        if self._ranks.rank == 0:
            try:
                disk.remove_tree(folders.temporary(self._root, save.step))
            except SaveError as error:
                log.warning("its remains could not be removed: %s", error)
        if self._settings.on_error == "stop":
            raise RunError(text)
        if self._ranks.rank == 0:
            log.error("%s; training continues", text)


def _publish(
    root: Path,
    settings: CheckpointConfig,
    record: JsonObject,
    tensors: dict[str, WholeTensor],
    shards: tuple[ShardRecord, ...],
) -> list[str]:
    """Publish a checkpoint, then remove old ones; return the problems of the removal."""
    folders.publish(root, Manifest(**record, saved_at=now(), tensors=tensors, shards=shards))
    kept = {name: getattr(settings, name) for name in ("keep", "keep_interval", "keep_best")}
    try:
        folders.remove([path for path, _ in folders.surplus(root, newest_step=record["step"], **kept)])
    except (SaveError, UserError) as error:
        return [f"old checkpoints could not be removed: {error}"]
    return []


def _newest_step(root: Path) -> int:
    """Return the newest step on disk that is or was complete, else -1."""
    try:
        paths = (*folders.complete(root), *dict(folders.damaged(root)))
    except UserError:  # `resume` raises it again
        return -1
    return max(map(folders.step_of, paths), default=-1)


@dataclass(frozen=True)
class HfExports:
    """Export of an engine's weights to `root/step_000010`, replacing the folder of an abandoned history."""

    engine: ModelEngine
    root: Path
    source: Path  # folder of the model that the run began with
    ranks: Ranks  # all ranks of the run
    on_error: str  # continue or stop

    def __call__(self, done: int) -> Metrics:
        """Write the weights after `done` steps; collective. Returns the losses of a quantised source's format.

        Raises RunError: on all ranks, when it failed and `on_error` is stop.
        """
        folder = self.root / f"step_{done:06d}"
        losses: list[float] = []
        message = failure_of(lambda: losses.extend(self.engine.save_hf(folder, source=self.source)), self.ranks)
        if message is None:
            losses = broadcast_json(losses, self.ranks)  # none: the source is not quantised
            if not losses:
                return {}
            return {"checkpoint/quantisation_loss_max": max(losses), "checkpoint/quantisation_loss_mean": fmean(losses)}
        text = f"the Hugging Face checkpoint of step {done} failed: {message}"
        if self.on_error == "stop":
            raise RunError(text)
        if self.ranks.rank == 0:
            log.error("%s; training continues", text)
        return {}
