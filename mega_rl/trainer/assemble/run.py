"""Runs: their layout, their process groups, their beginning and end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mega_rl.checkpoint.run_state import seed_python
from mega_rl.config.schema import Config, TrainerConfig
from mega_rl.parallel import groups as process_groups
from mega_rl.parallel.accelerator import Accelerator, deterministic
from mega_rl.parallel.agreement import check_commits
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rewards.builtin import RewardFunction
from mega_rl.tracking import progress
from mega_rl.tracking.health import records
from mega_rl.tracking.health.flight_recorder import FlightRecorder
from mega_rl.tracking.health.guard import Investigate, guarded
from mega_rl.tracking.health.heartbeat import Heartbeat, RankFacts
from mega_rl.tracking.health.records import GENERATION, has_launcher
from mega_rl.tracking.metrics.tables import show_summary
from mega_rl.trainer import Trainer
from mega_rl.trainer.assemble.trainer import build_trainer
from mega_rl.trainer.loop import StopRequest, fit_together
from mega_rl.workers.tenants import Base

log = logging.getLogger(__name__)


def train(configs: Sequence[Config], accelerator: Accelerator, investigate: Investigate | None = None) -> int:
    """Train the runs of `configs` together on every rank of this job; return the exit code."""
    with running(configs, accelerator, investigate) as (trainers, stop):
        all_done = fit_together(trainers)
    if os.environ.get("RANK", "0") == "0":
        for config, trainer, done in zip(configs, trainers, all_done, strict=True):
            show_summary(Path(config.trainer.run_dir))
            if stop.exit_code:
                log.warning("stopped after step %d of %d; the same command continues from there", done, trainer.steps)
    return stop.exit_code


@contextmanager
def running(
    configs: Sequence[Config],
    accelerator: Accelerator,
    investigate: Investigate | None = None,
    *,
    rewards: Sequence[RewardFunction | None] = (),
) -> Iterator[tuple[list[Trainer], StopRequest]]:
    """Yield the trainers of runs and the stop request of all; they end with the block.

    Several runs have one base, whose engine the first one builds; records of the ranks' health are in its folder.
    """
    with (
        heartbeat_of(configs[0].trainer, accelerator) as heartbeat,
        guarded(heartbeat, investigate),
        session(configs[0], accelerator) as groups,
        ExitStack() as resources,
    ):
        with guarded(heartbeat, investigate):
            for config in configs:
                check_commits(config.origins, ranks_of(groups.host_world))
            stop = StopRequest(ranks_of(groups.host_world))
        resources.callback(stop.restore)
        # Inside of what catches signals: a launcher ends the ranks while they still look for the cause. And before
        # servers and groups are taken down, which a peer that does not answer may hold up.
        with guarded(heartbeat, investigate):
            with progress.phase("preparing the run"):
                trainers = build_trainers(configs, rewards, accelerator, groups, stop, resources)
            yield trainers, stop
        resources.callback(progress.phase("closing files and servers").end)
        if stop.exit_code:
            heartbeat.end("stopped", f"by {signal.Signals(stop.exit_code - 128).name}")


def build_trainers(
    configs: Sequence[Config], rewards: Sequence[RewardFunction | None],
    accelerator: Accelerator, groups: Groups, stop: StopRequest, resources: ExitStack,
) -> list[Trainer]:  # fmt: skip
    """Return the trainers of runs, of which several have one base; `resources` ends their parts."""
    trainers, base = list[Trainer](), Base() if len(configs) > 1 else None
    for config, reward in zip_longest(configs, rewards):
        if base is not None and base.tenants is not None:  # it begins as the first run began, but for the seed
            base.tenants.select(config.trainer.run_dir)
            seed(config.trainer.seed, groups)
        how: dict[str, Any] = {"stop_requested": stop, "resources": resources, "reward_function": reward, "base": base}
        trainers.append(build_trainer(config, accelerator, groups, **how))
    return trainers


def heartbeat_of(trainer: TrainerConfig, accelerator: Accelerator) -> Heartbeat:
    """Return the heartbeat of this rank; without a launcher rank 0 removes records of earlier ranks."""
    facts = RankFacts(
        run_dir=Path(trainer.run_dir),
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        generation=int(os.environ.get(GENERATION, "0")),
        timeout_s=trainer.timeout_s,
        launched=has_launcher(),
    )
    if facts.rank == 0 and not facts.launched:
        records.clear(facts.run_dir)
    on_device = accelerator.memory_allocated if accelerator.name == "cuda" else lambda: 0
    return Heartbeat(facts, FlightRecorder(), device_bytes=on_device)


@contextmanager
def session(config: Config, accelerator: Accelerator) -> Iterator[Groups]:
    """The process groups of a run, taken down at the end."""
    layout = ParallelLayout.of_engine(config.engine, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    with deterministic(config.trainer.deterministic):
        with progress.phase(f"connecting {layout.world_size} ranks"):
            groups = process_groups.initialize(
                layout,
                accelerator=accelerator,
                timeout_s=config.trainer.timeout_s,
                optimizer_instances=config.engine.megatron.ddp.optimizer_instances,
            )
        try:
            seed(config.trainer.seed, groups)
            yield groups
        finally:
            process_groups.destroy()


def seed(number: int, groups: Groups) -> None:
    """Seed every generator of random numbers."""
    process_groups.seed_model_parallel(number, groups)
    seed_python(number, groups.host_world.rank())
