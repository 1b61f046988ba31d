"""The trainer of a run with all its parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_rl.accelerator import Accelerator
from mega_rl.accelerator.standin import resident_bytes
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.assemble.algorithms import build_estimator, build_reward_kl
from mega_rl.assemble.data import (
    Tokens,
    agreed_fingerprint,
    load_data,
    prompt_line,
    read_tokens,
    warn_of_date,
    warn_of_few,
    with_length,
)
from mega_rl.assemble.evaluation import build_evaluation
from mega_rl.assemble.history import Restored, build_checkpoints, resume, saves_nothing
from mega_rl.assemble.plan import TRAINED_ROLES, RunPlan, plan_run
from mega_rl.assemble.prompts.order import PromptOrder, prompt_order, source_lines
from mega_rl.assemble.prompts.sampling import StepSampling, step_sampling
from mega_rl.assemble.prompts.stream import TrainStreams, open_streams
from mega_rl.assemble.records import build_recorder
from mega_rl.assemble.rewards import build_reward, check_sources, prepare_reward, reward_columns
from mega_rl.assemble.roles import Roles, build_roles, idle_phases, role_facts
from mega_rl.assemble.rollouts import RolloutInputs, Rollouts, build_rollouts
from mega_rl.assemble.servers import is_colocated, start_servers
from mega_rl.assemble.sources import OwnRollouts, load_data_source, load_rollout_source
from mega_rl.checkpoint.export import HfExports
from mega_rl.checkpoint.run_state import ORDER
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.config.needs import is_on_policy
from mega_rl.config.origins import as_record
from mega_rl.config.plugins.choices import ADVANTAGE
from mega_rl.config.render import resolved_yaml
from mega_rl.config.rules.advice import advice
from mega_rl.config.schema import Config, TrainerConfig
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import run_on_one
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import MetricsSink, Ranks, RolloutSource
from mega_rl.rollout.hidden_tokens import describe_zero_rows
from mega_rl.rollout.stop_tokens import name_stop_tokens
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.flops import peak_flops
from mega_rl.tracking.metrics.sinks import make_sink
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter, StepTraces
from mega_rl.tracking.metrics.tables import show_startup
from mega_rl.trainer import PPOTrainer, RunSettings
from mega_rl.trainer.experience import MinibatchPlan
from mega_rl.trainer.mismatch import MismatchGuard, usual_limits
from mega_rl.trainer.old_logprobs import OldLogprobs, RecomputedLogprobs, RolloutLogprobs
from mega_rl.trainer.order.state import OrderState
from mega_rl.trainer.overlong import Overlong
from mega_rl.trainer.staleness import StalenessGuard
from mega_rl.trainer.validation import Evaluation
from mega_rl.trainer.zero_advantages import WithoutZeroAdvantages
from mega_rl.types import Prompt
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.metered import MeteredRollouts
from mega_rl.workers.reward import TextScorer
from mega_rl.workers.reward_functions import RewardFunction
from mega_rl.workers.reward_model import TokenRows
from mega_rl.workers.rollout import VocabularyGuard
from mega_rl.workers.turns import PARAMETERS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RunInputs:
    """Inputs that a run reads before its models."""

    tokens: Tokens
    reward: TextScorer | TokenRows | None  # None: the run has no reward
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
    restored: Restored  # from the checkpoint that all of it comes from


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
) -> PPOTrainer:
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
    servers = start_servers(plan, accelerator, world, resources)
    colocated = servers is not None and is_colocated(config, accelerator)
    roles = build_roles(plan, accelerator, groups, colocated=colocated)
    prompts = prompt_order(config, inputs.train, inputs.streams)
    resources.callback(prompts.steps.close)
    with progress.phase("preparing the rollout engine"):
        rollouts = build_rollouts(
            plan, accelerator, world, servers, roles,
            checkpoints=checkpoints,
            inputs=RolloutInputs(prompts.steps.batch, inputs.own_rollouts),
            resources=resources,
        )  # fmt: skip
    if prompts.rates is not None or prompts.steps.numbers():
        checkpoints.add_engine(ORDER, OrderState(prompts.steps, prompts.rates, world))
    length = "trainer.epochs" if given.epochs else "trainer.steps"
    restored = _restore(checkpoints, roles, rollouts, config.trainer, length=length)
    checkpoints.move_earlier_run(Path(config.trainer.run_dir))
    parts = _LoadedRun(plan, inputs, world, roles, prompts, rollouts, restored)
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
    reward = prepare_reward(config, tokens.tokenizer, tokens.reader, reward_function, resources=resources)
    vocab_size, columns = plan.models["actor"].hf.vocab_size, reward_columns(config, reward)
    train, held_out = load_data(config, tokens, vocab_size=vocab_size, columns=columns, source=source)
    check = partial(check_sources, config, reward, held_out=held_out)
    streams = open_streams(config, tokens, vocab_size=vocab_size, columns=columns, ranks=everyone, check=check)
    if streams is None:
        run_on_one(partial(check, train), everyone)
    if is_writer and streams is None:
        warn_of_few(train, prompts_per_step=config.trainer.prompts_per_step)
    if is_writer:
        warn_of_date(tokens.tokenizer, config.data.chat)
        if zero_rows := describe_zero_rows(Path(config.model.path), plan.engine.hidden_tokens, tokens.stop_ids):
            log.warning("%s", zero_rows)
    return _RunInputs(tokens, reward, train, streams, build_evaluation(config, held_out, everyone), own_rollouts)


def _restore(
    checkpoints: RunCheckpoints, roles: Roles, rollouts: Rollouts, trainer: TrainerConfig, *, length: str
) -> Restored:
    """Return the position of the checkpoint that everything was restored from; zeros when the run starts afresh."""
    for role in TRAINED_ROLES:
        if role in roles.engines:
            checkpoints.add_engine(role, roles.models.in_turn(role))
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
        PhaseTimer(synchronize=accelerator.synchronize, idle=idle_phases(parts.plan.config, parts.roles)),
        parts.roles.work,
        ranks=parts.world,
        peak_flops=1e12 * profile.peak_tflops or (peak_flops(accelerator.model) if in_bf16 else None),
        peak_memory=lambda: {**accelerator.take_peak_memory(), "host": resident_bytes()},
        traces=traces,
        step=parts.restored.steps,
        scores=parts.plan.config.reward.source != "none",
    )


def _connect(
    parts: _LoadedRun, metrics: MetricsSink, timer: StepMeter, stop_requested: Callable[[], bool]
) -> PPOTrainer:
    config, roles, rollouts, tokens = parts.plan.config, parts.roles, parts.rollouts, parts.inputs.tokens
    actor = roles.actor_engine
    sampling = _sampling(parts, timer)
    skips = config.trainer.microbatch.skip_zero_advantages
    return PPOTrainer(
        settings=run_settings(config),
        prompts=sampling.prompts,
        validation=parts.inputs.evaluation,
        rollout=sampling.rollout,
        reward=sampling.reward,
        actor=WithoutZeroAdvantages(roles.actor, actor.data_parallel) if skips else roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=build_estimator(config),
        reward_kl=build_reward_kl(config, roles.kl),
        minibatches=minibatch_plan(config),
        recorder=build_recorder(
            config, roles, tokens, everyone=parts.world, done=parts.restored.steps, on_device=rollouts.on_device
        ),
        overlong=build_overlong(config),
        kl=roles.kl,
        update_reference=roles.reference_updates(config.algorithm.kl),
        staleness=StalenessGuard(
            limit=config.trainer.async_steps, ranks=actor.data_parallel, current=lambda: rollouts.sync.weight_version
        ),
        old_logprobs=_old_logprobs(config, roles, rollouts),
        sync=rollouts.sync,
        ranks=actor.data_parallel,
        timer=timer,
        metrics=metrics,
        checkpoints=rollouts.checkpoints,
        export=_exporter(config, roles, rollouts, parts.world),
        read=tokens.reader.written,
        render=tokens.render,
        stop_requested=stop_requested,
        greedy_baseline=ADVANTAGE.needs(config, "needs_greedy"),
        start=parts.restored.steps,
        count_data=parts.prompts.metrics,
    )


def _sampling(parts: _LoadedRun, timer: StepMeter) -> StepSampling:
    """Return the sources of prompts, rollouts and rewards."""
    config, rollouts = parts.plan.config, parts.rollouts
    rollout = _known_tokens(rollouts.source, parts.roles, parts.world)
    if not config.trainer.async_steps:  # else the phase is a wait for samples, and its rate says nothing
        rollout = MeteredRollouts(rollout, parts.roles.work, parts.roles.actor_engine.replica.size)
    reward = build_reward(
        config,
        parts.inputs.reward,
        parts.roles,
        reader=parts.inputs.tokens.reader,
        everyone=parts.world,
        on_device=rollouts.on_device,
        listen=rollouts.listen,
    )
    ranks, drawn = parts.roles.actor_engine.data_parallel, parts.restored.prompts_drawn
    return step_sampling(config, parts.prompts, rollout, reward, ranks=ranks, phase=timer.phase, drawn=drawn)


def _old_logprobs(config: Config, roles: Roles, rollouts: Rollouts) -> OldLogprobs:
    """Return the source of old log-probs: the update's own forward where a step makes one on-policy update.

    The sampler's own are compared with the first update's forward.
    """
    rollout, is_async = config.rollout, config.trainer.async_steps > 0
    guard = MismatchGuard(
        limits=usual_limits(
            in_fp32=config.model.dtype == "fp32" and rollout.dtype in ("auto", "fp32"),
            mean=rollout.mismatch.mean_limit,
            share=rollout.mismatch.share_limit,
            largest=rollout.mismatch.max_limit,
        ),
        ranks=roles.actor_engine.data_parallel,
        current=(lambda: rollouts.sync.weight_version) if is_async else None,
    )
    if isinstance(rollouts.pending, OneStepAhead):
        rollouts.pending.compare = lambda sampled: guard(sampled, roles.actor.evaluate(sampled))
    if config.algorithm.old_logprobs == "rollout":
        return RolloutLogprobs(inspect=guard)
    return RolloutLogprobs(inspect=guard) if is_on_policy(config) else RecomputedLogprobs(roles.actor, guard)


def _close_metrics(metrics: MetricsSink, kind: type[BaseException] | None, *_: object) -> None:
    """Close the run's sinks; `kind` is of the exception that ends it, where a second Ctrl-C is no failure."""
    metrics.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))


