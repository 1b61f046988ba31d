"""Models of a run: their plan, decided once from its Config and the machine, and their roles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mega_rl.algorithms.kl import KLController
from mega_rl.config.choices import LOSS, has_reference, needs_critic, reads_reference
from mega_rl.config.needs import Role, models_take_turns, requested_attention
from mega_rl.config.rules.parallel import has_own_layout
from mega_rl.config.schema import Config
from mega_rl.converters.plan.sharding import Head
from mega_rl.engines.base import EngineSettings, ModelEngine, ModelRequest
from mega_rl.engines.build import build_engine, resolve_model
from mega_rl.engines.models.build import DTYPES
from mega_rl.engines.models.specs import check_one_backend
from mega_rl.engines.own_layout import OwnLayout
from mega_rl.engines.weight_average import WeightAverage
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups, another, current
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Learner, TokenModel
from mega_rl.rollout.tokens import hidden_tokens
from mega_rl.tracking.metrics.flops import ModelWork
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.trainer.assemble.algorithms import build_actor_role, build_critic_role, build_objective
from mega_rl.types import Metrics
from mega_rl.workers.models import Lessons, ReferenceWorker, RoleMeter, reference_updates
from mega_rl.workers.residency import ResidentModels

log = logging.getLogger(__name__)

TRAINED_ROLES: tuple[Role, ...] = ("actor", "critic")
_HEADS: dict[Role, Head] = {"actor": "lm", "critic": "value", "reference": "lm", "reward": "value"}


@dataclass(frozen=True)
class RunPlan:
    """A run before anything is built: settings, models by role, dtype of rollouts."""

    config: Config
    engine: EngineSettings
    models: Mapping[Role, ModelRequest]
    rollout_dtype: torch.dtype


def plan_run(config: Config, accelerator: Accelerator) -> RunPlan:
    """Return the plan of a run on this machine."""
    settings, device_type = engine_settings(config), accelerator.device.type
    models = {role: _model_of(config, role, settings, device_type, _HEADS[role]) for role in roles_of(config)}
    if any(model.impl == "te" for model in models.values()):
        check_one_backend({role: requested_attention(config, role) for role in models})
    elif (
        device_type == "cuda"
        and config.engine.backend == "megatron"
        and config.engine.megatron.transformer_impl == "auto"
    ):
        log.info("Transformer Engine is not installed: Megatron-Core's own layers run instead, which are slower")
    rollout_dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    return RunPlan(config, settings, models, DTYPES[rollout_dtype])


def build_actor(
    config: Config, groups: Groups, accelerator: Accelerator, *, head: Head = "lm", trainable: bool = True
) -> ModelEngine:
    """Return the engine of `config.model.path` only, with its weights loaded; collective. Raises UserError."""
    settings = engine_settings(config)
    model = _model_of(config, "actor", settings, accelerator.device.type, head)
    return build_engine(replace(model, trainable=trainable), settings=settings, groups=groups, accelerator=accelerator)


def _model_of(config: Config, role: Role, settings: EngineSettings, device_type: str, head: Head) -> ModelRequest:
    return resolve_model(
        role,
        checkpoint_of(config, role),
        head=head,
        trainable=role in TRAINED_ROLES,
        settings=settings,
        attention=requested_attention(config, role),
        device_type=device_type,
    )


def engine_settings(config: Config) -> EngineSettings:
    """Return the settings of a run that its engines read."""
    own_sampler = config.rollout.backend == "none"  # a user's engine may sample any token
    hidden = () if own_sampler else hidden_tokens(Path(config.model.path), config.rollout.stop_token_ids)
    return EngineSettings(
        engine=config.engine,
        model=config.model,
        optim=config.optim,
        microbatch=config.trainer.microbatch,
        deterministic=config.trainer.deterministic,
        timeout_s=config.trainer.timeout_s,
        temperature=config.rollout.temperature,
        export_bucket_bytes=config.rollout.bucket_mib << 20,
        hidden_tokens=hidden,
    )


def roles_of(config: Config) -> list[Role]:
    """Return the roles of a run that are models."""
    there: dict[Role, bool] = {
        "actor": True,
        "critic": needs_critic(config),
        "reference": has_reference(config),
        "reward": config.reward.source.name == "model",
    }
    return [role for role, is_there in there.items() if is_there]


def checkpoint_of(config: Config, role: Role) -> Path:
    """Return the checkpoint that the model of a role comes from."""
    model = config.model
    own = {"critic": model.critic_path, "reference": model.ref_path, "reward": config.reward.model_path}
    return Path(own.get(role) or model.path)


@dataclass(frozen=True)
class Roles:
    """The models of a run in their roles, and the engines under them."""

    actor: Learner
    critic: Learner | None
    reference: TokenModel | None  # gives log-probs; a reference that only teaches does not
    average: WeightAverage | None  # reference that follows the policy
    update_reference: Callable[[int], Metrics]  # given the steps done; collective
    kl: KLController
    engines: Mapping[Role, ModelEngine]  # the actor's first
    models: ResidentModels  # the same, on and off the device
    work: WorkMeter  # this rank's in all of them

    @property
    def actor_engine(self) -> ModelEngine:
        """Return the engine of the policy."""
        return self.engines["actor"]


def build_roles(plan: RunPlan, accelerator: Accelerator, groups: Groups, *, colocated: bool) -> Roles:
    """Return every role of the plan with its weights loaded; collective. colocated: servers share the devices."""
    config = plan.config
    models = ResidentModels(accelerator, one_at_a_time=models_take_turns(config, colocated=colocated))
    engines: dict[Role, ModelEngine] = {}
    for role, model in plan.models.items():
        own = groups
        if role == "reference" and has_own_layout(config):
            layout = ParallelLayout.of_engine(config.engine.of_reference, world_size=groups.layout.world_size)
            own = another(layout, groups, timeout_s=config.trainer.timeout_s)
        with nullcontext() if own is groups else current(own):
            engine = build_engine(model, settings=plan.engine, groups=own, accelerator=accelerator)
        engines[role] = models.add(role, engine)
    actor, work, settings = engines["actor"], WorkMeter(), config.algorithm.kl
    kl = KLController(settings.coef, settings.target if settings.control == "adaptive" else None, settings.horizon)

    def meter(role: Role) -> RoleMeter:
        sharding = engines[role].sharding
        # Every role gets the rows of the actor's replicas.
        return RoleMeter(ModelWork(sharding.hf, head=sharding.head), work, actor.replica.size)

    reference, lessons, average, updates = None, None, None, reference_updates()
    if "reference" in engines:
        frozen, counted, relaid = engines["reference"], meter("reference"), None
        if frozen.groups is not actor.groups:
            relaid = OwnLayout(frozen, frozen, actor, DTYPES[config.model.dtype])
        if reads_reference(config):
            reference = ReferenceWorker(frozen.forward if relaid is None else relaid.evaluate, counted)
        if LOSS.needs(config, "needs_teacher"):
            lessons = Lessons(relaid or frozen, getattr(build_objective(config), "beta", 1.0), models, counted)
        if interval := settings.reference_interval:
            stored = (models.stored("reference"), models.stored("actor"))
            average = WeightAverage(*stored, settings.reference_rate, ranks_of(groups.host_world))
            updates = reference_updates(interval, average.update)
    learner = build_actor_role(config, actor, kl, lessons, meter("actor"))
    critic = build_critic_role(config, engines["critic"], meter("critic")) if "critic" in engines else None
    return Roles(learner, critic, reference, average, updates, kl, engines, models, work)
