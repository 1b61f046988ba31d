"""Rollouts and their weights: the embedded engine, SGLang servers, or a user's source."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_rl.agents.environment import Runner, TurnEngine
from mega_rl.config.schema import RolloutConfig, TrainerConfig
from mega_rl.config.user_files import users_code
from mega_rl.converters.live.load import model_config
from mega_rl.engines.base import ModelEngine
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.protocols import EarlyScorer, Ranks, RankState, RolloutSource, WeightSync
from mega_rl.rollout.embedded import EmbeddedRounds, EmbeddedWeightSync, HFRolloutEngine
from mega_rl.rollout.sampling import Sampler
from mega_rl.rollout.sglang.build import Connection, connect
from mega_rl.rollout.sglang.generation.engine import RoutedLayers, SglangRolloutEngine, SglangRolloutSettings
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.tokens import ids_of, with_end_of_sequence
from mega_rl.trainer.assemble.plan import Roles, RunPlan
from mega_rl.trainer.mismatch import PolicyChanges
from mega_rl.trainer.selection import StepVersions, Stock
from mega_rl.types import Draws, Metrics, Prompt, Rollout
from mega_rl.workers.residency import NOTHING, PARAMETERS, Residency
from mega_rl.workers.rollout import (
    CheckedRollouts,
    EnvironmentRollouts,
    RolloutContext,
    RolloutWorker,
    WeightsToSource,
)
from mega_rl.workers.stream import RolloutStream, ServerFlow

if TYPE_CHECKING:
    from mega_rl.trainer.assemble.load import Inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnRollouts:
    """A user's rollout source, and what it must hold to."""

    make: Callable[[object], object]  # the source from its `RolloutContext`
    name: str
    max_prompt_tokens: int
    draws: bool  # evaluations say how they sample


class NoRollouts:
    """Source and weight sync of a run that samples nothing."""

    weight_version = 0

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        raise AssertionError("this run samples nothing")

    def metrics(self) -> Metrics:
        return {}

    def resume_at(self, version: int) -> None:
        """Do nothing: there is no version."""

    def publish(self) -> Metrics:
        return {}


@dataclass(frozen=True)
class Rollouts:
    """Source of responses, sync of its weights, and state of the devices by stage."""

    source: RolloutSource
    sync: WeightSync
    devices: Residency
    pending: RankState | None = None  # state that a checkpoint keeps
    stream: RolloutStream | None = None  # source and sync of generation ahead
    stock: Stock | None = None  # its groups
    changes: PolicyChanges | None = None  # between the versions of its tokens


def build_rollouts(
    inputs: Inputs, rollout: RolloutConfig, trainer: TrainerConfig, accelerator: Accelerator,
    servers: ServerPool | None, roles: Roles, resources: ExitStack, scores: EarlyScorer | None,
) -> Rollouts:  # fmt: skip
    """Return the rollouts of a run; waits for servers; collective. scores: takes an environment's trajectories."""
    plan, world, actor = inputs.plan, inputs.world, roles.actor_engine
    own = (actor.data_parallel, actor.replica, rollout.n, trainer.seed)
    if rollout.backend == "none" and inputs.rollouts is None:
        return Rollouts(NoRollouts(), NoRollouts(), Residency(roles.models, world))
    if rollout.backend == "none":
        to_source = WeightsToSource(actor.export_weights)
        made, pending = _make_source(inputs, rollout, trainer, roles, None, to_source, None)
        to_source.receive = getattr(made.source, "receive_weights", None)
        return Rollouts(made, to_source, Residency(roles.models, world), pending)
    if servers is None:
        embedded = _embedded_engine(plan, rollout, accelerator)
        sync: WeightSync = _embedded_sync(plan, rollout, embedded, actor, world)
        worker, devices = RolloutWorker(embedded, *own), Residency(roles.models, world)
        rounds = EmbeddedRounds(embedded.turns, trainer.seed)
        engine, sample, in_turns = _engine_of_rounds(plan, rollout, world, rounds, sync), rounds.sample, True
    else:
        servers.wait_ready()
        connection = connect(
            rollout, plan.rollout_dtype, servers, resources,
            actor=actor, world=world, hidden_tokens=plan.engine.hidden_tokens,
        )  # fmt: skip
        engine = build_sglang_engine(plan, rollout, world, connection, token_versions=trainer.async_steps > 0)
        sample, in_turns = None, servers.colocated
        sync, worker = connection.sync, RolloutWorker(engine, *own)
        shared = connection.memory if servers.colocated else None
        devices = Residency(roles.models, world, shared, PARAMETERS if shared is None else NOTHING)
        if shared is not None:
            connection.sync.after_send = devices.after_send
    own_source, pending = None, None
    if inputs.rollouts is not None:
        own_source, pending = _make_source(inputs, rollout, trainer, roles, worker.engine, sync, scores)
    if trainer.async_steps:
        stream = _stream(rollout, trainer, roles.method.settings.epochs, worker, engine, sync, own_source, in_turns)
        stream.flow.sample, devices.end_round = sample, stream.flow.pause
        resources.callback(stream.flow.close)
        redraws = rollout.dynamic_sampling.expired == "redraw"
        versions = StepVersions(trainer.async_steps, lambda: stream.weight_version)
        stock = Stock(stream.flow, versions, stream.flow, redraws)
        return Rollouts(stream, stream, devices, stock, stream, stock, PolicyChanges(versions))
    return Rollouts(own_source or worker, sync, devices, pending)


