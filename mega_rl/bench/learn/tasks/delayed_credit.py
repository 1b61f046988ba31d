"""Delayed credit: the first of 48 tokens decides the reward, and lambda < 1 hides that from a trainer without critic.

The reward comes with the last token. Its share in the first token's advantage is lambda^47 = 0.7 % without values;
with them, the first token's own error is there at once: the values after it know what it was.
"""

from __future__ import annotations

from mega_rl.bench.learn.task import Beats, LearningTask, Reaches, StepMetric, Variant

TOKENS = "abcdefghijklmnop"
STATES = "abcd"
LENGTH = 48


def reward(prompt: str, response: str) -> float:
    """Return the reward, 0 to 1, which the first token decides."""
    return ((7 * TOKENS.index(response[0]) + 5 * TOKENS.index(prompt)) % 16) / 15


DELAYED_CREDIT = LearningTask(
    name="delayed_credit",
    summary="the first of 48 tokens decides the reward, lambda < 1: the critic must find it",
    vocabulary=TOKENS,
    prompts=[(state, "") for state in STATES],
    held_out=[],
    reward=reward,
    settings={
        "trainer.steps": 40,
        "trainer.prompts_per_step": 4,
        "trainer.minibatch_size": 4,
        "algorithm.advantage": "gae",
        "algorithm.advantage_settings": {"gae_lambda": 0.9},
        "rollout.n": 16,
        "rollout.max_new_tokens": LENGTH,
        "optim.lr": 2e-3,
        "optim.critic_lr": 3e-3,
    },
    variants=[
        Variant("critic"),
        Variant("critic frozen at 0", {"optim.critic_lr": 1e-12}),
        Variant(
            "critic, lambda 1 for its targets",
            {"algorithm.advantage_settings": {"gae_lambda": 1.0, "policy_lambda": 0.9}},
            ablation=True,
        ),
    ],
    statements=[Beats("critic", "critic frozen at 0"), Reaches("critic", 0.5)],
    measure=StepMetric("reward/mean"),
    unit="mean reward of the last 5 steps",
    final_points=5,
)
