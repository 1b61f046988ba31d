"""Runs that are killed at one point, on each rank of a launch: SIGKILL, as a node's failure or a scheduler's.

`Kill` says where. Run as a module this is a background writer that takes its rank with it: the arguments are where,
then the writer's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from mega_rl.checkpoint.saving import job
from mega_rl.config.schema import Config
from mega_rl.storage import disk
from tests.helpers.engines import exported, replaced
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS, BEFORE, STEP = 4, 2, 3  # of a run; done before a run that is killed; whose save it is killed in
RANKS, LAYOUT = 2, "dp2"
# The system calls by which a save changes the disk: `disk` makes all of them through its name `os`.
CALLS = ("mkdir", "open", "pwritev", "fsync", "rename", "unlink", "rmdir")


class Kill(NamedTuple):
    """A point of a run; nowhere by default."""

    rank: int = 0
    background: bool = False  # the save is one in the background; operations are the writer's
    operation: int = -1  # 2 i: before operation i of the save after STEP; 2 i + 1: after it
    phase: str = ""  # of the trainer's step
    step: int = 0  # from 0
    at_end: bool = False  # of the phase


def config_of(folder: Path, name: str, *, background: bool, steps: int) -> Config:
    """PPO with a critic, a checkpoint after every step."""
    config = run_config(folder, LAYOUT, "ppo")
    config = replaced(config, "data", val_size=1)
    config = replaced(config, "rollout", n=2, max_new_tokens=6)
    config = replaced(config, "optim", schedule="linear", warmup_steps=1)
    config = replaced(config, "checkpoint", save_interval=1, keep=2, async_save=background, timeout_s=20.0)
    run_dir, sizes = str(folder / name), {"prompts_per_step": 4, "minibatch_size": 2}
    return replaced(config, "trainer", run_dir=run_dir, steps=steps, timeout_s=20.0, **sizes)


def prepare_run(rank: int, folder: str, name: str) -> None:
    """A run of BEFORE steps."""
    train(rank, folder, name, Kill(), BEFORE)


def train(rank: int, folder: str, name: str, kill: Kill, steps: int = STEPS) -> dict[str, Any]:
    """Trains on to the end, or to where `kill` says.

    Returns the first step, the weights at the end and the operations on files of the save after STEP.
    """
    from mega_rl.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.assemble import build_trainer, session
    from mega_rl.checkpoint.saving.writer import WriterProcess

    mine = kill if rank == kill.rank else Kill(background=kill.background)
    config = config_of(Path(folder), name, background=kill.background, steps=steps)
    watch = Watch(-1 if kill.background else mine.operation, die)
    log = Path(folder) / f"operations{rank}"
    if kill.background:
        module = "tests.unit_tests.checkpoint.kill_cases"
        command = [sys.executable, "-m", module, str(mine.operation), str(log)]
        WriterProcess.command = command
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        save = trainer.checkpoints.save

        def watched(step: int, *args: Any, **kwargs: Any) -> None:
            with watch.armed() if step == STEP else ExitStack():
                save(step, *args, **kwargs)

        trainer.checkpoints.save = watched  # type: ignore[method-assign]
        if mine.phase:
            kill_in_phase(trainer, mine)
        trainer.fit()
        weights = {
            f"{worker.role} {key}": tensor
            for worker in (trainer.actor, trainer.critic)
            for key, tensor in exported(worker.engine).items()
        }
    if kill.background and log.exists():
        watch.seen = log.read_text().split()
    return {"start": trainer.start, "weights": weights, "operations": watch.seen}


class Watch:
    """Sees what happens to files while it is armed, and calls `end` before or after one such operation."""

    def __init__(self, point: int, end: Callable[[], None]) -> None:
        self.seen: list[str] = []
        self._point, self._end = point, end

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, calls are seen."""
        watched = {name: self._around(name, getattr(os, name)) for name in CALLS}
        disk.os = SimpleNamespace(**vars(os) | watched)  # type: ignore[assignment]
        try:
            yield
        finally:
            disk.os = os

    def _around(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.seen)
            self.seen.append(name)
            if 2 * number == self._point:
                self._end()
            try:
                return operation(*args, **kwargs)
            finally:  # to remove what is not there raises
                if 2 * number + 1 == self._point:
                    self._end()

        return call


def die() -> None:
    """This process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_phase(trainer: Any, kill: Kill) -> None:
    """Dies at the beginning or the end of a phase of a step."""
    timer, step = trainer.timer, trainer.start - 1

    class Timer:
        def phase(self, name: str) -> AbstractContextManager[None]:
            return around(name)

        def reset(self) -> None:
            nonlocal step
            step += 1
            timer.reset()

        def metrics(self) -> Any:
            return timer.metrics()

    @contextmanager
    def around(name: str) -> Iterator[None]:
        here = (step, name) == (kill.step, kill.phase)
        if here and not kill.at_end:
            die()
        with timer.phase(name):
            yield
        if here and kill.at_end:
            die()

    trainer.timer = Timer()


def copy_run(folder: Path, source: str, name: str) -> None:
    """The run folder as it was after BEFORE steps."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder / source, folder / name)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all weights have the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def lethal_writer(point: int, log: Path, arguments: list[str]) -> None:
    """A background writer that kills its rank and itself at a point of the save after STEP."""
    from mega_rl.checkpoint.saving import writer

    def end() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        die()

    watch = Watch(point, end)
    perform = job.perform

    def watched(one: job.SaveJob, *args: Any, **kwargs: Any) -> Any:
        if f"step_{STEP:06d}" not in one.folder:
            return perform(one, *args, **kwargs)
        with watch.armed():
            outcome = perform(one, *args, **kwargs)
        log.write_text(" ".join(watch.seen))
        return outcome

    writer.perform = watched  # type: ignore[assignment]
    writer.main(arguments)


if __name__ == "__main__":
    lethal_writer(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
