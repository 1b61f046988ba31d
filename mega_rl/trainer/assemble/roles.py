"""The models of a run in their roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from mega_rl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, KLController
from mega_rl.config.attention import Role
from mega_rl.config.choices import LOSS, reads_reference
from mega_rl.config.needs import is_on_policy, models_take_turns
from mega_rl.config.origins import recorded, short_commit
from mega_rl.config.rules.reference import has_own_layout
from mega_rl.config.schema import Config, KlConfig
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.ddp.optimizer import learning_rate
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.build import build_engine
from mega_rl.engines.models.build import DTYPES
from mega_rl.engines.own_layout import OwnLayout
from mega_rl.engines.weight_average import WeightAverage
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups, another
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Learner, ModelPasses, Teacher, TokenModel
from mega_rl.tracking.metrics.flops import ModelWork
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.tracking.metrics.tables import RoleFacts
from mega_rl.trainer.assemble.algorithms import build_correction, build_objective
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, RunPlan, checkpoint_of
from mega_rl.types import Experience, Rollout, TokenOutputs
from mega_rl.workers.models import (
    LearningWorker,
    Lessons,
    PolicyLoss,
    ReferenceUpdates,
    ReferenceWorker,
    RoleMeter,
    ValueLoss,
)
from mega_rl.workers.residency import ResidentModels


@dataclass(frozen=True)
class Roles:
    """The models of a run in their roles, and the engines under them."""

    actor: Learner
    critic: Learner | None
    reference: TokenModel | None  # gives log-probs; one that only teaches does not
    average: WeightAverage | None  # of a reference that follows the policy
    kl: KLController
    engines: Mapping[Role, ModelEngine]  # of the roles that the run has, the actor's first
    models: ResidentModels  # the same, on and off the device
    work: WorkMeter  # of this rank in all of them

    @property
    def actor_engine(self) -> ModelEngine:
        """Return the engine of the policy."""
        return self.engines["actor"]

    def reference_updates(self, kl: KlConfig) -> ReferenceUpdates:
        """Return the updates of the reference's weights."""
        return (
            ReferenceUpdates() if self.average is None else ReferenceUpdates(kl.reference_interval, self.average.update)
        )


def build_roles(plan: RunPlan, accelerator: Accelerator, groups: Groups, *, colocated: bool) -> Roles:
    """Return every role of the plan with its weights loaded; collective. colocated: servers share the devices."""
    models = ResidentModels(accelerator, one_at_a_time=models_take_turns(plan.config, colocated=colocated))
    engines: dict[Role, ModelEngine] = {}
    for role, model in plan.models.items():
        its_groups = _groups_of(role, plan, groups)
        with nullcontext() if its_groups is groups else its_groups.current():
            engine = build_engine(model, settings=plan.engine, groups=its_groups, accelerator=accelerator)
        engines[role] = models.add(role, engine)
    config, actor_engine = plan.config, engines["actor"]
    kl, work = build_kl(config.algorithm.kl), WorkMeter()
    reference: TokenModel | None = None
    lessons: Lessons | None = None
    average = None
    if "reference" in engines:
        # Its rows are those of the actor's replicas.
        meter = RoleMeter(_work(engines["reference"]), work, actor_engine.replica.size)
        forward, teacher = _frozen_passes(engines["reference"], actor_engine, dtype=DTYPES[config.model.dtype])
        if reads_reference(config):
            reference = ReferenceWorker(forward, meter)
        if LOSS.needs(config, "needs_teacher"):
            lessons = Lessons(teacher, getattr(build_objective(config), "beta", 1.0), models, meter)
        if (settings := config.algorithm.kl).reference_interval:
            everyone = ranks_of(groups.host_world)
            stored = (models.stored("reference"), models.stored("actor"))
            average = WeightAverage(*stored, settings.reference_rate, everyone)
    actor = build_actor_role(config, actor_engine, kl, lessons, _meter(actor_engine, work))
    critic = None
    if "critic" in engines:
        critic = build_critic_role(config, engines["critic"], _meter(engines["critic"], work))
    return Roles(actor, critic, reference, average, kl, engines, models, work)


