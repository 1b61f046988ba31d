"""Runs that keep checkpoints in memory and are killed between those on disk, on each rank of a launch."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.checkpoint.memory.hosts import Host
from mega_rl.checkpoint.memory.store import MemoryCheckpoints
from mega_rl.config.schema import Config
from tests.helpers.engines import replaced
from tests.helpers.loops import checkpoints_of
from tests.unit_tests.checkpoint.kill_cases import Kill, kill_in_phase
from tests.unit_tests.checkpoint.memory.stores_on_ranks import Lines
from tests.unit_tests.checkpoint.resume_cases import weights_of
from tests.unit_tests.checkpoint.watching import Watch, die
from tests.unit_tests.distributed.test_layout_invariance import run_config

RANKS, STEPS, ON_DISK, KILLED = 2, 5, 2, 3  # KILLED: the step, from 0, in which a run is killed; so many are done

NEVER = 10**9  # an operation that no save has


class MemoryRun(NamedTuple):
    """A run, and where it is killed."""

    name: str  # of its folder
    layout: str
    memory_interval: int = 1
    hosts: int = 1
    phase: str = ""  # of step KILLED
    operation: int = -1  # on files, of the save in memory after KILLED steps, as in `Kill`
    rank: int = 1


def config_of(folder: Path, run: MemoryRun) -> Config:
    """PPO with a critic; on disk after ON_DISK steps alone, and at the end."""
    config = run_config(folder, run.layout, "ppo")
    config = replaced(config, "data", val_size=1)
    config = replaced(config, "data", curriculum="success")  # so that its rates are in memory, too
    config = replaced(config, "rollout", n=2, max_new_tokens=6)
    config = replaced(config, "optim", schedule="linear", warmup_steps=1)
    config = replaced(config, "checkpoint", save_interval=ON_DISK if run.operation < 0 else 0, on_error="stop")
    config = replaced(config, "checkpoint.memory", interval=run.memory_interval)
    sizes = {"prompts_per_step": 4, "minibatch_size": 2, "steps": STEPS, "timeout_s": 30.0, "val_interval": 2}
    return replaced(config, "trainer", run_dir=str(folder / run.name), **sizes)


def train_all(rank: int, folder: str, runs: list[MemoryRun]) -> dict[str, Any]:
    """Results of `train` by name."""
    return {run.name: train(rank, folder, run) for run in runs}


def train(rank: int, folder: str, run: MemoryRun) -> dict[str, Any]:
    """Train to the end, or to where the run is killed; return first step, weights at the end, and warnings."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.trainer.assemble import build_trainer, session

    number = rank * run.hosts // RANKS
    shm = Path(folder) / f"{run.name} on host {number}"
    shm.mkdir(exist_ok=True)
    MemoryCheckpoints.host = staticmethod(lambda: Host(str(number), f"host{number}", shm))  # type: ignore[method-assign]
    config, lines = config_of(Path(folder), run), Lines()
    logging.getLogger("mega_rl").addHandler(lines)
    watch = Watch(run.operation if rank == run.rank else -1, die)
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        checkpoints = checkpoints_of(trainer)
        save = checkpoints.save_in_memory

        def watched(step: int, *args: Any) -> None:
            with watch.armed() if step == KILLED and run.operation >= 0 else ExitStack():
                save(step, *args)

        checkpoints.save_in_memory = watched
        if run.phase and rank == run.rank:
            kill_in_phase(trainer, Kill(rank=rank, phase=run.phase, step=KILLED))
        trainer.fit()
        weights = weights_of(trainer)
    logging.getLogger("mega_rl").removeHandler(lines)
    return {"start": trainer.start, "weights": weights, "lines": lines.lines, "seen": watch.seen}
