"""Checkpoints of a run: the store, resuming from it, saves and exports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mega_rl.checkpoint.identity import run_identity
from mega_rl.checkpoint.run_state import ORDER, RandomState
from mega_rl.checkpoint.store import HfExports, RunCheckpoints
from mega_rl.config.keys import as_record, recorded
from mega_rl.config.schema import Config
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.data import RunPrompts
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.assemble.plan import TRAINED_ROLES
from mega_rl.trainer.collect import Collector, OrderState
from mega_rl.trainer.events import SaveAndExport
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.types import JsonObject

log = logging.getLogger(__name__)


def open_checkpoints(config: Config, groups: Groups, *, fingerprint: str) -> RunCheckpoints:
    """Return the store of checkpoints with the identity that they must match, without engines."""
    ranks = ranks_of(groups.host_world)
    named, local = recorded(config).data, config.data
    names = [*named.train_files, *named.mixture.files()]
    files = dict(zip(names, [*local.train_files, *local.mixture.files()], strict=True))
    known = {"seed": config.trainer.seed, "data": fingerprint, "engine": config.engine.backend}
    return RunCheckpoints(
        root=Path(config.trainer.run_dir) / "checkpoints",
        engines={},
        ranks=ranks,
        settings=config.checkpoint,
        identity=run_identity(known, Path(config.model.path), files, sampled=local.stream.rows > 0, ranks=ranks),
        layout=str(groups.layout),
        config=as_record(config),
        rank_states={"random": RandomState()},
    )


def restore(checkpoints: RunCheckpoints, run: LoadedRun, prompts: RunPrompts, *, in_epochs: bool) -> tuple[int, int]:
    """Restore the latest checkpoint; return (steps done, prompts drawn), zeros for a new run; collective."""
    roles, trainer, sync = run.roles, run.config.trainer, run.rollouts.sync
    if prompts.rates is not None or prompts.order.numbers():
        checkpoints.add_engine(ORDER, OrderState(prompts.order, prompts.rates, run.world))
    for role in TRAINED_ROLES:
        if role in roles.engines:
            checkpoints.add_engine(role, roles.models.stored(role))
    if roles.average is not None:
        checkpoints.add_engine("reference", roles.average)
    if run.rollouts.pending is not None:
        checkpoints.add_rank_state("rollout", run.rollouts.pending)
    with progress.phase("reading the checkpoint"):
        checkpoint = checkpoints.restore()
    if checkpoint is None:
        return 0, 0
    step, state = checkpoint.step, checkpoint.state
    roles.kl.restore(state["kl"])
    sync.resume_at(state["weight_version"])
    log.info("resumed after step %d", step)
    if step >= trainer.steps:
        length = "trainer.epochs" if in_epochs else "trainer.steps"
        log.info("step %d of %d is done: nothing is left to train; raise %s to train on", step, trainer.steps, length)
    # Versions that drew the same number in each step did not keep it.
    return step, int(state.get("prompts_drawn", step * trainer.prompts_per_step))


def build_saves(
    run: LoadedRun,
    checkpoints: RunCheckpoints,
    batches: Collector,
    stage: Stages,
    log: StepLog,
    *,
    done: int,
    stop_requested: Callable[[], bool],
) -> SaveAndExport:
    """Return the event that saves and exports; done: steps when the run begins."""
    config, roles = run.config, run.roles

    def state(done: int) -> JsonObject:
        return {
            "kl": roles.kl.state(),
            "weight_version": run.rollouts.sync.weight_version,
            "prompts_drawn": batches.drawn_after(done),
        }

    export = HfExports(
        engine=roles.actor_engine,
        root=Path(config.trainer.run_dir) / "hf",
        source=Path(config.model.path),
        ranks=run.world,
        on_error=config.checkpoint.on_error,
    )
    return SaveAndExport(
        checkpoints, export, state, stop_requested, config.checkpoint, stage, log, config.trainer.steps, done
    )
