"""The models of a run in their roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from mega_rl.algorithms.kl import KLController
from mega_rl.config.attention import Role
from mega_rl.config.choices import LOSS, reads_reference
from mega_rl.config.needs import models_take_turns
from mega_rl.config.rules.parallel import has_own_layout
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.build import build_engine
from mega_rl.engines.models.build import DTYPES
from mega_rl.engines.own_layout import OwnLayout
from mega_rl.engines.weight_average import WeightAverage
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups, another
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Learner, TokenModel
from mega_rl.tracking.metrics.flops import ModelWork
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.trainer.assemble.algorithms import build_actor_role, build_critic_role, build_kl, build_objective
from mega_rl.trainer.assemble.plan import RunPlan
from mega_rl.types import Metrics
from mega_rl.workers.models import Lessons, ReferenceUpdates, ReferenceWorker, RoleMeter
from mega_rl.workers.residency import ResidentModels


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
        with nullcontext() if own is groups else own.current():
            engine = build_engine(model, settings=plan.engine, groups=own, accelerator=accelerator)
        engines[role] = models.add(role, engine)
    actor, kl, work = engines["actor"], build_kl(config.algorithm.kl), WorkMeter()

    def meter(role: Role) -> RoleMeter:
        sharding = engines[role].sharding
        # Every role gets the rows of the actor's replicas.
        return RoleMeter(ModelWork(sharding.hf, head=sharding.head), work, actor.replica.size)

    reference: TokenModel | None = None
    lessons: Lessons | None = None
    average: WeightAverage | None = None
    updates = ReferenceUpdates()
    if "reference" in engines:
        frozen, counted = engines["reference"], meter("reference")
        relaid = None
        if frozen.groups is not actor.groups:
            relaid = OwnLayout(frozen, frozen, actor, DTYPES[config.model.dtype])
        if reads_reference(config):
            reference = ReferenceWorker(frozen.forward if relaid is None else relaid.evaluate, counted)
        if LOSS.needs(config, "needs_teacher"):
            lessons = Lessons(relaid or frozen, getattr(build_objective(config), "beta", 1.0), models, counted)
        if interval := config.algorithm.kl.reference_interval:
            stored = (models.stored("reference"), models.stored("actor"))
            average = WeightAverage(*stored, config.algorithm.kl.reference_rate, ranks_of(groups.host_world))
            updates = ReferenceUpdates(interval, average.update)
    learner = build_actor_role(config, actor, kl, lessons, meter("actor"))
    critic = build_critic_role(config, engines["critic"], meter("critic")) if "critic" in engines else None
    return Roles(learner, critic, reference, average, updates, kl, engines, models, work)
