"""The trainer of a run, built area by area, with its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from mega_rl.checkpoint.identity import run_identity
from mega_rl.checkpoint.run_state import ORDER, RandomState
from mega_rl.checkpoint.store import HfExports, RunCheckpoints
from mega_rl.config.keys import as_record, recorded
from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import MetricsSink
from mega_rl.rewards.builtin import RewardFunction
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.algorithms import build_algorithm, build_collector
from mega_rl.trainer.assemble.data import RunPrompts, build_prompts, with_length
from mega_rl.trainer.assemble.load import LoadedRun, build_evaluation, load_run, read_inputs
from mega_rl.trainer.assemble.metrics import build_meter, open_sink
from mega_rl.trainer.assemble.plan import TRAINED_ROLES
from mega_rl.trainer.assemble.records import build_recorder
from mega_rl.trainer.collect import Collector, OrderState
from mega_rl.trainer.events import DumpRollouts, SaveAndExport, Validate, Warn
from mega_rl.trainer.loop import Event, Stages, StepLog, Trainer
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import JsonObject

log = logging.getLogger(__name__)


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
) -> Trainer:
    """Return the trainer of a run; `resources` ends servers, files of metrics and locks."""
    # Mistakes in data, rewards and attention end the run before weights are loaded and before anything is written.
    inputs = read_inputs(config, accelerator, ranks_of(groups.host_world), resources, reward_function=reward_function)
    prompts = build_prompts(config, inputs.tokens, inputs.rewards, inputs.rows, inputs.vocab_size, inputs.world)
    resources.callback(prompts.order.close)
    config_of_length = with_length(config, len(prompts.train), world_size=inputs.world.size)
    inputs = replace(inputs, plan=replace(inputs.plan, config=config_of_length))
    # From here on no other run writes into this one's folder.
    checkpoints = open_checkpoints(inputs.plan.config, groups, fingerprint=prompts.fingerprint)
    resources.enter_context(checkpoints)
    run = load_run(inputs, accelerator, groups, resources, prompts=prompts.order.batch)
    done, drawn = restore(checkpoints, run, prompts, in_epochs=config.trainer.epochs > 0)
    checkpoints.move_earlier_run(Path(config.trainer.run_dir))
    sink = open_sink(run, prompts, done=done)
    resources.push(partial(_close_sink, sink))
    meter = build_meter(run, accelerator, done=done)
    stage, steps = Stages(meter, run.rollouts.devices), StepLog(sink, meter)
    batches = build_collector(run, prompts, stage, steps, drawn=drawn)
    algorithm = build_algorithm(run, stage, steps)
    saves = build_saves(run, checkpoints, batches, stage, steps, done=done, stop_requested=stop_requested)
    evaluation = build_evaluation(inputs, run, prompts.held_out, stage.hold)
    events = _build_events(run, evaluation, saves, done=done)
    return Trainer(batches, algorithm, run.rollouts.sync, events, stage, steps, run.config.trainer.steps, done)


def _build_events(run: LoadedRun, evaluation: Evaluation, saves: SaveAndExport, *, done: int) -> list[Event]:
    """Return the events around steps, in this order; done: steps when the run begins."""
    trainer, metrics, tokens = run.config.trainer, run.config.metrics, run.tokens
    stage, log = saves.stage, saves.log
    dumps = DumpRollouts(
        log.sink, tokens.reader.written, tokens.render, stage,
        steps=trainer.steps, interval=metrics.rollout_interval, count=metrics.rollout_samples,
    )  # fmt: skip
    validate = Validate(evaluation, dumps, stage, log, trainer.steps, trainer.val_interval)
    recorder = build_recorder(run, stage, done=done)
    return [*([] if recorder is None else [recorder]), dumps, Warn(log), validate, saves]


def _close_sink(sink: MetricsSink, kind: type[BaseException] | None, *_: object) -> None:
    sink.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))


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
