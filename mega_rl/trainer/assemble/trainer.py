"""The trainer of a run with all its parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.checkpoint.run_state import ORDER
from mega_rl.checkpoint.store import HfExports, RunCheckpoints
from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.needs import is_on_policy
from mega_rl.config.origins import as_record
from mega_rl.config.render import resolved_yaml
from mega_rl.config.rules.advice import advice
from mega_rl.config.schema import Config, SuccessCurriculum, TrainerConfig
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.accelerator.standin import resident_bytes
from mega_rl.parallel.agreement import run_on_one
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import MetricsSink, Ranks, Scorer, WeightSync
from mega_rl.rewards.build import RunRewards, build_rewards
from mega_rl.rewards.builtin import RewardFunction
from mega_rl.rewards.model import TokenRows
from mega_rl.rollout.hidden_tokens import describe_zero_rows
from mega_rl.rollout.sglang.build import start_servers
from mega_rl.rollout.stop_tokens import name_stop_tokens
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.flops import peak_flops
from mega_rl.tracking.metrics.sinks import make_sink
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter, StepTraces
from mega_rl.tracking.metrics.tables import show_startup
from mega_rl.trainer.assemble.algorithms import build_estimator, build_reward_kl
from mega_rl.trainer.assemble.data import (
    Tokens,
    agreed_fingerprint,
    load_data,
    prompt_line,
    read_tokens,
    warn_of_date,
    warn_of_few,
    with_length,
)
from mega_rl.trainer.assemble.evaluation import build_evaluation
from mega_rl.trainer.assemble.history import Restored, build_checkpoints, resume, saves_nothing
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, RunPlan, plan_run
from mega_rl.trainer.assemble.prompts.order import PromptOrder, prompt_order, source_lines
from mega_rl.trainer.assemble.prompts.stream import TrainStreams, open_streams
from mega_rl.trainer.assemble.records import build_recorder
from mega_rl.trainer.assemble.rewards import (
    read_rows_as,
    reward_role,
)
from mega_rl.trainer.assemble.roles import Roles, build_roles, role_facts
from mega_rl.trainer.assemble.rollouts import RolloutInputs, Rollouts, build_rollouts
from mega_rl.trainer.assemble.sources import OwnRollouts, load_data_source, load_rollout_source
from mega_rl.trainer.collect import Collector, OrderState, SamplingPlan, SuccessMeter
from mega_rl.trainer.events import DumpRollouts, SaveAndExport, SaveIntervals, Validate, Warn
from mega_rl.trainer.filters import Overlong
from mega_rl.trainer.loop import Event, Stages, StepLog, Trainer
from mega_rl.trainer.mismatch import MismatchGuard, StalenessGuard, usual_limits
from mega_rl.trainer.policy_gradient import MinibatchPlan, PolicyGradient, PolicyGradientRules
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import JsonObject, Prompt, Rollout
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.rollout import VocabularyGuard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RunInputs:
    """Inputs that a run reads before its models."""

    tokens: Tokens
    rewards: RunRewards
    rows_as: TokenRows | None  # of a reward model
    train: list[Prompt]  # empty of a run that streams them
    streams: TrainStreams | None
    evaluation: Evaluation  # of the held-out prompts
    own_rollouts: OwnRollouts | None


@dataclass(frozen=True)
class _LoadedRun:
    """Parts of a run when everything is loaded."""

    plan: RunPlan
    inputs: _RunInputs
    world: Ranks
    roles: Roles
    prompts: PromptOrder
    rollouts: Rollouts
    checkpoints: RunCheckpoints
    restored: Restored  # from the checkpoint that all of it comes from


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
) -> Trainer:
    """Return every part of a run, connected; `resources` ends what must end with it: servers, files of metrics.

    reward_function: in place of the one that the config names.
    """
    # Mistakes in data, rewards and attention are found before the weights are loaded, and before anything is written.
    world = ranks_of(groups.host_world)
    plan = plan_run(config, accelerator)
    inputs = _read_inputs(plan, reward_function, everyone=world, resources=resources)
    given = config.trainer
    config = with_length(config, len(inputs.train), world_size=world.size)
    plan = dataclasses.replace(plan, config=config)
    fingerprint = agreed_fingerprint(inputs.train, inputs.evaluation.sets, world)
    fingerprint = fingerprint if inputs.streams is None else inputs.streams.fingerprint
    checkpoints = build_checkpoints(config, groups, data_fingerprint=fingerprint)
    resources.enter_context(checkpoints)  # from here on no other run writes into this one's folder
    # Servers with devices of their own come up while the models are built; those that share the trainer's have
    # released their memory before.
    servers = start_servers(
        config.rollout, config.trainer, plan.engine, plan.models["actor"].hf, accelerator, world, resources
    )
    colocated = servers is not None and servers.colocated
    roles = build_roles(plan, accelerator, groups, colocated=colocated)
    prompts = prompt_order(config, inputs.train, inputs.streams)
    resources.callback(prompts.steps.close)
    with progress.phase("preparing the rollout engine"):
        rollouts = build_rollouts(
            plan, accelerator, world, servers, roles,
            inputs=RolloutInputs(prompts.steps.batch, inputs.own_rollouts),
            resources=resources,
        )  # fmt: skip
    if prompts.rates is not None or prompts.steps.numbers():
        checkpoints.add_engine(ORDER, OrderState(prompts.steps, prompts.rates, world))
    length = "trainer.epochs" if given.epochs else "trainer.steps"
    restored = _restore(checkpoints, roles, rollouts, config.trainer, length=length)
    checkpoints.move_earlier_run(Path(config.trainer.run_dir))
    parts = _LoadedRun(plan, inputs, world, roles, prompts, rollouts, checkpoints, restored)
    metrics = _open_records(parts)
    resources.push(partial(_close_metrics, metrics))
    return _connect(parts, metrics, _step_meter(parts, accelerator), stop_requested)


def _read_inputs(
    plan: RunPlan, reward_function: RewardFunction | None, *, everyone: Ranks, resources: ExitStack
) -> _RunInputs:
    """Return tokenizer, rewards and prompts. Raises UserError and UserErrors."""
    config, is_writer = plan.config, everyone.rank == 0
    tokens = read_tokens(config, is_writer=is_writer)
    own_rollouts, source = load_rollout_source(config, tokens), load_data_source(config)
    rewards, rows_as = build_rewards(config.reward, reward_function, resources=resources), read_rows_as(config, tokens)
    vocab_size, columns = plan.models["actor"].hf.vocab_size, rewards.columns(config.data.answer_key)
    train, held_out = load_data(config, tokens, vocab_size=vocab_size, columns=columns, source=source)
    check = partial(rewards.check, held_out=held_out, source_key=config.data.source_key)
    streams = open_streams(config, tokens, vocab_size=vocab_size, columns=columns, ranks=everyone, check=check)
    if streams is None:
        run_on_one(partial(check, train), everyone)
    if is_writer and streams is None:
        warn_of_few(train, prompts_per_step=config.trainer.prompts_per_step)
    if is_writer:
        warn_of_date(tokens.tokenizer, config.data.chat)
        if zero_rows := describe_zero_rows(Path(config.model.path), plan.engine.hidden_tokens, tokens.stop_ids):
            log.warning("%s", zero_rows)
    evaluation = build_evaluation(config, held_out, everyone)
    return _RunInputs(tokens, rewards, rows_as, train, streams, evaluation, own_rollouts)


def _restore(
    checkpoints: RunCheckpoints, roles: Roles, rollouts: Rollouts, trainer: TrainerConfig, *, length: str
) -> Restored:
    """Return the position of the checkpoint that everything was restored from; zeros when the run starts afresh."""
    for role in TRAINED_ROLES:
        if role in roles.engines:
            checkpoints.add_engine(role, roles.models.stored(role))
    if roles.average is not None:
        checkpoints.add_engine("reference", roles.average)
    if rollouts.pending is not None:
        checkpoints.add_rank_state("rollout", rollouts.pending)
    return resume(
        checkpoints, roles.kl, rollouts.sync,
        steps=trainer.steps, prompts_per_step=trainer.prompts_per_step, length=length,
    )  # fmt: skip


def _open_records(parts: _LoadedRun) -> MetricsSink:
    """Write the run's config, show its start-up table, and return the sinks of its metrics."""
    config, roles, is_writer = parts.plan.config, parts.roles, parts.world.rank == 0
    run_dir = Path(config.trainer.run_dir)
    if is_writer:
        if saves_nothing(config):
            log.warning("this run saves nothing: its weights are lost at its end; set checkpoint.save_final=true")
        for line in advice(config):
            log.warning("%s", line)
        for line in source_lines(parts.inputs.train, parts.prompts.steps, steps=config.trainer.steps):
            log.info("%s", line)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(resolved_yaml(config))
    metrics = make_sink(
        config.metrics,
        run_dir,
        is_writer=is_writer,
        resume_step=parts.restored.steps + 1,
        total_steps=config.trainer.steps,
        settings=as_record(config),
    )
    if is_writer:
        tokens = parts.inputs.tokens
        stop_tokens = name_stop_tokens(tokens.tokenizer, tokens.stop_ids)
        prompts = prompt_line(tokens, parts.inputs.train)
        show_startup(role_facts(config, roles), prompts=prompts, stop_tokens=stop_tokens)
    return metrics


