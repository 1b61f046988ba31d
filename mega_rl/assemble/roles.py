"""The models of a run in their roles."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from mega_rl.accelerator import Accelerator
from mega_rl.algorithms.kl import AdaptiveKL, FixedKL, KLController
from mega_rl.config.attention import Role, requested_attention
from mega_rl.config.needs import is_on_policy
from mega_rl.config.origins import recorded, short_commit
from mega_rl.config.schema import Config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.ddp.optimizer import learning_rate
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.build import build_engine, implementation
from mega_rl.metrics.startup import RoleFacts
from mega_rl.models.attention_choice import check_one_backend
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Learner, TokenModel
from mega_rl.trainer.experience import AdvantageEstimator, GAEAdvantages, GRPOAdvantages
from mega_rl.workers.models import AbsentWorker, LearningWorker, PolicyLoss, ReferenceWorker, ValueLoss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Roles:
    """The models of a run and the engines under them."""

    actor: Learner
    critic: Learner
    reference: TokenModel
    kl: KLController
    actor_engine: ModelEngine
    critic_engine: ModelEngine | None
    reference_engine: ModelEngine | None
    reward_engine: ModelEngine | None  # of a reward model

    @property
    def engines(self) -> list[ModelEngine]:
        """Those that the run has, the actor's first."""
        found = (self.actor_engine, self.critic_engine, self.reference_engine, self.reward_engine)
        return [engine for engine in found if engine is not None]


def build_roles(config: Config, accelerator: Accelerator, groups: Groups) -> Roles:
    """Actor; critic where the advantage needs one; reference where a KL term does; reward where it is a model."""
    engine = partial(build_engine, config=config, groups=groups, accelerator=accelerator)
    algorithm = config.algorithm
    rate = partial(learning_rate, optim=config.optim, total_steps=config.trainer.steps)
    kl = build_kl(config)
    actor_engine = engine("actor", path=checkpoint_of(config, "actor"), head="lm", trainable=True)
    policy_loss = PolicyLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        entropy_coef=algorithm.entropy_coef,
        kl=kl if algorithm.kl_placement == "loss" else None,
        kl_estimator=algorithm.kl_estimator,
        tis_cap=algorithm.tis_cap,
        on_policy=is_on_policy(config),
    )
    actor = LearningWorker(
        "actor",
        actor_engine,
        policy_loss,
        learning_rate=partial(rate, peak=config.optim.lr),
        first_step=algorithm.critic_warmup_steps,
    )
    critic: Learner = AbsentWorker()
    critic_engine = None
    if "critic" in roles_of(config):
        critic_engine = engine("critic", path=checkpoint_of(config, "critic"), head="value", trainable=True)
        critic = LearningWorker(
            "critic",
            critic_engine,
            ValueLoss(value_clip=algorithm.value_clip),
            learning_rate=partial(rate, peak=config.optim.critic_lr),
        )
    reference: TokenModel = AbsentWorker()
    reference_engine = None
    if "reference" in roles_of(config):
        reference_engine = engine("reference", path=checkpoint_of(config, "reference"), head="lm", trainable=False)
        reference = ReferenceWorker(reference_engine)
    reward_engine = None
    if "reward" in roles_of(config):
        reward_engine = engine("reward", path=checkpoint_of(config, "reward"), head="value", trainable=False)
    return Roles(actor, critic, reference, kl, actor_engine, critic_engine, reference_engine, reward_engine)


def roles_of(config: Config) -> list[Role]:
    """The roles of a run that are models."""
    algorithm = config.algorithm
    there: dict[Role, bool] = {
        "actor": True,
        "critic": algorithm.advantage == "gae",
        "reference": algorithm.kl_placement != "none",
        "reward": config.reward.source == "model",
    }
    return [role for role, is_there in there.items() if is_there]


def checkpoint_of(config: Config, role: Role) -> Path:
    """Where the model of a role comes from."""
    model = config.model
    paths: dict[Role, str] = {
        "actor": model.path,
        "critic": model.critic_path or model.path,
        "reference": model.ref_path or model.path,
        "reward": config.reward.model_path,
    }
    return Path(paths[role])


def check_attention(config: Config, accelerator: Accelerator) -> None:
    """Whether every role can have the attention that is asked for, all in one process. Raises UserError."""
    roles = roles_of(config)
    found = [
        implementation(role, path=checkpoint_of(config, role), config=config, device_type=accelerator.device.type)
        for role in roles
    ]
    if any(impl == "te" for impl, _ in found):
        check_one_backend({role: requested_attention(config, role) for role in roles})
    elif accelerator.device.type == "cuda" and config.engine == "megatron" and config.model.transformer_impl == "auto":
        log.info("Transformer Engine is not installed: Megatron-Core's own layers run instead, which are slower")


def role_facts(config: Config, roles: Roles) -> list[RoleFacts]:
    """What the start-up table says of each role."""
    reward = config.reward
    facts = []
    for engine in roles.engines:
        sharding = engine.sharding
        facts.append(
            RoleFacts(
                role=engine.name,
                model=short_commit(str(checkpoint_of(recorded(config), engine.name))),
                family=sharding.hf.model_type,
                parameters=sum(prod(tensor.shape) for tensor in hf_tensors(sharding.hf, head=sharding.head).values()),
                engine=config.engine,
                layout=_sizes(sharding),
                attention=engine.attention,
                dtype=config.model.dtype,
                trains=engine.name in ("actor", "critic"),
            )
        )
    if reward.source != "model":
        facts.append(RoleFacts("reward", reward.function if reward.source == "function" else reward.url))
    return facts


def _sizes(sharding: Sharding) -> str:
    """How a model is cut, in the sizes above 1: "tp2 dp2"; empty for one that is whole on every rank."""
    names = ("tp", "pp", "vpp", "cp", *(() if sharding.hf.moe is None else ("ep", "etp")), "dp")
    sizes = {name: getattr(sharding.layout, name) for name in names}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def build_kl(config: Config) -> KLController:
    """The controller of the KL coefficient."""
    algorithm = config.algorithm
    if algorithm.kl_control == "adaptive":
        return AdaptiveKL(algorithm.kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    return FixedKL(algorithm.kl_coef if algorithm.kl_placement != "none" else 0.0)


def build_estimator(config: Config, kl: KLController) -> AdvantageEstimator:
    """The advantage estimator that the recipe names."""
    algorithm = config.algorithm
    if algorithm.advantage == "grpo":
        return GRPOAdvantages(std_normalization=algorithm.grpo_std_normalization)
    return GAEAdvantages(
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        whiten=algorithm.whiten_advantages,
        kl=kl if algorithm.kl_placement == "reward" else None,
        kl_estimator=algorithm.kl_estimator,
    )