def _groups_of(role: Role, plan: RunPlan, groups: Groups) -> Groups:
    """Return the groups of a role's model: those of the run, or new ones of a layout of its own; collective."""
    if role != "reference" or not has_own_layout(plan.config):
        return groups
    layout = ParallelLayout.of_engine(plan.engine.engine.of_reference, world_size=groups.layout.world_size)
    return another(layout, groups, timeout_s=plan.engine.timeout_s)


def _frozen_passes(
    engine: ModelEngine, actor: ModelEngine, *, dtype: torch.dtype
) -> tuple[Callable[[Rollout | Experience], TokenOutputs], Teacher]:
    """Return the reference's forward and the reference as a teacher, for rows on the actor's layout."""
    if engine.groups is actor.groups:
        return engine.forward, engine
    relaid = OwnLayout(engine, engine, actor, dtype)
    return relaid.evaluate, relaid


def _meter(engine: ModelEngine, work: WorkMeter) -> RoleMeter:
    return RoleMeter(_work(engine), work, engine.replica.size)


def _work(engine: ModelEngine) -> ModelWork:
    return ModelWork(engine.sharding.hf, head=engine.sharding.head)


def build_actor_role(
    config: Config,
    engine: ModelPasses,
    kl: KLController,
    lessons: Lessons | None = None,
    meter: RoleMeter | None = None,
) -> LearningWorker:
    """Return the role of the policy on its engine: it learns when the critic's warm-up is over."""
    algorithm, objective = config.algorithm, build_objective(config)
    loss = PolicyLoss(
        objective,
        kl=kl if algorithm.kl.name == "loss" else None,
        kl_estimator=KL_ESTIMATORS[algorithm.kl.estimator],
        entropy_coef=algorithm.entropy_coef,
        drift_coef=getattr(objective, "drift_coef", 0.0),
        correction=build_correction(config),
        on_policy=is_on_policy(config),
    )
    first_step = algorithm.critic_warmup_steps
    rate = _learning_rate(config, config.optim.lr, steps=config.trainer.steps - first_step)
    skipped = config.optim.max_skipped_steps
    return LearningWorker(
        "actor", engine, loss, rate, first_step, max_skipped_steps=skipped, lessons=lessons, meter=meter
    )


def build_critic_role(config: Config, engine: ModelPasses, meter: RoleMeter | None = None) -> LearningWorker:
    """Return the role of the critic on its engine."""
    loss = ValueLoss(value_clip=config.algorithm.value_clip)
    rate = _learning_rate(config, config.optim.critic_lr, steps=config.trainer.steps)
    skipped = config.optim.max_skipped_steps
    return LearningWorker("critic", engine, loss, learning_rate=rate, max_skipped_steps=skipped, meter=meter)


def _learning_rate(config: Config, peak: float, *, steps: int) -> Callable[[int], float]:
    """Return the learning rate by step of a role that learns in the last `steps` steps of the run."""
    return partial(learning_rate, peak=peak, optim=config.optim, total_steps=steps)


def role_facts(config: Config, roles: Roles) -> list[RoleFacts]:
    """Return the rows of the start-up table, one per role."""
    reward = config.reward
    facts = []
    for engine in roles.engines.values():
        sharding = engine.sharding
        facts.append(
            RoleFacts(
                role=engine.name,
                model=short_commit(str(checkpoint_of(recorded(config), engine.name))),
                family=sharding.hf.family,
                parameters=sum(prod(tensor.shape) for tensor in hf_tensors(sharding.hf, head=sharding.head).values()),
                engine=config.engine.backend,
                layout=_sizes(sharding),
                attention=engine.attention,
                dtype=config.model.dtype,
                trains=engine.name in TRAINED_ROLES,
            )
        )
    if reward.source.name in ("function", "http"):
        function = ", ".join(reward.functions.values()) or reward.function
        facts.append(RoleFacts("reward", getattr(reward.source, "url", function)))
    return facts


def _sizes(sharding: Sharding) -> str:
    """Return the sizes of a layout above 1, "tp2 dp2"; empty for a model that is whole on every rank."""
    names = ("tp", "pp", "vpp", "cp", *(() if sharding.hf.moe is None else ("ep", "etp")), "dp")
    sizes = {name: getattr(sharding.layout, name) for name in names}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def build_kl(kl: KlConfig) -> KLController:
    """Return the controller of the KL coefficient."""
    if kl.control == "adaptive":
        return AdaptiveKL(kl.coef, target=kl.target, horizon=kl.horizon)
    return FixedKL(kl.coef)