def _step_meter(parts: _LoadedRun, accelerator: Accelerator) -> StepMeter:
    """Return the timer of steps, with the rate of computation, and traces where this rank is to write them.

    Raises UserError for a history of a GPU's memory on a CPU.
    """
    trainer, rank = parts.plan.config.trainer, parts.world.rank
    profile = trainer.profile
    if profile.memory and accelerator.name != "cuda":
        raise UserError(
            "trainer.profile.memory=true: there is no GPU, whose allocator has the history; set it to false"
        )
    traces = None
    if profile.steps and rank in profile.ranks:
        traces = StepTraces(Path(trainer.run_dir) / "profile", steps=profile.steps, rank=rank, memory=profile.memory)
    in_bf16 = parts.plan.config.model.dtype == "bf16"
    return StepMeter(
        PhaseTimer(synchronize=accelerator.synchronize),
        parts.roles.work,
        ranks=parts.world,
        peak_flops=1e12 * profile.peak_tflops or (peak_flops(accelerator.model) if in_bf16 else None),
        peak_memory=lambda: {**accelerator.take_peak_memory(), "host": resident_bytes()},
        traces=traces,
        step=parts.restored.steps,
        scores=parts.plan.config.reward.source.name != "none",
    )


def _connect(parts: _LoadedRun, sink: MetricsSink, meter: StepMeter, stop_requested: Callable[[], bool]) -> Trainer:
    """Return the loop around the loaded parts."""
    config, roles, rollouts, tokens = parts.plan.config, parts.roles, parts.rollouts, parts.inputs.tokens
    stage, log = Stages(meter, rollouts.devices), StepLog(sink, meter)
    inputs = parts.inputs
    rewards = reward_role(config, inputs.rewards, inputs.rows_as, roles, tokens=tokens, everyone=parts.world)
    guard = build_guard(config, roles, rollouts.sync)
    if isinstance(rollouts.source, OneStepAhead):
        rollouts.source.compare = lambda sampled: guard(sampled, roles.actor.evaluate(sampled))
    batches = _collector(parts, rewards, stage, log)
    algorithm = PolicyGradient(
        actor=roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=build_estimator(config),
        minibatches=minibatch_plan(config, roles.actor_engine.data_parallel),
        guard=guard,
        reward_kl=build_reward_kl(config, roles.kl),
        kl=roles.kl,
        update_reference=roles.reference_updates(config.algorithm.kl),
        rules=policy_gradient_rules(config),
        stage=stage,
        log=log,
    )
    events = _events(parts, batches, rewards, sink, stage, log, stop_requested)
    steps = config.trainer.steps
    return Trainer(batches, algorithm, rollouts.sync, events, stage, log, steps, parts.restored.steps)


