"""The trainer of a run, built area by area, with its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path

from mega_rl.checkpoint.identity import run_identity
from mega_rl.checkpoint.run_state import ORDER, RandomState, RunState
from mega_rl.checkpoint.store import HfExports, RunCheckpoints
from mega_rl.config.choices import is_sampled, kind_of_run
from mega_rl.config.keys import as_record, recorded
from mega_rl.config.schema import CheckpointConfig, Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Ranks
from mega_rl.rewards.builtin import RewardFunction
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.sinks import make_sink
from mega_rl.trainer.assemble.algorithms import build_algorithm, build_collector, build_meter
from mega_rl.trainer.assemble.data import RunPrompts, build_prompts, prompt_reader, with_length
from mega_rl.trainer.assemble.given import Batches, Parts, build_given
from mega_rl.trainer.assemble.load import LoadedRun, build_evaluation, load_run, read_inputs
from mega_rl.trainer.assemble.plan import TRAINED_ROLES
from mega_rl.trainer.assemble.records import build_recorder, show_run
from mega_rl.trainer.collect import OrderState
from mega_rl.trainer.events import DumpRollouts, SaveAndExport, Validate, Warn
from mega_rl.trainer.loop import Stages, StepLog, Trainer
from mega_rl.types import JsonObject
from mega_rl.workers.tenants import Base

log = logging.getLogger(__name__)


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
    base: Base | None = None,
) -> Trainer:
    """Return the trainer of a run; `resources` ends servers, files and locks; base: with other runs."""
    # Mistakes in data, rewards and attention end the run before weights are loaded and before anything is written.
    world = ranks_of(groups.host_world)
    inputs = read_inputs(config, accelerator, world, resources, reward_function=reward_function, base=base)
    run_dir, tokens = Path(config.trainer.run_dir), inputs.tokens
    columns = inputs.rewards.columns(config.data.answer_key, config.data.source_key)
    kind, vocab_size = kind_of_run(config), inputs.plan.models["actor"].hf.vocab_size
    reader = prompt_reader(kind, config.data, tokens, columns, vocab_size=vocab_size)
    prompts = build_prompts(
        reader, config.validation.sets, config.trainer, tokens, inputs.rewards, inputs.rows, world=world
    )
    resources.callback(prompts.order.close)
    warmup = config.optim.warmup_steps + config.algorithm.critic_warmup_steps
    config = replace(config, trainer=with_length(config.trainer, len(prompts.train), warmup=warmup))
    trainer, record = config.trainer, as_record(config)
    # From here on no other run writes into this one's folder.
    identity = identify(config, prompts.fingerprint, world)
    state = RunState({}, {"random": RandomState()}, world, identity, str(groups.layout), record)
    checkpoints = resources.enter_context(RunCheckpoints(run_dir / "checkpoints", state, config.checkpoint))
    run = load_run(inputs, config.rollout, trainer, accelerator, groups, resources)
    done, numbers = restore(checkpoints, run, prompts)
    checkpoints.move_earlier_run(run_dir)
    if world.rank == 0:
        show_run(config, run, prompts)
    sink = make_sink(
        config.metrics, run_dir,
        is_writer=world.rank == 0, resume_step=done + 1, total_steps=trainer.steps, settings=record,
    )  # fmt: skip
    resources.push(lambda kind, *_: sink.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt)))
    in_bf16, scores = config.model.dtype == "bf16", config.reward.source.name != "none"
    meter = build_meter(run, accelerator, in_bf16=in_bf16, scores=scores, done=done)
    stage, steps = Stages(meter, run.rollouts.devices), StepLog(sink, meter)
    if is_sampled(config):
        parts = build_sampled(config, run, prompts, stage, steps, done)
    else:
        longest = config.data.max_prompt_tokens
        parts = build_given(kind, run, prompts, stage, steps, longest=longest)
    batches, algorithm, events = parts
    batches.resume(numbers)
    saves = build_saves(run, config.checkpoint, checkpoints, batches, stage, steps, done=done, stop=stop_requested)
    sync, turn = run.rollouts.sync, base or Base()
    take_turn = partial(turn.take_turn, inputs.plan.name, inputs.plan.engine, sync)
    return Trainer(batches, algorithm, sync, [*events, saves], stage, steps, trainer.steps, done, take_turn)


def build_sampled(config: Config, run: LoadedRun, prompts: RunPrompts, stage: Stages, log: StepLog, done: int) -> Parts:
    """Return batches, algorithm and events of a run that samples."""
    rollout, overlong, metrics, trainer = config.rollout, config.reward.overlong, config.metrics, run.trainer
    batches = build_collector(run, prompts, rollout, config.data.curriculum, overlong, stage, log)
    algorithm, checks = build_algorithm(run, rollout, overlong, stage, log)
    evaluation = build_evaluation(run, config.validation, prompts.held_out, stage.hold)
    recorder = build_recorder(run, metrics.records, as_record(config), stage, done=done)
    dumps = DumpRollouts(
        log.sink, run.tokens.reader.written, run.tokens.render, stage,
        steps=trainer.steps, interval=metrics.rollout_interval, count=metrics.rollout_samples,
    )  # fmt: skip
    validate = Validate(evaluation, dumps, stage, log, trainer.steps, trainer.val_interval)
    return batches, algorithm, [*checks, *([] if recorder is None else [recorder]), dumps, Warn(log), validate]


def identify(config: Config, fingerprint: str, world: Ranks) -> JsonObject:
    """Return the identity of a run that its checkpoints must match; collective."""
    named, local = recorded(config).data, config.data
    names = [*named.train_files, *named.mixture.files()]
    files = dict(zip(names, [*local.train_files, *local.mixture.files()], strict=True))
    known = {"seed": config.trainer.seed, "data": fingerprint, "engine": config.engine.backend}
    known |= {} if is_sampled(config) else {"algorithm.kind": config.algorithm.kind.name}
    if config.model.adapter.rank:
        settings = asdict(replace(config.model.adapter, path=""))
        known |= {f"model.adapter.{name}": value for name, value in settings.items()}
    return run_identity(known, Path(config.model.path), files, sampled=local.stream.rows > 0, ranks=world)


def restore(checkpoints: RunCheckpoints, run: LoadedRun, prompts: RunPrompts) -> tuple[int, JsonObject]:
    """Restore the latest checkpoint; return (steps done, the run's numbers), nothing for a new run; collective."""
    roles, trainer, sync = run.roles, run.trainer, run.rollouts.sync
    if prompts.rates is not None or prompts.order.numbers():
        checkpoints.run.engines[ORDER] = OrderState(prompts.order, prompts.rates, run.world)
    for role in TRAINED_ROLES:
        if role in roles.engines:
            checkpoints.run.engines[role] = roles.models.stored(role)
    if roles.average is not None:
        checkpoints.run.engines["reference"] = roles.average
    if run.rollouts.pending is not None:
        checkpoints.run.rank_states["rollout"] = run.rollouts.pending
    with progress.phase("reading the checkpoint"):
        checkpoint = checkpoints.restore()
    if checkpoint is None:
        return 0, {}
    step, state = checkpoint.step, checkpoint.state
    roles.kl.restore(state["kl"])
    sync.resume_at(state["weight_version"])
    if run.rollouts.changes is not None:
        run.rollouts.changes.of_versions.update(state.get("policy_changes", ()))
    log.info("resumed after step %d", step)
    if step >= trainer.steps:
        log.info("step %d of %d is done: nothing is left to train; raise trainer.steps or epochs", step, trainer.steps)
    return step, state


def build_saves(
    run: LoadedRun, settings: CheckpointConfig, checkpoints: RunCheckpoints, batches: Batches,
    stage: Stages, log: StepLog, *, done: int, stop: Callable[[], bool],
) -> SaveAndExport:  # fmt: skip
    """Return the event that saves and exports; done: steps when the run begins."""
    roles, steps, changes = run.roles, run.trainer.steps, run.rollouts.changes
    moves = {} if changes is None else changes.of_versions

    def state(done: int) -> JsonObject:
        newest = list(moves.items())[-run.trainer.async_steps - 1 :]
        return {
            "kl": roles.kl.state(),
            "weight_version": run.rollouts.sync.weight_version,
            "policy_changes": [[version, moved] for version, moved in newest if moved < inf],
            **batches.numbers(done),
        }

    export = HfExports(
        engine=roles.actor_engine,
        root=Path(run.trainer.run_dir) / "hf",
        source=roles.paths["actor"],
        ranks=run.world,
        on_error=settings.on_error,
    )
    return SaveAndExport(checkpoints, export, state, stop, settings, stage, log, steps, done)
