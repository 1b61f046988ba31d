"""Dynamic sampling: which prompts are kept, on one rank and on two, in the loop, and after a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mega_rl.trainer.dynamic_sampling import DynamicSampling, _joined
from mega_rl.trainer.old_logprobs import RecomputedLogprobs

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.data.sampling.epochs import PromptSampler
from mega_rl.errors import UserErrors
from mega_rl.protocols import Scorer
from mega_rl.trainer import RunSettings
from mega_rl.trainer.collect import SamplingPlan
from mega_rl.trainer.filters import has_spread
from mega_rl.trainer.loop import PPOTrainer
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits
from mega_rl.types import Metrics, Prompt, RewardParts, Rewards, Rollout
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakePolicy, FakePrompts, FakeRanks, FakeReward, FakeTimer, held_out
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer import dynamic_sampling_on_ranks as cases
from tests.unit_tests.trainer.test_loop import make_trainer

ON = "rollout.dynamic_sampling.max_generations=4"
GRPO = ("algorithm.advantage=grpo", "rollout.n=4")


def sampled_by_loops(drawn: int, plan: SamplingPlan) -> tuple[list[dict[str, Any]], int, int]:
    """Return (groups of a step: prompt, responses, rewards; generations; prompts drawn after it), the obvious way."""
    order = PromptSampler(cases.PROMPTS, batch_size=1, shuffle=True, seed=3)
    groups: list[dict[str, Any]] = []
    generations = 0
    while sum(group["spread"] for group in groups) < plan.prompts_per_step and generations < plan.max_generations:
        for position in range(plan.prompts):
            (prompt,) = order.batch(drawn + position)
            responses = [cases.response(drawn, position, sample) for sample in range(cases.SAMPLES)]
            rewards = [cases.score(prompt, tokens) for tokens in responses]
            spread = len(set(rewards)) > 1
            groups.append({"prompt": prompt, "responses": responses, "rewards": rewards, "spread": spread})
        drawn += plan.prompts
        generations += 1
    for group in groups:
        group["sampled"] = len(groups)
    good = [number for number, group in enumerate(groups) if group["spread"]]
    rest = [number for number, group in enumerate(groups) if not group["spread"]]
    chosen = sorted([*good, *rest][: plan.prompts_per_step])
    return [groups[number] for number in chosen], generations, drawn


@pytest.mark.parametrize(
    "plan",
    [cases.PLAN, SamplingPlan(6, 2, 3), SamplingPlan(8, 5, 2), SamplingPlan(2, 9, 1), SamplingPlan(4, 4, 5)],
    ids=str,
)
def test_a_step_keeps_the_groups_that_a_loop_keeps(plan: SamplingPlan) -> None:
    """Prompts, tokens, rewards and numbers of five steps in a row; some fill up with groups of equal rewards."""
    dynamic = cases.sampling(FakeRanks(), plan)
    drawn = 0
    for step in range(5):
        expected, generations, drawn = sampled_by_loops(drawn, plan)
        prompts = dynamic.batch(step)
        rollout = dynamic.generate(prompts, step=step)
        rewards = dynamic.score(rollout, prompts).totals
        assert [prompt.index for prompt in prompts] == [group["prompt"].index for group in expected]
        assert rewards.tolist() == [reward for group in expected for reward in group["rewards"]]
        responses = [tokens for group in expected for tokens in group["responses"]]
        actual = [ids[2:length] for ids, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
        assert actual == responses
        assert rollout.prompt_index.tolist() == [n for n in range(len(expected)) for _ in range(cases.SAMPLES)]
        assert rollout.sample_index.tolist() == list(range(cases.SAMPLES)) * len(expected)
        assert rollout.tokens.size(1) == int(rollout.lengths.max())
        metrics = dynamic.metrics()
        assert metrics["rollout/generations"] == generations
        assert metrics["rollout/filled_groups"] == sum(not group["spread"] for group in expected)
        assert metrics["rollout/dropped_groups"] == expected[0]["sampled"] - len(expected)
        assert dynamic.drawn_after(step + 1) == drawn
        assert dynamic.metrics() == {}


def test_a_difference_in_a_part_is_one_where_the_estimator_reads_parts() -> None:
    """Totals of every third prompt are equal, its lengths are not; nothing is different in a part of no weight."""
    plan = SamplingPlan(4, 4, 5)
    for by_parts in (False, True):
        dynamic = cases.sampling(FakeRanks(), dataclasses.replace(plan, by_parts=by_parts))
        filled = drawn = 0
        for step in range(6):
            prompts = dynamic.batch(step)
            rewards = dynamic.score(dynamic.generate(prompts, step=step), prompts)
            assert rewards.parts is not None
            assert torch.equal(rewards.parts.values[:, 0] + rewards.parts.values[:, 1], rewards.totals)
            filled += int(dynamic.metrics()["rollout/filled_groups"])
        drawn = dynamic.drawn
        assert filled == 0
        assert (drawn == 6 * 4) == by_parts


@dataclasses.dataclass
class LeavesFirstOut:
    """A reward without an opinion of the first sample of each prompt."""

    scorer: Scorer

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        rewards = self.scorer.score(rollout, prompts)
        totals = rewards.totals.masked_fill(rollout.sample_index == 0, math.nan)
        return dataclasses.replace(rewards, totals=totals)

    def metrics(self) -> Metrics:
        return self.scorer.metrics()


def test_samples_that_are_left_out_make_no_spread() -> None:
    """A group differs where its other samples do; what is left out arrives as such with its group."""
    dynamic = cases.sampling(FakeRanks(), SamplingPlan(5, 3, 4))
    dynamic.scorer = LeavesFirstOut(dynamic.scorer)
    prompts = dynamic.batch(0)
    rollout = dynamic.generate(prompts, step=0)
    totals = dynamic.score(rollout, prompts).totals.view(5, cases.SAMPLES)
    assert totals.isnan().sum(dim=0).tolist() == [5, *[0] * (cases.SAMPLES - 1)]
    others = totals[:, 1:]
    equal = int((others.max(dim=1).values == others.min(dim=1).values).sum())
    metrics = dynamic.metrics()
    assert metrics["rollout/filled_groups"] == equal
    assert math.isfinite(metrics["reward/sampled_mean"])


def test_failed_samples_make_no_spread() -> None:
    """Their reward of 0 is no reward. A generation with failures and one without make one step."""
    dynamic = cases.sampling(FakeRanks(), SamplingPlan(5, 3, 4), failing=True)
    prompts = dynamic.batch(0)
    rollout = dynamic.generate(prompts, step=0)
    rewards = dynamic.score(rollout, prompts).totals
    assert rollout.failed is not None
    assert rollout.failed.any()
    assert not rollout.failed.all()
    filled = 0
    for number in range(len(prompts)):
        group = (rollout.prompt_index == number) & ~rollout.failed
        filled += int(rewards[group].unique().numel() == 1)
    assert dynamic.metrics()["rollout/filled_groups"] == filled


def dynamic_trainer(policy: FakePolicy, *, drawn: int = 0, reward: Any = None, **changes: Any) -> PPOTrainer:
    """Return a trainer of fakes with dynamic sampling."""
    sampler = PromptSampler(FakePrompts().batch(0), batch_size=4, shuffle=True, seed=0)
    timer = FakeTimer()
    dynamic = DynamicSampling(
        draw=sampler.take,
        source=policy,
        scorer=reward or FakeReward(policy.events),
        ranks=FakeRanks(),
        phase=timer.phase,
        plan=SamplingPlan(4, 4, 6),
        drawn=drawn,
    )
    guard = MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks())
    changes["old_logprobs"] = RecomputedLogprobs(policy, guard)
    sources = {"prompts": dynamic, "rollout": dynamic, "reward": dynamic, "timer": timer}
    return make_trainer(grpo=True, actor=policy, sync=policy, **sources, **changes)


def test_the_loop_trains_on_groups_with_a_spread() -> None:
    """Validation prompts are generated and scored as they are."""
    policy = FakePolicy([])
    settings = RunSettings(steps=6, val_interval=3)
    trainer = dynamic_trainer(policy, settings=settings, validation=held_out(FakePrompts().batch(0)))
    trainer.fit()
    records = trainer.metrics.records
    for step in range(1, 7):
        assert records[step]["reward/equal_groups_fraction"] == 0.0
        assert records[step]["rollout/sequences"] == 8.0
        assert records[step]["rollout/generations"] >= 1.0
    assert any(records[step]["rollout/generations"] > 1 for step in range(1, 7))
    assert records[6]["val/response_tokens_mean"] == 4.0
    assert policy.events.count("validate") == 3  # before, in the middle and at the end


class NoReward(FakeReward):
    """Nothing for anything."""

    def score(self, rollout: Any, prompts: Any) -> Rewards:
        return Rewards(torch.zeros(len(rollout.tokens)))


def test_a_step_without_a_spread_ends_and_says_so() -> None:
    policy = FakePolicy([])
    trainer = dynamic_trainer(policy, reward=NoReward([]), settings=RunSettings(steps=1))
    trainer.fit()
    record = trainer.metrics.records[1]
    assert record["rollout/generations"] == 6.0
    assert record["rollout/filled_groups"] == 4.0
    assert record["rollout/dropped_groups"] == 20.0
    assert not policy.logits.any()


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
            assert rank["prompts"] == expected["prompts"]
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (ON, "algorithm.advantage=gae"),
            "max_generations=4 drops groups that others learn from: it needs an estimator that compares samples",
        ),
        (("rollout.dynamic_sampling.prompts=8",), "prompts=8 has no effect: it needs rollout.dynamic_sampling.max_gen"),
        ((*GRPO, "rollout.dynamic_sampling.max_generations=1"), "max_generations=1 has no effect: a step draws the"),
        (
            (*GRPO, ON, "rollout.dynamic_sampling.prompts=8"),
            "=4*8=32 cannot fill a step of trainer.prompts_per_step=64",
        ),
        (
            (*GRPO, ON, "rollout.backend=sglang", "trainer.async_steps=1", "algorithm.correction=tis"),
            "max_generations=4 cannot run ahead: it needs trainer.async_steps=0",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(overrides: tuple[str, ...], message: str) -> None:
    try:
        problems = check(load(None, overrides), world_size=1)
    except UserErrors as error:
        problems = [str(error)]
    assert any(message in problem for problem in problems), problems


def test_settings_that_go_together() -> None:
    assert check(load(None, (*GRPO, ON, "rollout.dynamic_sampling.prompts=96")), world_size=1) == []


def test_parts_of_a_data_source_that_comes_later() -> None:
    """Rows from before have NaN in them; a part that a prompt does not have is no spread of it."""
    first = (
        sampled_rows(2),
        Rewards(torch.tensor([1.0, 2.0]), RewardParts(("b",), (1.0,), torch.tensor([[1.0], [2.0]]))),
    )
    later = RewardParts(("a", "b"), (3.0, 1.0), torch.tensor([[0.5, torch.nan], [0.5, torch.nan]]))
    _, rewards = _joined(first, (sampled_rows(2), Rewards(torch.tensor([1.5, 1.5]), later)))
    assert rewards.parts is not None
    assert (rewards.parts.names, rewards.parts.weights) == (("a", "b"), (3.0, 1.0))
    assert rewards.parts.values.nan_to_num(-9.0).tolist() == [[-9.0, 1.0], [-9.0, 2.0], [0.5, -9.0], [0.5, -9.0]]
    prompts = torch.tensor([0, 0, 1, 1])
    assert has_spread(prompts, rewards.parts.values[:, 0], count=2).tolist() == [False, False]
    assert has_spread(prompts, rewards.parts.values[:, 1], count=2).tolist() == [True, False]


def sampled_rows(count: int) -> Rollout:
    """Return rows of one token each behind a prompt of one."""
    ones = torch.ones(count, dtype=torch.int64)
    return Rollout.from_rows(torch.ones(count, 2, dtype=torch.int64), prompt_lengths=ones, lengths=2 * ones)
