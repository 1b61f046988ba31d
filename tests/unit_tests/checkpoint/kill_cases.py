"""Runs that are killed at one point, on each rank of a launch: SIGKILL, as a node's failure or a scheduler's.

`Kill` names the point.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mega_rl.config.schema import Config
from tests.helpers.engines import replaced
from tests.helpers.loops import checkpoints_of
from tests.unit_tests.checkpoint.resume_cases import weights_of
from tests.unit_tests.checkpoint.watching import Watch, die
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS, BEFORE, STEP = 4, 2, 3  # of a run; done before a run that is killed; whose save it is killed in
RANKS, LAYOUT = 2, "dp2"


class Kill(NamedTuple):
    """A point of a run; nowhere by default."""

    rank: int = 0
    background: bool = False  # the save is one in the background; operations are its thread's
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
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.checkpoint import saving
    from mega_rl.trainer.assemble import build_trainer, session

    mine = kill if rank == kill.rank else Kill(background=kill.background)
    config = config_of(Path(folder), name, background=kill.background, steps=steps)
    watch = Watch(mine.operation, die)
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        checkpoints = checkpoints_of(trainer)
        save, perform = checkpoints.save, saving.perform

        def watched(step: int, *args: Any, **kwargs: Any) -> None:
            with watch.armed() if step == STEP and not kill.background else ExitStack():
                save(step, *args, **kwargs)

        def watched_job(job: saving.SaveJob, *args: Any, **kwargs: Any) -> list[str]:
            with watch.armed() if f"step_{STEP:06d}" in job.folder.name and kill.background else ExitStack():
                return perform(job, *args, **kwargs)

        checkpoints.save, saving.perform = watched, watched_job
        if mine.phase:
            kill_in_phase(trainer, mine)
        trainer.fit()
        weights = weights_of(trainer)
    return {"start": trainer.start, "weights": weights, "operations": watch.seen}


def kill_in_phase(trainer: Any, kill: Kill) -> None:
    """Dies at the beginning or the end of a phase of a step."""
    timer, step = trainer.log.timer, trainer.start - 1

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

    trainer.stage.timer = trainer.log.timer = Timer()


def copy_run(folder: Path, source: str, name: str) -> None:
    """The run folder as it was after BEFORE steps."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder / source, folder / name)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all weights have the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
