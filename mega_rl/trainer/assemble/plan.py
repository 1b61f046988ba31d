"""Models of a run: their plan, decided once for the machine, and their roles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mega_rl.algorithms.kl import KLController
from mega_rl.config.needs import Role, models_take_turns, requested_models
from mega_rl.config.schema import Config
from mega_rl.converters.plan.sharding import Head
from mega_rl.engines.base import EngineSettings, ModelEngine, ModelRequest
from mega_rl.engines.build import adopt, build_engine, resolve_model
from mega_rl.engines.models.adapters import without_adapters
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
from mega_rl.trainer.assemble.algorithms import Method, build_actor_role, build_critic_role, choose_method
from mega_rl.types import Metrics
from mega_rl.workers.models import Lessons, ReferenceWorker, RoleMeter, reference_updates
from mega_rl.workers.residency import ResidentModels
from mega_rl.workers.tenants import Base

log = logging.getLogger(__name__)

TRAINED_ROLES: tuple[Role, ...] = ("actor", "critic")


@dataclass(frozen=True)
class RunPlan:
    """The models of a run before they are built, and the method that trains them."""

    engine: EngineSettings
    models: Mapping[Role, ModelRequest]
    method: Method
    rollout_dtype: torch.dtype
    name: str = ""  # among runs with one base
    base: Base | None = None  # models that other runs use too; None: there are no others


def plan_run(config: Config, accelerator: Accelerator, base: Base | None = None) -> RunPlan:
    """Return the plan of a run on this machine."""
    settings, device_type = engine_settings(config), accelerator.device.type
    asked = requested_models(config)
    models = {
        role: resolve_model(
            role, one.path, head=one.head, trainable=role in TRAINED_ROLES,
            settings=settings, attention=one.attention, device_type=device_type,
        )
        for role, one in asked.items()
    }  # fmt: skip
    if any(model.impl == "te" for model in models.values()):
        check_one_backend({role: model.attention for role, model in asked.items()})
    elif (device_type, config.engine.backend, config.engine.megatron.transformer_impl) == ("cuda", "megatron", "auto"):
        log.info("Transformer Engine is not installed: Megatron-Core's own layers run instead, which are slower")
    rollout_dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    return RunPlan(settings, models, choose_method(config), DTYPES[rollout_dtype], config.trainer.run_dir, base)


def build_actor(
    config: Config, groups: Groups, accelerator: Accelerator, *, head: Head = "lm", trainable: bool = True
) -> ModelEngine:
    """Return the engine of `config.model.path` only, with its weights loaded; collective. Raises UserError."""
    settings, asked = engine_settings(config), requested_models(config)["actor"]
    model = resolve_model(
        "actor", asked.path, head=head, trainable=trainable,
        settings=settings, attention=asked.attention, device_type=accelerator.device.type,
    )  # fmt: skip
    return build_engine(model, settings=settings, groups=groups, accelerator=accelerator)


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


@dataclass(frozen=True)
class Roles:
    """The models of a run in their roles, and the engines under them."""

    actor: Learner
    critic: Learner | None
    reference: TokenModel | None  # gives log-probs; a reference that only teaches does not
    average: WeightAverage | None  # reference that follows the policy
    update_reference: Callable[[int], Metrics]  # given the steps done; collective
    kl: KLController
    method: Method
    paths: Mapping[Role, Path]  # checkpoints that the models come from
    engines: Mapping[Role, ModelEngine]  # the actor's first
    models: ResidentModels  # the same, on and off the device
    work: WorkMeter  # this rank's in all of them

    @property
    def actor_engine(self) -> ModelEngine:
        """Return the engine of the policy."""
        return self.engines["actor"]


def build_roles(plan: RunPlan, accelerator: Accelerator, groups: Groups, *, steps: int, colocated: bool) -> Roles:
    """Return every role of the plan with its weights loaded; collective.

    steps: length of the run, which learning rates follow. colocated: servers share the devices.
    """
    method, settings, config = plan.method, plan.method.settings.kl, plan.engine.engine
    turns = models_take_turns(config, len(plan.models) > 1, colocated=colocated)
    models = ResidentModels(accelerator, one_at_a_time=turns)
    of_reference = config.of_reference if config.backend == "megatron" else config
    engines: dict[Role, ModelEngine] = {}
    for role, model in plan.models.items():
        own = groups
        if role == "reference" and of_reference != config:
            layout = ParallelLayout.of_engine(of_reference, world_size=groups.layout.world_size)
            own = another(layout, groups, timeout_s=plan.engine.timeout_s)
        build = partial(build_engine, model, settings=plan.engine, groups=own, accelerator=accelerator)
        with nullcontext() if own is groups else current(own):
            shared = plan.base if role == "actor" else None
            engines[role] = models.add(role, build() if shared is None else shared.actor(build, plan.name))
    actor, work = engines["actor"], WorkMeter()
    adopt(actor, plan.engine)
    kl = KLController(settings.coef, settings.target if settings.control == "adaptive" else None, settings.horizon)

    def meter(role: Role) -> RoleMeter:
        sharding = engines[role].sharding
        # Every role gets the rows of the actor's replicas.
        return RoleMeter(ModelWork(sharding.hf, head=sharding.head), work, actor.replica.size)

    reference, lessons, average, updates = None, None, None, reference_updates()
    if method.reads_reference and "reference" not in engines:
        reference = ReferenceWorker(without_adapters(actor.forward), meter("actor"))
    if "reference" in engines:
        frozen, counted, relaid = engines["reference"], meter("reference"), None
        if frozen.groups is not actor.groups:
            relaid = OwnLayout(frozen, frozen, actor, DTYPES[plan.engine.model.dtype])
        if method.reads_reference:
            reference = ReferenceWorker(frozen.forward if relaid is None else relaid.evaluate, counted)
        if method.needs_teacher:
            lessons = Lessons(relaid or frozen, getattr(method.objective, "beta", 1.0), models, counted)
        if interval := settings.reference_interval:
            stored = (models.stored("reference"), models.stored("actor"))
            average = WeightAverage(*stored, settings.reference_rate, ranks_of(groups.host_world))
            updates = reference_updates(interval, average.update)
    optim, critic = plan.engine.optim, None
    learner = build_actor_role(method, optim, actor, kl, total_steps=steps, lessons=lessons, meter=meter("actor"))
    if "critic" in engines:
        critic = build_critic_role(method, optim, engines["critic"], total_steps=steps, meter=meter("critic"))
    paths = {role: model.path for role, model in plan.models.items()}
    return Roles(learner, critic, reference, average, updates, kl, method, paths, engines, models, work)
