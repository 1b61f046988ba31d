"""Off-policy noise: the sampler is not the policy, and only a corrected trainer learns what is best for the policy.

A share of the sampled tokens is drawn at random, as from an engine with an error. A response is safe (a fixed reward)
or precise: its second token's place in an order decides, up to a reward of 1. With the noisy sampler's second token a
precise response earns less than a safe one, with the policy's own it earns more.
"""

from __future__ import annotations

from mega_rl.bench.learn.task import Beats, ExpectedReward, LearningTask, Reaches, Variant

TOKENS = "abcdefghijklmnop"
STATES = "abcd"
SAFE = "ab"  # first tokens that make a response safe
SAFE_REWARD = 0.8
NOISE = 0.6  # share of tokens that the sampler draws at random


def reward(prompt: str, response: str) -> float:
    """Return the reward of two tokens in a state."""
    if response[0] in SAFE:
        return SAFE_REWARD
    return ((7 * TOKENS.index(response[1]) + 5 * TOKENS.index(prompt)) % 16) / 15


OFF_POLICY = LearningTask(
    name="off_policy",
    summary="with a sampler that is not the policy, importance sampling finds the better response",
    vocabulary=TOKENS,
    prompts=[(state, "") for state in STATES],
    held_out=[],
    reward=reward,
    settings={
        "trainer.steps": 150,
        "trainer.prompts_per_step": 4,
        "trainer.minibatch_size": 4,
        "algorithm.advantage": "rloo",
        "algorithm.entropy_coef": 0.02,  # keeps both kinds of response in use, so that luck at the start is not the end
        "rollout.n": 128,
        "rollout.max_new_tokens": 2,
        # The noise is on purpose, so the guards against a wrong engine are open.
        "rollout.mismatch.mean_limit": 100.0,
        "rollout.mismatch.share_limit": 1.0,
        "rollout.mismatch.max_limit": 1000.0,
        "optim.lr": 2e-3,
    },
    variants=[
        Variant(
            "sequence TIS",
            {
                "algorithm.correction": "tis",
                "algorithm.correction_settings": {"level": "sequence", "cap": 8.0},
            },
            noise=NOISE,
        ),
        Variant("no correction", noise=NOISE),
        Variant("no noise, no correction", ablation=True),
        Variant(
            "token TIS",
            {"algorithm.correction": "tis", "algorithm.correction_settings": {"cap": 8.0}},
            ablation=True,
            noise=NOISE,
        ),
    ],
    statements=[Beats("sequence TIS", "no correction"), Reaches("sequence TIS", 0.85)],
    measure=ExpectedReward(2),
    unit="expected reward of the policy",
)
