"""Success of prompts as their samples are scored: which ones count, and which generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from mega_rl.trainer.order.measuring import MeasuredSuccess

from mega_rl.data.sampling.success import SuccessRates
from mega_rl.errors import UserError
from mega_rl.types import Draws, Metrics, Prompt, RewardParts, Rewards, Rollout
from tests.helpers.fakes import FakeRanks

PROMPTS = [Prompt(index=10 * i, token_ids=(1,), text=str(i), answer="") for i in range(3)]


@dataclass
class Scripted:
    """Two samples of each prompt, with rewards and failures as given."""

    totals: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        rows = 2 * len(prompts)
        return Rollout.from_rows(
            torch.ones(rows, 2, dtype=torch.int64),
            prompt_lengths=torch.ones(rows, dtype=torch.int64),
            lengths=torch.full((rows,), 2),
            prompt_index=torch.arange(rows) // 2,
            failed=torch.tensor(self.failed) if self.failed else None,
        )

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        parts = RewardParts(("correct",), (1.0,), torch.tensor(self.parts)[:, None]) if self.parts else None
        return Rewards(torch.tensor(self.totals), parts)

    def metrics(self) -> Metrics:
        return {"reward/calls": 1.0}


def measured(source: Scripted, *, part: str = "", above: float = 0.5) -> tuple[MeasuredSuccess, SuccessRates]:
    rates = SuccessRates(PROMPTS, memory=0.5)
    return MeasuredSuccess(source, source, rates, FakeRanks(), right_above=above, right_part=part), rates


def test_right_samples_of_a_step_are_counted() -> None:
    success, rates = measured(Scripted(totals=[1.0, 0.0, 0.5, 0.6]))
    prompts = [PROMPTS[2], PROMPTS[0]]
    rewards = success.score(success.generate(prompts, step=0), prompts)
    assert rewards.totals.tolist() == pytest.approx([1.0, 0.0, 0.5, 0.6])
    assert (rates.right.tolist(), rates.samples.tolist()) == ([1, 0, 1], [2, 0, 2])
    assert success.metrics() == {"reward/calls": 1.0}


def test_samples_without_a_score_do_not_count() -> None:
    """One left out by the reward, one that failed; a prompt with none of either has not been visited."""
    nan = float("nan")
    failed = [False, True, False, False, True, False]
    success, rates = measured(Scripted(totals=[1.0, 0.0, nan, 1.0, 0.0, nan], failed=failed))
    success.score(success.generate(PROMPTS, step=0), PROMPTS)
    assert (rates.right.tolist(), rates.samples.tolist()) == ([1, 1, 0], [1, 1, 0])


def test_a_part_of_the_reward_may_say_so() -> None:
    success, rates = measured(Scripted(totals=[9.0] * 4, parts=[0.0, 1.0, float("nan"), 1.0]), part="correct")
    success.score(success.generate(PROMPTS[:2], step=0), PROMPTS[:2])
    assert (rates.right.tolist(), rates.samples.tolist()) == ([1, 1, 0], [2, 1, 0])
    success, _ = measured(Scripted(totals=[9.0] * 4), part="correct")
    with pytest.raises(UserError, match=r"success\.right_part=correct has no effect: the reward is a number"):
        success.score(success.generate(PROMPTS[:2], step=0), PROMPTS[:2])


@pytest.mark.parametrize("kind", [{"greedy": True}, {"draws": Draws(2, 1.0)}])
def test_validations_and_greedy_responses_are_not_measured(kind: dict[str, object]) -> None:
    success, rates = measured(Scripted(totals=[1.0] * 6))
    success.score(success.generate(PROMPTS, step=0, **kind), PROMPTS)  # type: ignore[arg-type]
    assert not rates.samples.any()


def test_a_rollout_is_measured_once() -> None:
    success, rates = measured(Scripted(totals=[1.0] * 6))
    rollout = success.generate(PROMPTS, step=0)
    success.score(success.generate(PROMPTS, step=0, greedy=True), PROMPTS)  # the baseline, between the two
    success.score(rollout, PROMPTS)
    success.score(rollout, PROMPTS)
    assert rates.samples.tolist() == [2, 2, 2]
