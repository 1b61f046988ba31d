"""A reused batch: many updates on a few rows whose luck says little, which only a clipped objective survives.

An arm pays on some rows and not on others, and nothing in the prompt tells which. Without a clip the objective is the
sum of A ratio over the samples, linear in the policy: its maximum is the arm that was best on the rows of this batch.
Once the policy is there, all samples of a prompt are the same arm, and nothing is left to learn from.
"""

from __future__ import annotations

import random

from mega_rl.bench.learn.task import Beats, ExpectedReward, LearningTask, Reaches, Variant

ARMS = "abcdefghijklmnop"
STATES = "abcdefgh"
NUM_ROWS = 40  # of each state
BEST_SHARE, SHARE = 0.9, 0.4  # of a state's rows on which its best arm pays, and every other one
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e6, "dual_clip": 0.0}


def best_arm(state: str) -> str:
    """Return the arm of a state that pays most often."""
    return ARMS[(5 * STATES.index(state) + 3) % len(ARMS)]


def reward(prompt: str, response: str, answer: str) -> float:
    """Return 1 for an arm that pays on this row, else 0; answer: the arms that pay."""
    return float(response in answer)


def _rows() -> list[tuple[str, str]]:
    """Return rows, in which every arm pays on exactly its share, each on other ones."""
    shuffled = random.Random(0)
    rows = []
    for state in STATES:
        pays = {arm: int(NUM_ROWS * (BEST_SHARE if arm == best_arm(state) else SHARE)) for arm in ARMS}
        luck = {arm: shuffled.sample(range(NUM_ROWS), count) for arm, count in pays.items()}
        rows += [(state, "".join(arm for arm in ARMS if row in luck[arm])) for row in range(NUM_ROWS)]
    return rows


REUSED_BATCH = LearningTask(
    name="reused_batch",
    summary="16 updates on every batch: without a clip the policy settles on the luck of a few rows",
    vocabulary=ARMS,
    prompts=_rows(),
    held_out=[],
    reward=reward,
    settings={
        "trainer.steps": 40,
        "trainer.prompts_per_step": 16,
        "trainer.minibatch_size": 16,
        "algorithm.advantage": "rloo",
        "algorithm.epochs": 16,
        "rollout.n": 16,
        "rollout.max_new_tokens": 1,
        "optim.lr": 1e-3,
    },
    variants=[
        Variant("clip"),
        Variant("no clip", {"algorithm.loss_settings": NO_CLIP}),
        Variant("no clip, 1 update", {"algorithm.loss_settings": NO_CLIP, "algorithm.epochs": 1}, ablation=True),
    ],
    statements=[Beats("clip", "no clip"), Reaches("clip", 0.75)],
    measure=ExpectedReward(1),
    unit="expected reward of the policy",
)
