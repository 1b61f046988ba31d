"""Settings of a run as the independent trainer's own, and settings of well-known algorithms. Imports no torch."""

from __future__ import annotations

from mega_rl.config.schema import Config
from mega_rl.verify.rl.independent.records import LockstepSettings

# Settings that make an algorithm, by name, beside the defaults.
ALGORITHMS: dict[str, dict[str, object]] = {
    "grpo": {"algorithm.advantage": "grpo", "algorithm.loss_aggregation": "seq-mean-token-mean"},
    "dr_grpo": {
        "algorithm.advantage": "grpo",
        "algorithm.grpo_std_normalization": False,
        "algorithm.loss_aggregation": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "algorithm.advantage": "grpo",
        "algorithm.loss_aggregation": "token-mean",
        "algorithm.clip.high": 0.28,
    },
    "tis": {
        "algorithm.advantage": "grpo",
        "algorithm.tis_cap": 1.2,
    },
    "ppo": {
        "algorithm.gae_lambda": 0.95,
        "algorithm.clip.value": 0.1,
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


def lockstep_settings(config: Config) -> LockstepSettings:
    """Return the settings of a run that its mathematics depends on."""
    algorithm, optim, kl = config.algorithm, config.optim, config.algorithm.kl
    usual_estimator = {"none": "k3", "reward": "k1", "loss": "k3"}[kl.placement]
    return LockstepSettings(
        advantage=algorithm.advantage,
        normalise_groups=algorithm.grpo_std_normalization,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        whiten=algorithm.whiten_advantages,
        temperature=config.rollout.temperature,
        clip_low=algorithm.clip.low,
        clip_high=algorithm.clip.high,
        dual_clip=algorithm.clip.dual,
        value_clip=algorithm.clip.value,
        entropy_coef=algorithm.entropy_coef,
        aggregation=algorithm.loss_aggregation,
        max_response_tokens=config.rollout.max_new_tokens,
        tis_cap=algorithm.tis_cap,
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
