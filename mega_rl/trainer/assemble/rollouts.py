"""Rollouts of a run and the way of its weights there: the embedded engine, or SGLang servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.protocols import Ranks, RankState, RolloutSource, WeightSync
from mega_rl.rollout.embedded.engine import HFRolloutEngine
from mega_rl.rollout.embedded.sampling import Sampler
from mega_rl.rollout.embedded.weight_sync import EmbeddedWeightSync
from mega_rl.rollout.hidden_tokens import ids_of
from mega_rl.rollout.sglang.build import Connection, connect
from mega_rl.rollout.sglang.generation.engine import (
    FailedSamples,
    Sampled,
    SglangRolloutEngine,
    SglangRolloutSettings,
)
from mega_rl.rollout.sglang.generation.samples import Progress, RoutedLayers, Sampling
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.stop_tokens import with_end_of_sequence
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.plan import RunPlan
from mega_rl.trainer.assemble.roles import Roles
from mega_rl.trainer.assemble.sources import OwnRollouts, make_rollout_source
from mega_rl.types import Draws, Prompt
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.background import ThreadedRollouts
from mega_rl.workers.own_rollouts.weights import WeightsToSource
from mega_rl.workers.residency import NOTHING, PARAMETERS, Residency
from mega_rl.workers.rollout import BackgroundRolloutWorker, RolloutWorker

CHECK = 0x636865636B  # "check": stream of random numbers that no evaluation has


@dataclass(frozen=True)
class Rollouts:
    """The parts of a run that know where responses come from."""

    source: RolloutSource
    sync: WeightSync
    devices: Residency
    pending: RankState | None = None  # state that a checkpoint keeps


@dataclass(frozen=True)
class RolloutInputs:
    """Inputs of rollouts that a run reads before its models."""

    prompts: Callable[[int], Sequence[Prompt]]  # of a step
    own: OwnRollouts | None = None  # the user's source in place of one response to each prompt


def build_rollouts(
    plan: RunPlan,
    accelerator: Accelerator,
    world: Ranks,
    servers: ServerPool | None,
    roles: Roles,
    *,
    inputs: RolloutInputs,
    resources: ExitStack,
) -> Rollouts:
    """Return source and weight sync of a run, and the state of its devices by stage. Waits for servers; collective."""
    config, actor = plan.config, roles.actor_engine
    if config.rollout.backend == "none":
        return _engineless_rollouts(plan, world, roles, inputs)
    if servers is None:
        return _embedded_rollouts(plan, accelerator, world, roles, inputs)
    servers.wait_ready()
    connection = connect(
        config.rollout,
        plan.rollout_dtype,
        servers,
        actor=actor,
        world=world,
        hidden_tokens=plan.engine.hidden_tokens,
    )
    resources.enter_context(connection)
    engine = _sglang_engine(plan, world, connection)
    worker = BackgroundRolloutWorker(
        engine=engine,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        n=config.rollout.n,
        seed=config.trainer.seed,
    )
    if config.trainer.async_steps:
        ahead = _ahead(config, world, worker, engine, connection, inputs.prompts)
        resources.callback(ahead.close)
        return Rollouts(ahead, ahead, Residency(roles.models, world, while_generating=PARAMETERS), ahead)
    source, pending = _source(plan, world, roles, inputs, worker, connection.sync)
    shared = connection.memory if servers.colocated else None
    devices = Residency(roles.models, world, shared, PARAMETERS if shared is None else NOTHING)
    if shared is not None:
        connection.sync.add_listener(devices)
    return Rollouts(source, connection.sync, devices, pending)


def _embedded_rollouts(
    plan: RunPlan,
    accelerator: Accelerator,
    world: Ranks,
    roles: Roles,
    inputs: RolloutInputs,
) -> Rollouts:
    """Return rollouts of the engine in this process."""
    rollout, actor, engine = plan.config.rollout, roles.actor_engine, _embedded_engine(plan, accelerator)
    worker = RolloutWorker(
        engine=engine,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        n=rollout.n,
        seed=plan.config.trainer.seed,
    )
    sync = EmbeddedWeightSync(
        actor.export_weights,
        engine,
        bucket_bytes=rollout.bucket_mib << 20,
        verify_interval=rollout.verify_interval,
    )
    source, pending = _source(plan, world, roles, inputs, worker, sync)
    return Rollouts(source, sync, Residency(roles.models, world), pending)


def _engineless_rollouts(plan: RunPlan, world: Ranks, roles: Roles, inputs: RolloutInputs) -> Rollouts:
    """Return rollouts of a user's source without an engine, which gets the weights itself where it takes them."""
    assert inputs.own is not None, "rollout.backend=none with rollout.source=single_turn, which a rule refuses"
    sync = WeightsToSource(roles.actor_engine.export_weights)
    made = make_rollout_source(inputs.own, plan, roles, everyone=world, engine=None, sync=sync)
    sync.receiver = made.receiver
    return Rollouts(made.source, sync, Residency(roles.models, world), made.state)