def _known_tokens(source: RolloutSource, roles: Roles, everyone: Ranks) -> RolloutSource:
    """Return the source, watched where a model that reads its tokens has a smaller vocabulary than the actor."""
    readers = [roles.engines[role] for role in ("critic", "reference") if role in roles.engines]
    smallest = min(readers, key=lambda engine: engine.sharding.hf.vocab_size, default=roles.actor_engine)
    vocab_size = smallest.sharding.hf.vocab_size
    if vocab_size >= roles.actor_engine.sharding.hf.vocab_size:
        return source
    return VocabularyGuard(source, vocab_size=vocab_size, reader=smallest.name, everyone=everyone)


def _exporter(config: Config, roles: Roles, rollouts: Rollouts, world: Ranks) -> Callable[[int], None]:
    """Return the function that writes the actor as a Hugging Face checkpoint, given the number of steps done."""
    exports = HfExports(
        engine=roles.actor_engine,
        root=Path(config.trainer.run_dir) / "hf",
        source=Path(config.model.path),
        ranks=world,
        on_error=config.checkpoint.on_error,
    )

    def export(done: int) -> None:
        with rollouts.on_device():
            roles.models.take_turn("actor", PARAMETERS)
            exports(done)

    return export


def run_settings(config: Config) -> RunSettings:
    """Return the settings that the loop itself reads."""
    return RunSettings(
        steps=config.trainer.steps,
        samples=config.rollout.n,
        val_interval=config.trainer.val_interval,
        save_interval=config.checkpoint.save_interval,
        memory_interval=config.checkpoint.memory.interval,
        save_final=config.checkpoint.save_final,
        hf_interval=config.checkpoint.hf_interval,
        hf_final=config.checkpoint.hf_final,
        rollout_interval=config.metrics.rollout_interval,
        rollout_samples=config.metrics.rollout_samples,
    )


def build_overlong(config: Config) -> Overlong:
    """Return the treatment of responses that reach the length limit."""
    return Overlong(config.rollout.max_new_tokens, **dataclasses.asdict(config.reward.overlong))


def minibatch_plan(config: Config) -> MinibatchPlan:
    """Return how a step's batch is cut."""
    return MinibatchPlan(
        minibatch_size=config.trainer.minibatch_size,
        epochs=config.algorithm.epochs,
        aggregation=AGGREGATIONS[config.algorithm.loss_aggregation],
        max_response_tokens=config.rollout.max_new_tokens,
        seed=config.trainer.seed,
    )
