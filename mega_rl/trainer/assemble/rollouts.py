"""Rollouts and their weights: the embedded engine, SGLang servers, or a user's source."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from mega_rl.config.choices import ROLLOUT, chosen
from mega_rl.config.schema import RolloutConfig
from mega_rl.config.user_files import users_code
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.protocols import Ranks, RankState, RolloutEngine, RolloutSource, WeightSync
from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine
from mega_rl.rollout.sampling import Sampler
from mega_rl.rollout.sglang.build import Connection, connect
from mega_rl.rollout.sglang.generation.engine import RoutedLayers, SglangRolloutEngine, SglangRolloutSettings
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.tokens import ids_of, with_end_of_sequence
from mega_rl.trainer.assemble.plan import Roles, RunPlan
from mega_rl.types import Draws, Prompt
from mega_rl.workers.ahead import OneStepAhead, ThreadedRollouts
from mega_rl.workers.residency import NOTHING, PARAMETERS, Residency
from mega_rl.workers.rollout import (
    BackgroundRolloutWorker,
    CheckedRollouts,
    RolloutContext,
    RolloutWorker,
    WeightsToSource,
)

if TYPE_CHECKING:
    from mega_rl.trainer.assemble.load import Inputs

CHECK = 0x636865636B  # "check": stream of random numbers that no evaluation has


@dataclass(frozen=True)
class Rollouts:
    """Source of responses, sync of its weights, and state of the devices by stage."""

    source: RolloutSource
    sync: WeightSync
    devices: Residency
    pending: RankState | None = None  # state that a checkpoint keeps


def build_rollouts(
    inputs: Inputs,
    accelerator: Accelerator,
    servers: ServerPool | None,
    roles: Roles,
    resources: ExitStack,
    *,
    prompts: Callable[[int], Sequence[Prompt]],
) -> Rollouts:
    """Return the rollouts of a run; waits for servers; collective. prompts: of a step."""
    plan, world, actor = inputs.plan, inputs.world, roles.actor_engine
    config, rollout = plan.config, plan.config.rollout
    own = (actor.data_parallel, actor.replica, rollout.n, config.trainer.seed)
    if rollout.backend == "none":
        to_source = WeightsToSource(actor.export_weights)
        made = _make_source(inputs, roles, None, to_source)
        to_source.receive = getattr(made.source, "receive_weights", None)
        return Rollouts(made, to_source, Residency(roles.models, world), _pending(made))
    if servers is None:
        embedded = _embedded_engine(plan, accelerator)
        bucket_bytes, interval = rollout.bucket_mib << 20, rollout.verify_interval
        sync: WeightSync = EmbeddedWeightSync(
            actor.export_weights, embedded, bucket_bytes=bucket_bytes, verify_interval=interval
        )
        worker, devices = RolloutWorker(embedded, *own), Residency(roles.models, world)
    else:
        servers.wait_ready()
        hidden = plan.engine.hidden_tokens
        connection = connect(
            rollout, plan.rollout_dtype, servers, resources, actor=actor, world=world, hidden_tokens=hidden
        )
        engine, sync = build_sglang_engine(plan, world, connection), connection.sync
        worker = BackgroundRolloutWorker(engine, *own)
        shared = connection.memory if servers.colocated else None
        devices = Residency(roles.models, world, shared, PARAMETERS if shared is None else NOTHING)
        if config.trainer.async_steps:
            ahead = _ahead(inputs, worker, engine, sync, prompts)
            resources.callback(ahead.close)
            return Rollouts(ahead, ahead, devices, ahead)
        if shared is not None:
            connection.sync.add_listener(devices.after_send)
    source = worker if inputs.rollouts is None else _make_source(inputs, roles, worker.engine, sync)
    return Rollouts(source, sync, devices, _pending(source))


def _pending(source: RolloutSource) -> RankState | None:
    made = getattr(source, "source", None)
    return made if hasattr(made, "state") and hasattr(made, "restore") else None


def _make_source(inputs: Inputs, roles: Roles, engine: RolloutEngine | None, sync: WeightSync) -> CheckedRollouts:
    """Return a user's rollout source with checks of its rows; engine: None without one. Raises UserError."""
    assert inputs.rollouts is not None, "a rule refuses rollout.backend=none with rollout.source=single_turn"
    config, actor, tokens = inputs.plan.config, roles.actor_engine, inputs.tokens
    rollout, name = config.rollout, f"rollout.source={chosen(config, ROLLOUT)!r}"
    context = RolloutContext(
        tokenizer=tokens.tokenizer,
        engine=engine,
        sampling=_sampling(rollout, tokens.stop_ids),
        n=rollout.n,
        seed=config.trainer.seed,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        weight_version=lambda: sync.weight_version,
    )
    with users_code(f"{name} cannot be made"):
        made: Any = inputs.rollouts(context)
    if not (hasattr(made, "generate") and hasattr(made, "metrics")):
        raise UserError(f"{name}: made {type(made).__name__}; a rollout source has the methods generate and metrics")
    parameters, val = inspect.signature(made.generate).parameters, config.validation
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if (val.temperature or val.max_new_tokens) and "draws" not in parameters and not takes_any:
        raise UserError(
            f"{name}: its generate takes no draws, which validation.temperature and validation.max_new_tokens need; "
            "add the parameter draws=None and pass it on to sample and extend, or set both to 0"
        )
    if hasattr(made, "receive_weights") and engine is not None:
        raise UserError(
            f"{name}: its receive_weights has no effect with rollout.backend={rollout.backend}, whose engine takes the "
            "weights; set rollout.backend=none, or leave it out"
        )
    return CheckedRollouts(made, name, context, config.data.max_prompt_tokens, inputs.vocab_size, inputs.world)


