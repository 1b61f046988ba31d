"""Validations on fakes: draws of their own, several sets, estimates, and training that they leave as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from mega_rl.config.schema.data import ValidationConfig
from mega_rl.trainer.validation import Evaluation, ScoredSamples, estimates_of, right_samples
from mega_rl.types import Draws, Prompt, PromptSet, RewardParts, Rewards, Rollout
from tests.helpers.fakes import FakePolicy, FakePrompts, FakeRanks, FakeReward
from tests.helpers.loops import FakeRun, RunSettings, read_ids

SETTINGS = ValidationConfig(n=4, temperature=1.0, k=[1, 4], right_above=0.2)


def sets() -> Callable[..., Evaluation]:
    prompts = FakePrompts().batch(0)
    return partial(Evaluation, [PromptSet("", prompts), PromptSet("few", prompts[:2])], SETTINGS)


def test_each_set_has_its_numbers_and_dumps() -> None:
    settings = RunSettings(steps=1, val_interval=1, rollout_interval=1, rollout_samples=2)
    run = FakeRun(settings=settings, validation=sets())
    run.fit()
    record = run.metrics.records[1]
    for area in ("val/", "val/few/"):
        assert record[f"{area}pass_at_1"] == pytest.approx(record[f"{area}avg_at_4"])
        assert record[f"{area}pass_at_1_low"] < record[f"{area}pass_at_1"] < record[f"{area}pass_at_1_high"]
        assert record[f"{area}pass_at_1"] <= record[f"{area}pass_at_4"]
        assert {f"{area}maj_at_1", f"{area}maj_at_4", f"{area}reward_mean"} <= record.keys()
    assert [row["set"] for row in run.metrics.val_dumps[1]] == [""] * 4 + ["few"] * 4
    assert all("set" not in row for row in run.metrics.dumps[1])


class MaskingReward(FakeReward):
    """Leaves out every second sample; all others are right."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        totals = torch.ones(len(rollout.lengths))
        totals[1::2] = math.nan
        return Rewards(totals)


def test_samples_without_a_reward_are_in_no_estimate() -> None:
    """Of four samples two are left: pass@4 is of no prompt, and both are right."""
    sets = [PromptSet("", FakePrompts().batch(0))]
    (outcome,) = Evaluation(sets, SETTINGS, FakePolicy([]), MaskingReward([]), FakeRanks(), read_ids).run(0)
    record = outcome.metrics
    assert (record["val/avg_at_4"], record["val/pass_at_1"]) == (1.0, 1.0)
    assert record["val/reward_masked_fraction"] == 0.5
    assert "val/pass_at_4" not in record


def test_estimates_are_means_over_prompts_with_enough_samples() -> None:
    samples = [(0, True, "a"), (0, False, "b"), (1, False, "b"), (1, False, "b"), (2, True, "a")]
    estimates = estimates_of(samples, counted=(1, 2), n=2)
    assert estimates["pass_at_1"].mean == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert (estimates["pass_at_2"].mean, estimates["pass_at_2"].prompts) == (0.5, 2)
    assert estimates["maj_at_2"].mean == pytest.approx((0.5 + 0.0) / 2)
    assert estimates["avg_at_2"].prompts == 3


def rows_of(count: int) -> Rollout:
    lengths = torch.full((count,), 3)
    return Rollout.from_rows(torch.ones(count, 3, dtype=torch.int64), prompt_lengths=lengths - 1, lengths=lengths)


def test_a_sample_that_nothing_judges_is_neither_right_nor_wrong() -> None:
    """Row 0 is right, row 1 lacks the part, row 2 has no reward."""
    values = torch.tensor([[1.0], [math.nan], [1.0]])
    rewards = Rewards(torch.tensor([1.0, 2.0, math.nan]), RewardParts(("correct",), (1.0,), values))
    assert right_samples(rows_of(3), rewards, above=0.5, part="correct") == [True, None, None]
    assert right_samples(rows_of(3), rewards, above=0.5, part="") == [True, True, None]


class SeededPolicy(FakePolicy):
    """Samples are a function of the place in the set and of the number of the sample, as engines' are."""

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        assert draws is not None
        rows = super().generate(prompts, step=step, draws=draws)
        self.events[-1] = f"{len(prompts)} prompts"
        seeds = (draws.first + rows.prompt_index) * 31 + rows.sample_index
        rows.tokens[:, 2:] = (seeds[:, None] * torch.arange(3, 7) + draws.stream) % 8
        rows.lengths = rows.lengths - seeds % 3
        rows.loss_mask = rows.loss_mask & (torch.arange(rows.tokens.size(1)) < rows.lengths[:, None])
        return rows


@pytest.mark.parametrize("chunk", [1, 8, 20, 27])
def test_parts_of_a_set_change_no_number(chunk: int) -> None:
    """Seven prompts of four samples in parts of two and more: numbers to the last bit, samples in their order."""
    prompts = [Prompt(index=10 + i, token_ids=(i % 5, 1), text=str(i), answer=None) for i in range(7)]
    results = {}
    for most in (1000, chunk):
        policy, reward = SeededPolicy([]), PartsReward([])
        val = ValidationConfig(n=4, temperature=1.0, k=[1, 3], right_above=0.4, right_part="near", chunk=most)
        seen: list[tuple[int, int, str]] = []

        def note(samples: ScoredSamples, seen: list[tuple[int, int, str]] = seen) -> None:
            places = zip(samples.rollout.prompt_index.tolist(), samples.rollout.sample_index.tolist(), strict=True)
            seen += [(samples.first + prompt, number, samples.prompts[prompt].text) for prompt, number in places]

        evaluation = Evaluation([PromptSet("one", prompts)], val, policy, reward, FakeRanks(), read_ids)
        (outcome,) = evaluation.run(3, each=note)
        assert seen == [(prompt, number, str(prompt)) for prompt in range(7) for number in range(4)]
        results[most] = outcome.metrics
        if most == chunk:
            assert len(policy.events) > 1
            assert all(int(event.split()[0]) <= max(chunk // 4, 2) for event in policy.events)
    assert results[chunk] == results[1000]
    numbers = {"val/reward_near", "val/reward_size", "val/reward_masked_fraction", "val/pass_at_3"}
    assert numbers <= results[chunk].keys()


def test_each_set_has_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(settings=RunSettings(steps=1, val_interval=1), validation=sets())
    streams, generate = [], run.rollout.generate

    def noting(prompts: Sequence[Prompt], *, draws: Draws | None = None, **more: Any) -> Rollout:
        if draws is not None:
            streams.append(draws.stream)
        return generate(prompts, draws=draws, **more)

    monkeypatch.setattr(run.rollout, "generate", noting)
    run.fit()
    assert streams[:2] == streams[2:]
    assert streams[0] != streams[1]


class PartsReward(FakeReward):
    """One part everywhere, a second one only in prompts of even tokens; some samples are left out."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        answers = rollout.tokens[:, 2].double()
        texts = torch.tensor([prompts[index].token_ids[0] for index in rollout.prompt_index.tolist()])
        values = torch.stack([answers / 7, answers.where(texts % 2 == 0, math.nan)], dim=1).float()
        totals = values.nan_to_num().sum(dim=1).masked_fill(answers == 5, math.nan)
        values = values.masked_fill(totals.isnan()[:, None], math.nan)
        return Rewards(totals, RewardParts(("near", "size"), (1.0, 1.0), values))
