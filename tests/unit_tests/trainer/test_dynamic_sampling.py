"""Dynamic sampling: which prompts are kept, on one rank and on two, in the loop, and after a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from mega_rl.data.order import PromptSampler
from mega_rl.trainer.collect import SamplingPlan
from mega_rl.types import Rewards
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakePrompts, FakeRanks, FakeReward, held_out
from tests.helpers.loops import FakeRun, RunSettings
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer import dynamic_sampling_on_ranks as cases

GRPO = ("algorithm.advantage=grpo", "rollout.n=4")


def sampled_by_loops(drawn: int, plan: SamplingPlan) -> tuple[list[dict[str, Any]], int, int]:
    """Return (groups of a step: prompt, responses, rewards; generations; prompts drawn after it), the obvious way."""
    order = PromptSampler(cases.PROMPTS, batch_size=1, shuffle=True, seed=3)
    groups: list[dict[str, Any]] = []
    generations = 0
    while sum(group["spread"] for group in groups) < plan.prompts_per_step and generations < plan.waves:
        for position in range(plan.prompts):
            (prompt,) = order.batch(drawn + position)
            responses = [cases.response(drawn, position, sample) for sample in range(cases.SAMPLES)]
            rewards = [cases.score(prompt, tokens) for tokens in responses]
            spread = len(set(rewards)) > 1
            group = {"prompt": prompt, "responses": responses, "rewards": rewards, "spread": spread}
            groups.append(group | {"ticket": drawn + position})
        drawn += plan.prompts
        generations += 1
    for group in groups:
        group["sampled"] = groups
    good = [number for number, group in enumerate(groups) if group["spread"]]
    rest = [number for number, group in enumerate(groups) if not group["spread"]]
    chosen = sorted([*good, *rest][: plan.prompts_per_step])
    return [groups[number] for number in chosen], generations, drawn


def plan_of(prompts_per_step: int, prompts: int, waves: int) -> SamplingPlan:
    return SamplingPlan(cases.SAMPLES, waves, prompts_per_step, prompts)


@pytest.mark.parametrize(
    "plan", [cases.PLAN, plan_of(6, 2, 3), plan_of(8, 5, 2), plan_of(2, 9, 1), plan_of(4, 4, 5)], ids=str
)
def test_a_step_keeps_the_groups_that_a_loop_keeps(plan: SamplingPlan) -> None:
    """Prompts, tokens, rewards, tickets of five steps in a row, and what is dropped; some fill up with equal groups."""
    dynamic = cases.collector(FakeRanks(), plan)
    drawn = 0
    for step in range(5):
        expected, generations, drawn = sampled_by_loops(drawn, plan)
        dynamic.log.begin()
        batch = dynamic.take(step)
        prompts, rollout, rewards, tickets = batch.samples
        assert tickets.tolist() == [group["ticket"] for group in expected]
        left = [group for group in expected[0]["sampled"] if group not in expected]
        assert batch.dropped == [
            (
                group["ticket"],
                "surplus" if group["spread"] else "equal",
                mean(map(len, group["responses"])),
                mean(group["rewards"]),
            )
            for group in left
        ]
        assert [prompt.index for prompt in prompts] == [group["prompt"].index for group in expected]
        assert rewards.totals.tolist() == [reward for group in expected for reward in group["rewards"]]
        responses = [tokens for group in expected for tokens in group["responses"]]
        actual = [ids[2:length] for ids, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
        assert actual == responses
        assert rollout.prompt_index.tolist() == [n for n in range(len(expected)) for _ in range(cases.SAMPLES)]
        assert rollout.sample_index.tolist() == list(range(cases.SAMPLES)) * len(expected)
        assert rollout.tokens.size(1) == int(rollout.lengths.max())
        metrics = dynamic.log.metrics
        assert metrics["rollout/generations"] == generations
        assert metrics["rollout/filled_groups"] == sum(not group["spread"] for group in expected)
        assert metrics["rollout/dropped_groups"] == len(left)
        assert metrics["data/prompts"] == dynamic.drawn_after(step + 1) == drawn


def test_failed_samples_make_no_spread() -> None:
    """Their reward of 0 does not count. A generation with failures and one without make one step."""
    dynamic = cases.collector(FakeRanks(), plan_of(5, 3, 4), failing=True)
    prompts, rollout, rewards, _ = dynamic.take(0).samples
    assert rollout.failed is not None
    assert rollout.failed.any()
    assert not rollout.failed.all()
    groups = [(rollout.prompt_index == number) & ~rollout.failed for number in range(len(prompts))]
    filled = sum(rewards.totals[group].unique().numel() == 1 for group in groups)
    assert dynamic.log.metrics["rollout/filled_groups"] == filled


def dynamic_run(**parts: Any) -> FakeRun:
    """Return a run of fakes with dynamic sampling."""
    order = PromptSampler(FakePrompts().batch(0), batch_size=4, shuffle=True, seed=0)
    return FakeRun(grpo=True, prompts=order, plan=SamplingPlan(2, waves=6, prompts_per_step=4, prompts=4), **parts)


def test_the_loop_trains_on_groups_with_a_spread() -> None:
    """Validation prompts are generated and scored as they are."""
    run = dynamic_run(settings=RunSettings(steps=6, val_interval=3), validation=held_out(FakePrompts().batch(0)))
    run.fit()
    records = run.metrics.records
    for step in range(1, 7):
        assert records[step]["reward/equal_groups_fraction"] == 0.0
        assert records[step]["rollout/sequences"] == 8.0
        assert records[step]["rollout/generations"] >= 1.0
    assert any(records[step]["rollout/generations"] > 1 for step in range(1, 7))
    assert records[6]["val/response_tokens_mean"] == 4.0
    assert run.events.count("validate") == 3  # before, in the middle and at the end


class NoReward(FakeReward):
    """Nothing for anything."""

    def score(self, rollout: Any, prompts: Any) -> Rewards:
        return Rewards(torch.zeros(len(rollout.tokens)))


def test_a_step_without_a_spread_ends_and_says_so() -> None:
    run = dynamic_run(reward=NoReward([]), settings=RunSettings(steps=1))
    run.fit()
    record = run.metrics.records[1]
    assert record["rollout/generations"] == 6.0
    assert record["rollout/filled_groups"] == 4.0
    assert record["rollout/dropped_groups"] == 20.0
    assert not run.actor.logits.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    (inputs / "hopeless.py").write_text(cases.REWARD, encoding="utf-8")
    lines = (inputs / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, own in zip(cases.WEIGHTS, (lines[:5], lines[5:]), strict=True):
        (inputs / f"{name}.jsonl").write_text("".join(own), encoding="utf-8")
    return inputs


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """Results of rank 0 by run, and "numbers" of both ranks."""
    alone = {"whole": cases.Run("1"), "resumed": cases.Run("1", "whole")}
    both = {"resumed dp2": cases.Run("dp2", "whole")}
    both |= {"dp2": cases.Run("dp2")} if FULL else {}
    one = run_ranks(1, cases.on_ranks, str(folder), alone, timeout_s=120)[0]
    two = run_ranks(2, cases.on_ranks, str(folder), both, timeout_s=120)
    return one | two[0] | {"numbers": [result["numbers"] for result in two]}


def test_two_ranks_keep_the_groups_of_one(runs: dict[str, Any]) -> None:
    """Each rank holds half of them, whole and in order: joined, the rows and rewards of one rank, bit for bit."""
    for step, expected in enumerate(cases.sampled_steps(FakeRanks())):
        ranks = [numbers[step] for numbers in runs["numbers"]]
        for rank in ranks:
            assert all(rank[name] == expected[name] for name in ("prompts", "tickets", "dropped"))
            assert rank["metrics"] == expected["metrics"]
            assert len(rank["rollout"]["tokens"]) == 2 * cases.SAMPLES
        assert torch.equal(torch.cat([rank["rewards"] for rank in ranks]), expected["rewards"])
        for name in ("lengths", "prompt_index", "sample_index"):
            assert torch.equal(torch.cat([rank["rollout"][name] for rank in ranks]), expected["rollout"][name])
        rows = [ids for rank in ranks for ids in rank["rollout"]["tokens"].tolist()]
        for actual, tokens in zip(rows, expected["rollout"]["tokens"].tolist(), strict=True):
            assert [token for token in actual if token] == [token for token in tokens if token]


def test_a_run_on_two_ranks_samples_what_a_run_on_one_does(runs: dict[str, Any]) -> None:
    """Resumed from a checkpoint of one rank, so that the number of prompts drawn is of the run, not of a rank."""
    for run in runs.keys() & {"dp2", "resumed dp2"}:
        assert_same_tokens(runs[run]["tokens"], runs["whole"]["tokens"][runs[run]["start"] :])


def assert_same_tokens(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Step by step, whatever the padding."""
    for mine, theirs in zip(actual, expected, strict=True):
        width = max(mine.size(1), theirs.size(1))
        mine, theirs = (torch.nn.functional.pad(rows, (0, width - rows.size(1))) for rows in (mine, theirs))
        assert torch.equal(mine, theirs)