def _make_source(
    inputs: Inputs, rollout: RolloutConfig, trainer: TrainerConfig, roles: Roles, engine: TurnEngine | None,
    sync: WeightSync, scores: EarlyScorer | None,
) -> tuple[CheckedRollouts, RankState | None]:  # fmt: skip
    """Return (a user's rollout source with checks, its state or None). Raises UserError."""
    own, actor, tokens = inputs.rollouts, roles.actor_engine, inputs.tokens
    assert own is not None, "a rule refuses rollout.backend=none with rollout.source=single_turn"
    name = f"rollout.source={own.name!r}"
    context = RolloutContext(
        tokenizer=tokens.tokenizer,
        engine=engine,
        sampling=_sampling(rollout, tokens.stop_ids),
        n=rollout.n,
        seed=trainer.seed,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        weight_version=lambda: sync.weight_version,
        template=tokens.template,
        reads_scores=inputs.rewards.settings.source.name == "environment",
    )
    with users_code(f"{name} cannot be made"):
        made: Any = own.make(context)
    known = min(model.hf.vocab_size for role, model in inputs.plan.models.items() if role != "reward")
    if hasattr(made, "run"):
        if engine is None:
            raise UserError(f"{name}: an environment needs an engine; set rollout.backend=hf or sglang")
        runner = Runner(made, name, known)
        window = trainer.prompts_per_step * rollout.n if trainer.async_steps else 0
        made = EnvironmentRollouts(runner, context, inputs.world, scores, window)
    if not (hasattr(made, "generate") and hasattr(made, "metrics")):
        raise UserError(
            f"{name}: made {type(made).__name__}; an environment has the method run, a rollout source generate and "
            "metrics"
        )
    parameters = inspect.signature(made.generate).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if own.draws and "draws" not in parameters and not takes_any:
        raise UserError(
            f"{name}: its generate takes no draws, which validation.temperature and validation.max_new_tokens need; "
            "add the parameter draws=None and pass it on to start, or set both to 0"
        )
    if hasattr(made, "receive_weights") and engine is not None:
        raise UserError(
            f"{name}: its receive_weights has no effect with rollout.backend={rollout.backend}, whose engine takes the "
            "weights; set rollout.backend=none, or leave it out"
        )
    pending = made if hasattr(made, "state") and hasattr(made, "restore") else None
    return CheckedRollouts(made, name, context, own.max_prompt_tokens, known, inputs.world), pending


