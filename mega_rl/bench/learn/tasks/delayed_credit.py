"""Delayed credit: the first of 48 tokens decides the reward, and the policy's lambda hides that without a critic.

The reward comes with the last token. Without values its share in the first token's advantage is lambda^47 = 0.007, and
every other token gets more of it, though none has earned it. With the values of a critic that has learned which first
tokens are good, the first token's own error is the whole difference, and the later errors vanish.
"""

from __future__ import annotations

from mega_rl.bench.learn.task import Beats, LearningTask, Reaches, StepMetric, Variant

LETTERS = "abcdefghijklmnop"
STATES = "01"
LENGTH = 48
POLICY_LAMBDA = 0.9


def reward(prompt: str, response: str) -> float:
    """Return 1 if the first token is a good letter in this state, which eight of sixteen are, else 0."""
    first = response[0]
    return float(first in LETTERS and (LETTERS.index(first) + 4 * STATES.index(prompt)) % 16 < 8)


DELAYED_CREDIT = LearningTask(
    name="delayed_credit",
    summary="the first of 48 tokens decides the reward: with lambda 0.9 only a critic can tell",
    vocabulary=LETTERS + STATES,
    prompts=[(state, "") for state in STATES * 2],
    held_out=[],
    reward=reward,
    settings={
        "trainer.steps": 35,
        "trainer.prompts_per_step": 4,
        "trainer.minibatch_size": 4,
        "algorithm.advantage": "gae",
        "algorithm.advantage_settings": {"gae_lambda": 1.0, "policy_lambda": POLICY_LAMBDA},
        "algorithm.critic_warmup_steps": 10,
        "algorithm.epochs": 4,
        "rollout.n": 16,
        "rollout.max_new_tokens": LENGTH,
        "optim.lr": 1e-3,
        "optim.critic_lr": 3e-3,
    },
    variants=[
        Variant("critic"),
        Variant("critic frozen at 0", {"optim.critic_lr": 1e-12}),
        Variant(
            "rloo",  # as many updates of the policy
            {
                "trainer.steps": 25,
                "algorithm.advantage": "rloo",
                "algorithm.advantage_settings": {},
                "algorithm.critic_warmup_steps": 0,
                "optim.critic_lr": 1e-5,
            },
            ablation=True,
        ),
    ],
    statements=[Beats("critic", "critic frozen at 0"), Reaches("critic", 0.9)],
    measure=StepMetric("reward/mean"),
    unit="mean reward of the last 5 steps",
    final_points=5,
)
