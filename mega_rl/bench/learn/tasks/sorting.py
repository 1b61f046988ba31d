"""Sorting two digits from scratch: random weights, no demonstrations, the reward alone."""

from __future__ import annotations

import random
from pathlib import Path

from mega_rl.bench.learn.task import Beats, LearningTask, Reaches, StepMetric, Variant

DIGITS = "0123456789"
STOP = "."
NUM_HELD_OUT = 20
WRONG_ESTIMATOR = Path(__file__).parents[1] / "neighbours_advantage.py"  # not imported: it imports torch


def reward(prompt: str, response: str, answer: str, finish: str) -> float:
    """Return 0.2 for two digits and a stop, and 0.4 for each of the two digits at its place."""
    if finish != "stop" or len(response) != 2 or not response.isdigit():
        return 0.0
    return 0.2 + 0.4 * sum(a == b for a, b in zip(response, answer, strict=True))


def _rows() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (training rows, held-out rows): every pair of digits with the pair in order."""
    pairs = [a + b for a in DIGITS for b in DIGITS]
    random.Random(0).shuffle(pairs)
    rows = [(f"{pair}=", "".join(sorted(pair))) for pair in pairs]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


TRAIN, HELD_OUT = _rows()
SORTING = LearningTask(
    name="sorting",
    summary="GRPO learns to sort two digits from random weights",
    vocabulary=DIGITS + "=" + STOP + "+-*/",
    stop=STOP,
    prompts=TRAIN,
    held_out=HELD_OUT,
    reward=reward,
    settings={
        "trainer.steps": 200,
        "trainer.prompts_per_step": 32,
        "trainer.minibatch_size": 16,
        "trainer.val_interval": 10,
        "algorithm.advantage": "grpo",
        "algorithm.entropy_coef": 0.15,
        "rollout.n": 32,
        "rollout.max_new_tokens": 4,
        "optim.lr": 2e-3,
        "optim.schedule": "linear",
        "optim.min_lr_ratio": 0.1,
        "optim.warmup_steps": 5,
    },
    variants=[
        Variant("grpo"),
        Variant(
            "advantages of the next row",
            {"algorithm.advantage": f"{WRONG_ESTIMATOR}:NeighboursAdvantage"},
        ),
    ],
    statements=[Beats("grpo", "advantages of the next row"), Reaches("grpo", 0.8)],
    measure=StepMetric("val/reward_mean"),
    unit="held-out reward, greedy, of the last 3 validations",
    final_points=3,
)
