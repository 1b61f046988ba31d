"""Rollouts of a run and the way of its weights there: the embedded engine, or SGLang servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from mega_rl.accelerator import Accelerator
from mega_rl.assemble.plan import RunPlan
from mega_rl.assemble.roles import Roles
from mega_rl.assemble.servers import is_colocated
from mega_rl.assemble.sglang import Connection, connect
from mega_rl.assemble.sources import OwnRollouts, make_rollout_source
from mega_rl.config.schema import Config
from mega_rl.protocols import CheckpointStore, Ranks, RankState, RolloutSource, SampleListener, WeightSync
from mega_rl.rollout.embedded.engine import HFRolloutEngine
from mega_rl.rollout.embedded.sampling import Sampler
from mega_rl.rollout.embedded.weight_sync import EmbeddedWeightSync
from mega_rl.rollout.hidden_tokens import ids_of
from mega_rl.rollout.sglang.generation.engine import (
    FailedSamples,
    Sampled,
    SglangRolloutEngine,
    SglangRolloutSettings,
)
from mega_rl.rollout.sglang.generation.results import Progress
from mega_rl.rollout.sglang.generation.samples import RoutedLayers, Sampling
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.stop_tokens import with_end_of_sequence
from mega_rl.tracking import progress
from mega_rl.types import Draws, Prompt
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.background import ThreadedRollouts
from mega_rl.workers.colocation import ColocatedCheckpoints, ColocatedRollouts, SharedDevices
from mega_rl.workers.own_rollouts.weights import WeightsToSource
from mega_rl.workers.rollout import BackgroundRolloutWorker, RolloutWorker
from mega_rl.workers.turns import NOTHING, PARAMETERS, ResidentModels, RolloutsInTurn

CHECK = 0x636865636B  # "check": stream of random numbers that no evaluation has


@dataclass(frozen=True)
class Rollouts:
    """The parts of a run that know where responses come from."""

    source: RolloutSource
    sync: WeightSync
    checkpoints: CheckpointStore
    pending: RankState | None = None  # what a checkpoint must keep of them
    # Inside, the trainer's state is on its device; collective.
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext
    # Adds a listener of samples as they end; one of an engine that ends them all at once hears of none.
    listen: Callable[[SampleListener], None] = lambda listener: None


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
    checkpoints: CheckpointStore,
    inputs: RolloutInputs,
    resources: ExitStack,
) -> Rollouts:
    """Return source, weight sync and checkpoints of a run. Waits for the servers; collective."""
    config, actor = plan.config, roles.actor_engine
    if config.rollout.backend == "none":
        return _engineless_rollouts(plan, world, roles, checkpoints, inputs)
    if servers is None:
        return _embedded_rollouts(plan, accelerator, world, roles, checkpoints, inputs)
    servers.wait_ready()
    colocated = is_colocated(config, accelerator)
    connection = resources.enter_context(connect(plan, servers, actor=actor, world=world, colocated=colocated))
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
        return _in_turn(
            roles.models,
            source=ahead,
            sync=ahead,
            checkpoints=checkpoints,
            pending=ahead,
            listen=engine.listeners.append,
        )
    source, pending = _source(plan, world, roles, inputs, worker, connection.sync)
    # What a source of the user's samples are turns of a response, and not what is scored.
    listen = engine.listeners.append if inputs.own is None else _unheard
    if colocated:
        devices = SharedDevices(
            models=roles.models,
            servers=connection.memory,
            everyone=world,
        )
        connection.sync.add_listener(devices)
        rollouts = ColocatedRollouts(source, connection.sync, devices)
        store = ColocatedCheckpoints(checkpoints, devices)
        return Rollouts(rollouts, rollouts, store, pending, on_device=devices.on_device, listen=listen)
    return _in_turn(
        roles.models, source=source, sync=connection.sync, checkpoints=checkpoints, pending=pending, listen=listen
    )


def _embedded_rollouts(
    plan: RunPlan,
    accelerator: Accelerator,
    world: Ranks,
    roles: Roles,
    checkpoints: CheckpointStore,
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
    return _in_turn(
        roles.models, source=source, sync=sync, checkpoints=checkpoints, pending=pending, while_generating=NOTHING
    )


def _engineless_rollouts(
    plan: RunPlan, world: Ranks, roles: Roles, checkpoints: CheckpointStore, inputs: RolloutInputs
) -> Rollouts:
    """Return rollouts of a user's source without an engine, which gets the weights itself where it takes them."""
    assert inputs.own is not None, "rollout.backend=none with rollout.source=single_turn, which a rule refuses"
    sync = WeightsToSource(roles.actor_engine.export_weights)
    made = make_rollout_source(inputs.own, plan, roles, everyone=world, engine=None, sync=sync)
    sync.receiver = made.receiver
    return _in_turn(
        roles.models,
        source=made.source,
        sync=sync,
        checkpoints=checkpoints,
        pending=made.state,
        while_generating=NOTHING,
    )


def _source(
    plan: RunPlan, world: Ranks, roles: Roles, inputs: RolloutInputs, worker: RolloutWorker, sync: WeightSync
) -> tuple[RolloutSource, RankState | None]:
    """Return the worker, or the user's source over its engine with the state that a checkpoint keeps."""
    if inputs.own is None:
        return worker, None
    made = make_rollout_source(inputs.own, plan, roles, everyone=world, engine=worker.engine, sync=sync)
    return made.source, made.state


def _unheard(listener: SampleListener) -> None:
    """Add no listener: it hears of no sample, and the reward scores them when all are there."""


def _in_turn(
    models: ResidentModels,
    *,
    source: RolloutSource,
    sync: WeightSync,
    checkpoints: CheckpointStore,
    pending: RankState | None = None,
    while_generating: frozenset[str] = PARAMETERS,
    listen: Callable[[SampleListener], None] = lambda listener: None,
) -> Rollouts:
    """Return rollouts of a run without servers on its devices; while_generating: parts of a policy that takes turns."""
    if not models.one_at_a_time:
        return Rollouts(source, sync, checkpoints, pending, listen=listen)
    rollouts = RolloutsInTurn(source, sync, models, while_generating)
    return Rollouts(rollouts, rollouts, checkpoints, pending, listen=listen)


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
        connection.fleet,
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
            failed=FailedSamples(mask=sglang.failed_samples == "mask", max_share=sglang.max_failed_share),
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