def _embedded_engine(plan: RunPlan, rollout: RolloutConfig, accelerator: Accelerator) -> HFRolloutEngine:
    return HFRolloutEngine(
        plan.models["actor"].path,
        dtype=plan.rollout_dtype,
        device=accelerator.device,
        sampler=Sampler(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=rollout.stop_token_ids,
        batch_size=rollout.hf.batch_size,
        hidden_tokens=plan.engine.hidden_tokens,
        shares=None if plan.base is None else plan.base.sampler,
    )


def _embedded_sync(
    plan: RunPlan, rollout: RolloutConfig, embedded: HFRolloutEngine, actor: ModelEngine, world: Ranks
) -> EmbeddedWeightSync:
    adapter = plan.models["actor"].hf.adapter
    if plan.base is not None:
        plan.base.sampler = plan.base.sampler or embedded
    apart = adapter is not None and embedded.adapt(adapter)
    if adapter is not None and not apart and world.rank == 0:
        log.info("rollouts get merged weights: a target is not a linear layer in transformers")
    return EmbeddedWeightSync(
        partial(actor.export_weights, "apart" if apart else "merged"),
        embedded,
        verify_interval=rollout.verify_interval,
        export_adapters=partial(actor.export_weights, "adapters") if apart else None,
    )


def _engine_of_rounds(
    plan: RunPlan, rollout: RolloutConfig, world: Ranks, rounds: EmbeddedRounds, sync: WeightSync
) -> SglangRolloutEngine:
    """Return an embedded engine's rounds as the engine of generation ahead."""
    path = plan.models["actor"].path

    def bring_back(*_: object, **__: object) -> None:
        raise AssertionError("there are no servers")

    settings = SglangRolloutSettings(
        sampling=_sampling(rollout, with_end_of_sequence(path, model_config(path), rollout.stop_token_ids)),
        max_positions=plan.models["actor"].hf.max_position_embeddings,
        timeout_s=math.inf,
        concurrency=1,
        restarts=0,
        max_failed_share=0.0,
        token_versions=True,
    )
    version: Callable[[], int] = lambda: sync.weight_version  # noqa: E731
    return SglangRolloutEngine(rounds, everyone=world, weight_version=version, bring_back=bring_back, settings=settings)


def build_sglang_engine(
    plan: RunPlan, rollout: RolloutConfig, world: Ranks, connection: Connection, *, token_versions: bool = False
) -> SglangRolloutEngine:
    """Return the servers as this rank's rollout engine."""
    actor, sglang = plan.models["actor"], rollout.sglang
    path, moe = actor.path, actor.hf.moe
    return SglangRolloutEngine(
        connection.router,
        everyone=world,
        weight_version=lambda: connection.sync.weight_version,
        bring_back=connection.bring_back,
        settings=SglangRolloutSettings(
            sampling=replace(
                _sampling(rollout, with_end_of_sequence(path, model_config(path), rollout.stop_token_ids)),
                hidden_token_ids=tuple(ids_of(plan.engine.hidden_tokens, actor.hf.vocab_size)),
                adapter=connection.adapter,
            ),
            max_positions=actor.hf.max_position_embeddings,
            timeout_s=sglang.request_timeout_s,
            concurrency=connection.concurrency,
            restarts=sglang.restarts,
            max_failed_share=sglang.max_failed_share,
            routed=None if moe is None or not sglang.return_routing else RoutedLayers(moe.layers, moe.top_k),
            token_versions=token_versions,
        ),
    )


def _sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, stop_ids)


def _stream(
    rollout: RolloutConfig, trainer: TrainerConfig, epochs: int, worker: RolloutWorker,
    engine: SglangRolloutEngine, sync: WeightSync, own_source: CheckedRollouts | None,
    in_turns: bool,
) -> RolloutStream:  # fmt: skip
    rows = math.ceil((trainer.async_steps + 1) * trainer.prompts_per_step / engine.everyone.size) * rollout.n
    updates = epochs * trainer.prompts_per_step // trainer.minibatch_size
    # A response that began k steps ago is complete. In turns its first round is in the step that begins it.
    rounds = trainer.async_steps * math.ceil(updates / (rollout.sglang.sync.interval or updates)) + in_turns
    by_tokens = rollout.sglang.arrival == "lock"
    source = None if own_source is None else own_source.source
    environments = source if isinstance(source, EnvironmentRollouts) else None
    own_s = 0.0 if environments is None else environments.runner.environment.timeout_s
    flow = ServerFlow(
        worker=worker,
        engine=engine,
        everyone=engine.everyone,
        version=lambda: sync.weight_version,
        quantum=math.ceil(rollout.max_new_tokens / rounds) if by_tokens else 0,
        timeout_s=engine.deadline_s(rows) + rollout.sglang.sync.timeout_s + own_s,
        rollouts=environments,
        in_turns=in_turns,
    )
    keeps = rollout.sglang.sync.in_flight == "keep"
    return RolloutStream(flow, sync, own_source or worker, keeps)
