"""Success of prompts as their samples are scored: which samples and which generations count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_rl.data.order import SuccessRates
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.collect import SamplingPlan, SuccessMeter
from mega_rl.trainer.rows import Samples
from mega_rl.types import Prompt, RewardParts, Rewards
from tests.helpers.fakes import FakePrompts, held_out
from tests.helpers.loops import FakeRun, RunSettings
from tests.helpers.rollouts import make_rollout

PROMPTS = [Prompt(index=10 * i, token_ids=(1,), text=str(i), answer="") for i in range(3)]
NAN = float("nan")


def measured(
    totals: list[float], *, prompts: Any = PROMPTS, parts: list[float] | None = None, failed: Any = None, part: str = ""
) -> list[list[int]]:
    """Return (right, samples) of each prompt of `PROMPTS` when two samples of each of `prompts` are recorded."""
    rates = SuccessRates(PROMPTS, memory=0.5)
    rollout = make_rollout([1] * len(totals))
    rollout.failed = None if failed is None else torch.tensor(failed)
    known = None if parts is None else RewardParts(("correct",), (1.0,), torch.tensor(parts)[:, None])
    samples = Samples(prompts, rollout, Rewards(torch.tensor(totals), known), torch.arange(len(prompts)))
    SuccessMeter(rates, right_above=0.5, right_part=part).record(samples, SingleRank())
    return [rates.right.tolist(), rates.samples.tolist()]


def test_right_samples_are_counted_by_prompt() -> None:
    assert measured([1.0, 0.0, 0.5, 0.6], prompts=[PROMPTS[2], PROMPTS[0]]) == [[1, 0, 1], [2, 0, 2]]


def test_samples_without_a_score_do_not_count() -> None:
    """A prompt whose samples all failed or were left out counts as not visited."""
    failed = [False, True, False, False, True, False]
    assert measured([1.0, 0.0, NAN, 1.0, 0.0, NAN], failed=failed) == [[1, 1, 0], [1, 1, 0]]


def test_a_part_of_the_reward_may_decide() -> None:
    assert measured([9.0] * 4, prompts=PROMPTS[:2], parts=[0.0, 1.0, NAN, 1.0], part="correct") == [
        [1, 1, 0],
        [2, 1, 0],
    ]
    with pytest.raises(UserError, match=r"curriculum\.right_part=correct has no effect: the reward is a number"):
        measured([9.0] * 4, prompts=PROMPTS[:2], part="correct")


def test_only_samples_that_train_are_measured() -> None:
    """Neither greedy baselines nor validations count."""
    rates = SuccessRates(FakePrompts().batch(0), memory=0.5)
    run = FakeRun(
        grpo=True,
        plan=SamplingPlan(greedy=True),
        success=SuccessMeter(rates, right_above=0.2, right_part=""),
        settings=RunSettings(steps=1, val_interval=1),
        validation=held_out(FakePrompts().batch(0)),
    )
    run.fit()
    assert rates.samples.tolist() == [2, 2, 2, 2]
    assert rates.right.any()