def _collector(parts: _LoadedRun, rewards: Scorer, stage: Stages, log: StepLog) -> Collector:
    """Return the source of a step's samples."""
    config, roles, rollouts, order = parts.plan.config, parts.roles, parts.rollouts, parts.prompts
    success, dynamic = config.data.curriculum, config.rollout.dynamic_sampling
    per_step, ranks = config.trainer.prompts_per_step, roles.actor_engine.data_parallel
    meter = None
    if order.rates is not None and isinstance(success, SuccessCurriculum):
        meter = SuccessMeter(order.rates, success.right_above, success.right_part)
    collector = Collector(
        order=order.steps,
        source=rollouts.source,
        rewards=rewards,
        plan=SamplingPlan(
            samples=config.rollout.n,
            waves=dynamic.max_generations,
            prompts_per_step=per_step,
            prompts=dynamic.prompts or per_step,
            by_parts=ADVANTAGE.needs(config, "needs_parts"),
            greedy=ADVANTAGE.needs(config, "needs_greedy"),
        ),
        ranks=ranks,
        stage=stage,
        log=log,
        watch=_watch(config, roles, parts.world),
        staleness=StalenessGuard(
            limit=config.trainer.async_steps, ranks=ranks, current=lambda: rollouts.sync.weight_version
        ),
        count_data=order.metrics,
        overlong=build_overlong(config),
        success=meter,
    )
    collector.drawn = parts.restored.prompts_drawn
    return collector


def _watch(config: Config, roles: Roles, everyone: Ranks) -> Callable[[Rollout], None]:
    """Return the function that counts sampled tokens, and checks them against the smallest vocabulary that reads them.

    With generation ahead the phase is a wait for samples, whose rate means nothing: tokens are not counted then.
    """
    actor = roles.actor_engine
    readers = [roles.engines[role] for role in ("critic", "reference") if role in roles.engines]
    smallest = min(readers, key=lambda engine: engine.sharding.hf.vocab_size, default=actor)
    guard = VocabularyGuard(smallest.sharding.hf.vocab_size, reader=smallest.name, everyone=everyone)
    guards = guard.vocab_size < actor.sharding.hf.vocab_size

    def watch(rollout: Rollout) -> None:
        if guards:
            guard(rollout)
        if not config.trainer.async_steps:
            roles.work.count(float(rollout.loss_mask.sum()) / actor.replica.size)

    return watch


