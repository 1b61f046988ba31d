"""A bandit with a KL penalty: the policy must end at the closed form, pi(a) ~ ref(a) exp(r(a) / beta)."""

from __future__ import annotations

from mega_rl.bench.learn.task import ClosedFormDistance, LearningTask, Reaches, Variant

ARMS = "abcdefghijklmnop"
BETA = 0.5
STATES = "abcd"  # prompts: each has its own order of the rewards


def reward(prompt: str, response: str) -> float:
    """Return the reward of an arm in a state: 0 to 1, in an order that no smooth function of the two has."""
    return ((7 * ARMS.index(response) + 5 * ARMS.index(prompt)) % 16) / 15


KL = {"algorithm.kl.coef": BETA}
BANDIT = LearningTask(
    name="bandit",
    summary="a KL-constrained bandit ends at ref * exp(reward / beta)",
    vocabulary=ARMS,
    prompts=[(state, "") for state in STATES],
    held_out=[],
    reward=reward,
    settings={
        "trainer.steps": 100,
        "trainer.prompts_per_step": 4,
        "trainer.minibatch_size": 4,
        "rollout.n": 128,
        "rollout.max_new_tokens": 1,
        "optim.lr": 3e-3,
        "optim.schedule": "linear",
        "optim.min_lr_ratio": 0.0,
    },
    variants=[
        Variant("rloo, KL in the loss", {"algorithm.advantage": "rloo", "algorithm.kl.placement": "loss", **KL}),
        Variant(
            "grpo, KL in the loss",
            {
                "algorithm.advantage": "grpo",
                "algorithm.advantage_settings": {"std": "none"},
                "algorithm.kl.placement": "loss",
                **KL,
            },
        ),
        Variant(
            "gae, KL in the reward",
            {
                "algorithm.advantage": "gae",
                "algorithm.advantage_settings": {"whiten": False},
                "algorithm.kl.placement": "reward",
                "optim.critic_lr": 3e-3,
                **KL,
            },
        ),
        Variant(
            "grpo over the group's deviation",
            {"algorithm.advantage": "grpo", "algorithm.kl.placement": "loss", **KL},
            ablation=True,
        ),
        Variant(
            "rloo, KL of weight 0",
            {"algorithm.advantage": "rloo", "algorithm.kl.placement": "loss", "algorithm.kl.coef": 0.0},
            ablation=True,
        ),
    ],
    statements=[
        Reaches(name, 0.01) for name in ("rloo, KL in the loss", "grpo, KL in the loss", "gae, KL in the reward")
    ],
    measure=ClosedFormDistance(1, BETA),
    unit="nats to the closed form",
    better="lower",
)