def test_a_resumed_run_is_bit_equal(folder: Path, runs: dict[str, Any]) -> None:
    """Tokens, metrics and weights of the steps after the saved one."""
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed["start"] == cases.SAVED
    expected, actual = cases.records(folder, "whole"), cases.records(folder, "resumed")
    assert any(expected[step]["rollout/dropped_groups"] > 0 for step in range(cases.SAVED + 1, cases.STEPS + 1))
    assert actual == {step: expected[step] for step in range(cases.SAVED + 1, cases.STEPS + 1)}
    for mine, theirs in zip(resumed["tokens"], whole["tokens"][cases.SAVED :], strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())


def test_a_difference_in_a_part_is_one_where_the_estimator_reads_parts() -> None:
    """Totals of every third prompt are equal, its lengths are not; nothing is different in a part of no weight."""
    for by_parts in (False, True):
        dynamic = cases.collector(FakeRanks(), dataclasses.replace(plan_of(4, 4, 5), by_parts=by_parts))
        for step in range(6):
            rewards = dynamic.take(step).samples.rewards
            assert rewards.parts is not None
            assert torch.equal(rewards.parts.values[:, 0] + rewards.parts.values[:, 1], rewards.totals)
            assert dynamic.log.metrics["rollout/filled_groups"] == 0
        assert (dynamic.drawn_after(6) == 6 * 4) == by_parts