def _source(
    plan: RunPlan, world: Ranks, roles: Roles, inputs: RolloutInputs, worker: RolloutWorker, sync: WeightSync
) -> tuple[RolloutSource, RankState | None]:
    """Return the worker, or the user's source over its engine with the state that a checkpoint keeps."""
    if inputs.own is None:
        return worker, None
    made = make_rollout_source(inputs.own, plan, roles, everyone=world, engine=worker.engine, sync=sync)
    return made.source, made.state


def _embedded_engine(plan: RunPlan, accelerator: Accelerator) -> HFRolloutEngine:
    """Return the Hugging Face engine of this rank, without weights yet."""
    rollout = plan.config.rollout
    return HFRolloutEngine(
        plan.config.model.path,
        dtype=plan.rollout_dtype,
        device=accelerator.device,
        sampler=Sampler(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=rollout.stop_token_ids,
        batch_size=rollout.hf.batch_size,
        hidden_tokens=plan.engine.hidden_tokens,
    )


def _sglang_engine(plan: RunPlan, world: Ranks, connection: Connection) -> SglangRolloutEngine:
    """The servers as this rank's rollout engine."""
    rollout, sglang = plan.config.rollout, plan.config.rollout.sglang
    path, moe = Path(plan.config.model.path), plan.models["actor"].hf.moe
    hf = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return SglangRolloutEngine(
        connection.router,
        everyone=world,
        weight_version=lambda: connection.sync.weight_version,
        bring_back=connection.bring_back,
        settings=SglangRolloutSettings(
            sampling=Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=rollout.max_new_tokens,
                stop_token_ids=with_end_of_sequence(path, hf, rollout.stop_token_ids),
                hidden_token_ids=tuple(ids_of(plan.engine.hidden_tokens, hf.vocab_size)),
            ),
            max_positions=connection.max_positions,
            timeout_s=sglang.request_timeout_s,
            concurrency=connection.concurrency,
            restarts=sglang.restarts,
            failed=FailedSamples(sglang.max_failed_share),
            routed=None if moe is None or not sglang.return_routing else RoutedLayers(moe.layers, moe.top_k),
            token_versions=sglang.partial_rollout,
        ),
        progress=_ShownSamples(),
    )


class _ShownSamples:
    """Shows a generation of servers as a phase of its own, beside what the trainer does meanwhile."""

    def __init__(self) -> None:
        self._phase: progress.Phase | None = None

    def __call__(self, generation: Progress) -> None:
        """Take one report; all of a generation come from the same thread."""
        if self._phase is None:
            self._phase = progress.begin("samples")
        note = f"{generation.tokens_per_second:.0f} tok/s"
        self._phase.report(generation.done, generation.total, note=note)
        if generation.ended:
            self._phase.end()
            self._phase = None


def _ahead(
    config: Config,
    world: Ranks,
    worker: BackgroundRolloutWorker[Sampled],
    engine: SglangRolloutEngine,
    connection: Connection,
    prompts: Callable[[int], Sequence[Prompt]],
) -> OneStepAhead:
    """Generation of the next step beside training."""
    rows = math.ceil(config.trainer.prompts_per_step / world.size) * config.rollout.n
    background = ThreadedRollouts(
        worker.sample,
        worker.collect,
        everyone=world,
        timeout_s=engine.deadline_s(rows) + config.rollout.sglang.sync.timeout_s,
        requests=engine if config.rollout.sglang.partial_rollout else None,
    )
    return OneStepAhead(
        source=worker,
        background=background,
        sync=connection.sync,
        prompts=prompts,
        steps=config.trainer.steps,
        partial=config.rollout.sglang.partial_rollout,
        check_interval=config.rollout.verify_interval,
        check_prompts=world.size,
        check_draws=Draws(1, config.rollout.temperature, stream=CHECK),
    )