def _events(
    parts: _LoadedRun,
    batches: Collector,
    rewards: Scorer,
    sink: MetricsSink,
    stage: Stages,
    log: StepLog,
    stop_requested: Callable[[], bool],
) -> list[Event]:
    """Return what happens around steps, in this order."""
    config, roles, rollouts, tokens = parts.plan.config, parts.roles, parts.rollouts, parts.inputs.tokens
    trainer, metrics, done = config.trainer, config.metrics, parts.restored.steps
    dumps = DumpRollouts(
        sink, tokens.reader.written, tokens.render, stage,
        steps=trainer.steps, interval=metrics.rollout_interval, count=metrics.rollout_samples,
    )  # fmt: skip
    validate = Validate(
        parts.inputs.evaluation, rollouts.source, rewards, batches.ranks, dumps, stage, log,
        steps=trainer.steps, interval=trainer.val_interval,
    )  # fmt: skip
    recorder = build_recorder(config, roles, tokens, everyone=parts.world, done=done, stage=stage)

    def state(done: int) -> JsonObject:
        return {
            "kl": roles.kl.state(),
            "weight_version": rollouts.sync.weight_version,
            "prompts_drawn": batches.drawn_after(done),
        }

    save = SaveAndExport(
        checkpoints=parts.checkpoints,
        export=_exporter(config, roles, parts.world),
        state=state,
        stop_requested=stop_requested,
        intervals=save_intervals(config, done),
        stage=stage,
        log=log,
    )
    return [*([] if recorder is None else [recorder]), dumps, Warn(log), validate, save]


def build_guard(config: Config, roles: Roles, sync: WeightSync) -> MismatchGuard:
    """Return the comparison of the sampler's log-probs with the trainer's."""
    rollout = config.rollout
    return MismatchGuard(
        limits=usual_limits(
            in_fp32=config.model.dtype == "fp32" and rollout.dtype in ("auto", "fp32"),
            mean=rollout.mismatch.mean_limit,
            share=rollout.mismatch.share_limit,
            largest=rollout.mismatch.max_limit,
        ),
        ranks=roles.actor_engine.data_parallel,
        current=(lambda: sync.weight_version) if config.trainer.async_steps else None,
    )


def policy_gradient_rules(config: Config) -> PolicyGradientRules:
    """Return the choices of a policy gradient. A single on-policy update uses its own forward's old log-probs."""
    return PolicyGradientRules(
        recompute_old_logprobs=not (config.algorithm.old_logprobs == "rollout" or is_on_policy(config)),
        filter_truncated=config.reward.overlong.filter,
        skip_zero_advantages=config.trainer.microbatch.skip_zero_advantages,
    )


def _close_metrics(metrics: MetricsSink, kind: type[BaseException] | None, *_: object) -> None:
    """Close the run's sinks; `kind` is of the exception that ends it, where a second Ctrl-C is no failure."""
    metrics.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))


def _exporter(config: Config, roles: Roles, world: Ranks) -> Callable[[int], None]:
    """Return the function that writes the actor as a Hugging Face checkpoint, given the number of steps done."""
    return HfExports(
        engine=roles.actor_engine,
        root=Path(config.trainer.run_dir) / "hf",
        source=Path(config.model.path),
        ranks=world,
        on_error=config.checkpoint.on_error,
    )


def save_intervals(config: Config, done: int) -> SaveIntervals:
    """Return the steps between saves and exports of a run that begins after `done` steps."""
    checkpoint = config.checkpoint
    return SaveIntervals(
        steps=config.trainer.steps,
        start=done,
        save=checkpoint.save_interval,
        memory=checkpoint.memory.interval,
        export=checkpoint.hf_interval,
        save_final=checkpoint.save_final,
        export_final=checkpoint.hf_final,
    )


def build_overlong(config: Config) -> Overlong:
    """Return the treatment of responses that reach the length limit."""
    return Overlong(config.rollout.max_new_tokens, **dataclasses.asdict(config.reward.overlong))


def minibatch_plan(config: Config, ranks: Ranks) -> MinibatchPlan:
    """Return how a step's batch is cut."""
    return MinibatchPlan(
        minibatch_size=config.trainer.minibatch_size,
        epochs=config.algorithm.epochs,
        aggregation=AGGREGATIONS[config.algorithm.loss_aggregation],
        max_response_tokens=config.rollout.max_new_tokens,
        seed=config.trainer.seed,
        ranks=ranks,
    )
