"""Learning tasks: the arithmetic of bands and closed forms, noise, and a short run."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mega_rl
from mega_rl.types import Rollout, TokenOutputs
from mega_rl.verify.learn import run
from mega_rl.verify.learn.run import closed_form_distance, enumerate_responses, expected_reward
from mega_rl.verify.learn.tasks import (
    BANDIT,
    CREDIT_STATES,
    LETTERS,
    NOISE,
    NUM_ROWS,
    SAFE_REWARD,
    SORTING,
    TASKS,
    ConfidenceBand,
    Curve,
    LearningTask,
    Statement,
    band,
    best_arm,
    judge,
)
from tests.helpers.selection import FULL
from tests.unit_tests.verify.tiny_task import TINY


class Table:
    """Model with a fixed log-prob for every row of an enumeration."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        self.logprobs = torch.tensor(probabilities).log().flatten()

    def evaluate(self, rows: Rollout) -> TokenOutputs:
        return TokenOutputs(logprobs=self.logprobs[:, None] * rows.loss_mask)


def test_the_band_is_students_interval() -> None:
    # By hand: mean 3, s^2 = 10 / 4, s / sqrt(5) = sqrt(0.5), times t(4) = 2.776.
    result = band([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.high - 3.0 == pytest.approx(2.776 * math.sqrt(0.5))
    assert 3.0 - result.low == pytest.approx(2.776 * math.sqrt(0.5))
    assert band([2.0]) == ConfidenceBand(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("better", "statement", "holds"),
    [
        ("higher", Statement("a", reaches=0.9), True),
        ("higher", Statement("a", reaches=0.95), False),  # the mean reaches it, the band does not
        ("higher", Statement("a", beats="b"), True),
        ("higher", Statement("a", beats="c"), False),  # bands overlap
        ("lower", Statement("b", reaches=0.8), True),
        ("lower", Statement("b", reaches=0.7), False),
        ("lower", Statement("b", beats="a"), True),
        ("lower", Statement("c", beats="a"), False),
    ],
)
def test_statements_are_about_whole_bands(better: str, statement: Statement, holds: bool) -> None:
    finals = {
        "a": ConfidenceBand(0.95, 0.9, 1.0),
        "b": ConfidenceBand(0.7, 0.6, 0.8),
        "c": ConfidenceBand(0.85, 0.8, 0.91),
    }
    assert judge(replace(TINY, better=better), statement, finals)[1] is holds


def test_distance_to_the_closed_form_by_hand() -> None:
    rows, rewards = enumerate_responses(TINY, length=1)
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    beta, reference = 0.5, [[0.3, 0.7], [0.5, 0.5]]
    weights = [[0.3 * math.exp(2), 0.7], [0.5, 0.5 * math.exp(2)]]
    optimum = [[weight / sum(row) for weight in row] for row in weights]
    policy = [[0.6, 0.4], [0.1, 0.9]]
    expected = sum(
        p * math.log(p / q) for row, best in zip(policy, optimum, strict=True) for p, q in zip(row, best, strict=True)
    )
    models: Any = SimpleNamespace(actor=Table(policy), reference=Table(reference))
    # Log-probs are float32: 1e-6 is ten times their rounding.
    assert closed_form_distance(models, rows, rewards, beta=beta) == pytest.approx(expected / 2, abs=1e-6)
    assert expected_reward(models, rows, rewards) == pytest.approx((0.6 + 0.9) / 2, abs=1e-6)
    models.actor = Table(optimum)
    assert closed_form_distance(models, rows, rewards, beta=beta) == pytest.approx(0.0, abs=1e-6)


def test_rewards_of_tasks_are_what_their_statements_need() -> None:
    """Held-out pairs are not trained, a noisy precise response pays less than a safe one, arms pay on their share."""
    train, held_out = {prompt for prompt, _ in SORTING.prompts}, {prompt for prompt, _ in SORTING.held_out}
    assert (len(train), len(held_out), len(train | held_out)) == (80, 20, 100)
    assert [SORTING.reward("73=", text, "37", "stop") for text in ("37", "33", "3")] == pytest.approx([1.0, 0.6, 0.0])
    precise = [TASKS["off_policy"].reward("a", "c" + token) for token in LETTERS]
    assert (1 - NOISE) * max(precise) + NOISE * sum(precise) / len(LETTERS) < SAFE_REWARD < max(precise) == 1.0
    delayed = TASKS["delayed_credit"].reward
    good = {state: {letter for letter in LETTERS if delayed(state, letter + "1") == 1.0} for state in CREDIT_STATES}
    assert [len(letters) for letters in good.values()] == [8, 8]
    assert good["0"] != good["1"]
    task = TASKS["reused_batch"]
    states = sorted({prompt for prompt, _ in task.prompts})
    _, rewards = enumerate_responses(task, length=1)
    for state, paid in zip(states, rewards.view(len(states), NUM_ROWS, len(LETTERS)).mean(1), strict=True):
        assert paid.tolist() == [0.9 if arm == best_arm(state) else 0.4 for arm in LETTERS]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_settings_of_every_variant_are_legal(task: LearningTask) -> None:
    for variant in task.variants:
        mega_rl.load_config(None, {**run.SHARED, **task.settings, **variant.settings})


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    """The bandit by a trainer with the KL penalty, and by one without, one seed and few steps."""
    few = replace(BANDIT, settings={**BANDIT.settings, "trainer.steps": 30})
    right = next(variant for variant in BANDIT.variants if not variant.ablation)
    wrong = replace(right, settings={**right.settings, "algorithm.kl.coef": 0.0})
    return {name: run.run_variant(few, variant, seed=0) for name, variant in (("right", right), ("wrong", wrong))}


@pytest.mark.skipif(not FULL, reason="make test-full trains the bandit twice")
def test_penalty_leads_the_bandit_to_the_closed_form(curves: dict[str, Curve]) -> None:
    right, wrong = (dict(curves[name].points) for name in ("right", "wrong"))
    assert list(right) == [10, 20, 30]
    assert right[30] < 0.3 * right[10]
    assert right[30] < 0.3 * wrong[30]