def _embedded_engine(plan: RunPlan, accelerator: Accelerator) -> HFRolloutEngine:
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


def build_sglang_engine(plan: RunPlan, world: Ranks, connection: Connection) -> SglangRolloutEngine:
    """Return the servers as this rank's rollout engine."""
    rollout, sglang = plan.config.rollout, plan.config.rollout.sglang
    path, moe = Path(plan.config.model.path), plan.models["actor"].hf.moe
    hf = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return SglangRolloutEngine(
        connection.router,
        everyone=world,
        weight_version=lambda: connection.sync.weight_version,
        bring_back=connection.bring_back,
        settings=SglangRolloutSettings(
            sampling=replace(
                _sampling(rollout, with_end_of_sequence(path, hf, rollout.stop_token_ids)),
                hidden_token_ids=tuple(ids_of(plan.engine.hidden_tokens, hf.vocab_size)),
            ),
            max_positions=plan.models["actor"].hf.max_position_embeddings,
            timeout_s=sglang.request_timeout_s,
            concurrency=connection.concurrency,
            restarts=sglang.restarts,
            max_failed_share=sglang.max_failed_share,
            routed=None if moe is None or not sglang.return_routing else RoutedLayers(moe.layers, moe.top_k),
            token_versions=sglang.partial_rollout,
        ),
    )


def _sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, stop_ids)


def _ahead(
    inputs: Inputs,
    worker: BackgroundRolloutWorker,
    engine: SglangRolloutEngine,
    sync: WeightSync,
    prompts: Callable[[int], Sequence[Prompt]],
) -> OneStepAhead:
    config, world = inputs.plan.config, inputs.world
    rollout, partial = config.rollout, config.rollout.sglang.partial_rollout
    rows = math.ceil(config.trainer.prompts_per_step / world.size) * rollout.n
    background = ThreadedRollouts(
        worker.sample,
        worker.collect,
        everyone=world,
        timeout_s=engine.deadline_s(rows) + rollout.sglang.sync.timeout_s,
        requests=engine if partial else None,
    )
    return OneStepAhead(
        source=worker,
        background=background,
        sync=sync,
        prompts=prompts,
        steps=config.trainer.steps,
        partial=partial,
        check_interval=rollout.verify_interval,
        check_prompts=world.size,
        check_draws=Draws(1, rollout.temperature, stream=CHECK),
    )
