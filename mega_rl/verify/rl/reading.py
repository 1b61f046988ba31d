"""Settings of a run as the independent trainer's own, and settings of well-known algorithms."""

from __future__ import annotations

from mega_rl.config.plugins.choices import ADVANTAGE, CORRECTION, LOSS, chosen, settings_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    CISPOSettings,
    GAESettings,
    GRPOSettings,
    GSPOSettings,
    PPOSettings,
    TISSettings,
)
from mega_rl.errors import UserErrors
from mega_rl.verify.rl.independent.records import LockstepSettings

# Settings that make an algorithm, by name, beside the defaults.
ALGORITHMS: dict[str, dict[str, object]] = {
    "grpo": {"algorithm.advantage": "grpo", "algorithm.loss_aggregation": "seq-mean-token-mean"},
    "dr_grpo": {
        "algorithm.advantage": "grpo",
        "algorithm.advantage_settings": {"std": "none"},
        "algorithm.loss_aggregation": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "algorithm.advantage": "grpo",
        "algorithm.loss_aggregation": "token-mean",
        "algorithm.loss_settings": {"clip_high": 0.28},
    },
    "tis": {
        "algorithm.advantage": "grpo",
        "algorithm.correction": "tis",
        "algorithm.correction_settings": {"cap": 1.2},
    },
    "ppo": {
        "algorithm.advantage_settings": {"gae_lambda": 0.95},
        "algorithm.value_clip": 0.1,
        "algorithm.kl.placement": "reward",
        "algorithm.kl.coef": 0.05,
    },
    "grpo_kl": {
        "algorithm.advantage": "grpo",
        "algorithm.loss_aggregation": "seq-mean-token-mean",
        "algorithm.entropy_coef": 0.01,
        "algorithm.kl.placement": "loss",
        "algorithm.kl.coef": 0.1,
    },
}
# Choices that the independent trainer has formulas for.
FOLLOWED = (
    (ADVANTAGE, ("gae", "grpo", "rloo")),
    (LOSS, ("ppo", "gspo", "cispo")),
    (CORRECTION, ("none", "tis")),
)


def lockstep_settings(config: Config) -> LockstepSettings:
    """Return the settings of a run that its mathematics depends on.

    Raises UserErrors for choices that the independent trainer has no formula for.
    """
    _check_followed(config)
    advantage = ADVANTAGES[config.algorithm.advantage](**settings_of(config, ADVANTAGE))
    loss = LOSSES[config.algorithm.loss](**settings_of(config, LOSS))
    correction = CORRECTIONS[config.algorithm.correction](**settings_of(config, CORRECTION))
    generalized = advantage if isinstance(advantage, GAESettings) else GAESettings()
    clips = loss if isinstance(loss, PPOSettings | GSPOSettings) else PPOSettings()
    algorithm, optim, kl = config.algorithm, config.optim, config.algorithm.kl
    usual_estimator = {"none": "k3", "reward": "k1", "loss": "k3"}[kl.placement]
    return LockstepSettings(
        advantage=algorithm.advantage,
        deviation=advantage.std if isinstance(advantage, GRPOSettings) else "none",
        gamma=generalized.gamma,
        lam=generalized.gae_lambda,
        policy_lam=generalized.policy_lambda,
        length_alpha=generalized.length_alpha,
        whiten=generalized.whiten,
        temperature=config.rollout.temperature,
        loss=algorithm.loss,
        ratio_cap=loss.cap if isinstance(loss, CISPOSettings) else 0.0,
        clip_low=clips.clip_low,
        clip_high=clips.clip_high,
        dual_clip=clips.dual_clip if isinstance(clips, PPOSettings) else 0.0,
        value_clip=algorithm.value_clip,
        entropy_coef=algorithm.entropy_coef,
        aggregation=algorithm.loss_aggregation,
        max_response_tokens=config.rollout.max_new_tokens,
        tis_cap=correction.cap if isinstance(correction, TISSettings) else 0.0,
        tis_by_sequence=isinstance(correction, TISSettings) and correction.level == "sequence",
        old_is_rollout=algorithm.old_logprobs == "rollout",
        kl_placement=kl.placement,
        kl_estimator=usual_estimator if kl.estimator == "auto" else kl.estimator,
        kl_coef=kl.coef,
        kl_target=kl.target if kl.control == "adaptive" else 0.0,
        kl_horizon=kl.horizon,
        critic_warmup_steps=algorithm.critic_warmup_steps,
        lr=optim.lr,
        critic_lr=optim.critic_lr,
        weight_decay=optim.weight_decay,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        clip_grad=optim.clip_grad,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
        steps=config.trainer.steps,
    )


def _check_followed(config: Config) -> None:
    """Raise UserErrors for choices that the independent trainer has no formula for."""
    problems = [
        f"{choice.key}={chosen(config, choice)}: the independent trainer has no formula of it; legal: {' '.join(names)}"
        for choice, names in FOLLOWED
        if chosen(config, choice) not in names
    ]
    if config.algorithm.loss == "gspo" and config.algorithm.advantage == "gae":
        problems.append(
            "algorithm.loss=gspo with algorithm.advantage=gae: the independent trainer has its formula for advantages "
            "that are equal within a response; legal: grpo rloo"
        )
    if config.algorithm.kl.reference_interval:
        problems.append("algorithm.kl.reference_interval: the reference of the independent trainer stays; legal: 0")
    if problems:
        raise UserErrors(problems)
