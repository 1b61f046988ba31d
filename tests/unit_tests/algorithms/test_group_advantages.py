"""Estimators without a critic against loops over Python numbers, written from the papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_rl.algorithms.advantages import ESTIMATORS as REGISTRY
from mega_rl.algorithms.advantages import GDPO
from mega_rl.algorithms.statistics import SumOverRanks, identity
from mega_rl.types import RewardParts
from tests.helpers.advantages import advantages_of
from tests.helpers.threads import on_simulated_ranks

GAMMA = 0.9


class Batch(NamedTuple):
    """Rows of prompts; some have no response token, some several turns."""

    rewards: Tensor  # [B] float32
    group_ids: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool
    kl_penalty: Tensor  # [B, S] float32

    def rows(self, chosen: Tensor) -> Batch:
        return Batch(*(column[chosen] for column in self))


class Sample(NamedTuple):
    """One answered row in numbers."""

    reward: float
    length: int
    kl: list[float]  # of each response token
    greedy: float  # reward of the greedy response to the prompt
    parts: list[float]  # named parts of the reward


Group = Sequence[Sample]
Estimate = Callable[[Batch, SumOverRanks], Tensor]
Formula = Callable[[Sequence[Group]], Sequence[Sequence[float | list[float]]]]


def batch_of(sizes: Sequence[int], *, seed: int, failures: float = 0.2) -> Batch:
    """Groups of these sizes with few different rewards, in mixed order."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    mask = torch.rand(rows, 6, generator=g) < 0.6
    mask[torch.rand(rows, generator=g) < failures] = False
    order = torch.randperm(rows, generator=g)
    ids = torch.repeat_interleave(10 * torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    rewards = torch.tensor([0.0, 1 / 3, 1.0, 2.5])[torch.randint(0, 4, (rows,), generator=g)]
    return Batch(rewards, ids[order], mask, 0.1 * torch.randn(rows, 6, generator=g))


# The papers' formulas: from groups of samples to numbers, one for each sample or for each token of each sample.
def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def leave_one_out(groups: Sequence[Group]) -> list[list[float]]:
    return [
        [s.reward - mean([o.reward for j, o in enumerate(g) if j != i]) if len(g) > 1 else 0.0 for i, s in enumerate(g)]
        for g in groups
    ]


def length_weighted(groups: Sequence[Group]) -> list[list[float]]:
    out = []
    for g in groups:
        baseline = sum(s.length * s.reward for s in g) / sum(s.length for s in g)
        out.append([s.reward - baseline for s in g])
    return out


def centred(groups: Sequence[Group]) -> list[list[float]]:
    return [[s.reward - mean([o.reward for o in g]) for s in g] for g in groups]


def over_group_deviation(groups: Sequence[Group]) -> list[list[float]]:
    deviations = [statistics.stdev([s.reward for s in g]) if len(g) > 1 else 0.0 for g in groups]
    return [[c / (d + 1e-6) for c in row] for row, d in zip(centred(groups), deviations, strict=True)]


def over_batch_deviation(groups: Sequence[Group]) -> list[list[float]]:
    rows = centred(groups)
    every = [c for row in rows for c in row]
    deviation = statistics.stdev(every) if len(every) > 1 else 0.0
    return [[c / (deviation + 1e-6) for c in row] for row in rows]


def mean_of_sets(groups: Sequence[Group], *, k: int, normalize: bool) -> list[list[float]]:
    """Every set of k samples, which is right where one of its samples is: a sample's sets against all sets."""
    out = []
    for g in groups:
        right = [s.reward > 0.5 for s in g]
        sets = [(chosen, any(right[i] for i in chosen)) for chosen in combinations(range(len(g)), k)]
        if not sets:
            out.append([0.0] * len(g))
            continue
        average = mean([value for _, value in sets])
        deviation = math.sqrt(average * (1 - average)) if normalize else 1.0
        of_sample = [mean([value for chosen, value in sets if i in chosen]) for i in range(len(g))]
        out.append([(value - average) / deviation if 0 < average < 1 else 0.0 for value in of_sample])
    return out


def whitened_returns(
    groups: Sequence[Group], *, scores: Sequence[Sequence[float]], gamma: float
) -> list[list[list[float]]]:
    """Of each token of each sample; `scores` of each sample."""
    rows = []
    for group, row in zip(groups, scores, strict=True):
        for sample, score in zip(group, row, strict=True):
            returns, later = [0.0] * sample.length, 0.0
            for t in reversed(range(sample.length)):
                later = gamma * later - sample.kl[t] + (score if t == sample.length - 1 else 0.0)
                returns[t] = later
            rows.append(returns)
    tokens = [value for row in rows for value in row]
    average = mean(tokens)
    deviation = math.sqrt(mean([(value - average) ** 2 for value in tokens]) + 1e-8)
    whitened = iter([[(value - average) / deviation for value in row] for row in rows])
    return [[next(whitened) for _ in group] for group in groups]


def above_greedy(groups: Sequence[Group]) -> list[list[list[float]]]:
    """Of each token of each sample."""
    return [[[s.reward - sum(s.kl[t:]) - s.greedy for t in range(s.length)] for s in g] for g in groups]


WEIGHTS = (1.0, -0.5, 2.0)


def reward_parts(batch: Batch) -> RewardParts:
    """The reward, a part with few values of another scale, and one that is equal in all samples of a prompt."""
    other = 100.0 * (batch.kl_penalty[:, 0] > 0.05)
    values = torch.stack([batch.rewards, other, batch.group_ids.float() / 3], dim=1)
    return RewardParts(("correct", "format", "prompt"), WEIGHTS, values)


def parts_over_their_deviations(groups: Sequence[Group]) -> list[list[float]]:
    """Each part less its mean, over its deviation in the group; the weighted sum over its deviation in the batch."""
    rows = []
    for g in groups:
        scores = [0.0] * len(g)
        for k, weight in enumerate(WEIGHTS):
            values = [s.parts[k] for s in g]
            deviation = statistics.stdev(values) if len(set(values)) > 1 else 0.0
            for i, value in enumerate(values):
                scores[i] += weight * (value - mean(values)) / (deviation + 1e-6) if deviation else 0.0
        rows.append(scores)
    every = [score for row in rows for score in row]
    deviation = statistics.stdev(every) if len(every) > 1 else 0.0
    return [[(score - mean(every)) / (deviation + 1e-6) for score in row] for row in rows]


def greedy_rewards(batch: Batch) -> Tensor:
    """[B] float32, one number for each prompt."""
    return 0.05 * batch.group_ids.float()


def on_tokens(batch: Batch, formula: Formula) -> Tensor:
    """[B, S] float64, the formula's numbers of the answered rows on their response tokens."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        if batch.mask[row].any():
            groups.setdefault(group, []).append(row)
    out = torch.zeros(batch.mask.shape, dtype=torch.float64)
    if not groups:
        return out

    def sample(row: int) -> Sample:
        kl = batch.kl_penalty[row][batch.mask[row]].tolist()
        parts = reward_parts(batch).values[row].tolist()
        return Sample(float(batch.rewards[row]), len(kl), kl, float(greedy_rewards(batch)[row]), parts)

    numbers = formula([[sample(row) for row in rows] for rows in groups.values()])
    for rows, values in zip(groups.values(), numbers, strict=True):
        for row, value in zip(rows, values, strict=True):
            out[row, batch.mask[row]] = torch.tensor(value, dtype=torch.float64)
    return out


def built(name: str, **settings: object) -> Estimate:
    """The registered estimator of that name."""
    estimator = REGISTRY[name](**settings)

    def estimate(batch: Batch, sum_over_ranks: SumOverRanks) -> Tensor:
        return advantages_of(
            estimator,
            batch.rewards,
            batch.group_ids,
            batch.mask,
            kl_penalty=batch.kl_penalty if estimator.takes_kl else None,
            sum_over_ranks=sum_over_ranks,
            greedy=greedy_rewards(batch) if estimator.needs_greedy else None,
            parts=reward_parts(batch) if estimator.needs_parts else None,
        )

    return estimate


ESTIMATORS: Mapping[str, tuple[Estimate, Formula]] = {
    "rloo": (built("rloo"), leave_one_out),
    "opo": (built("opo"), length_weighted),
    "grpo": (built("grpo"), over_group_deviation),
    "grpo, std=none": (built("grpo", std="none"), centred),
    "grpo, std=batch": (built("grpo", std="batch"), over_batch_deviation),
    "gdpo": (built("gdpo"), parts_over_their_deviations),
    "pass@1": (built("pass_at_k", k=1), partial(mean_of_sets, k=1, normalize=True)),
    "pass@2": (built("pass_at_k", k=2), partial(mean_of_sets, k=2, normalize=True)),
    "pass@3": (built("pass_at_k", k=3, std="none"), partial(mean_of_sets, k=3, normalize=False)),
    "remax": (built("remax"), above_greedy),
    "reinforce++": (
        built("reinforce_plus_plus", gamma=GAMMA),
        lambda gs: whitened_returns(gs, scores=[[s.reward for s in g] for g in gs], gamma=GAMMA),
    ),
    "reinforce++ baseline": (
        built("reinforce_plus_plus_baseline"),
        lambda gs: whitened_returns(gs, scores=centred(gs), gamma=1.0),
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_an_estimator_is_its_papers_formula(name: str, sizes: list[int], seed: int) -> None:
    """Inputs are float32, sums float64: results are those of the loop rounded to float32, of size up to about 10.

    Whitened numbers go through a float32 scan of 6 tokens, and where rewards hardly differ they are divided by a small
    deviation, so their errors may be some 1e-6 of a unit.
    """
    estimate, formula = ESTIMATORS[name]
    batch = batch_of(sizes, seed=seed)
    torch.testing.assert_close(estimate(batch, identity).double(), on_tokens(batch, formula), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_ranks_give_what_one_rank_gives(name: str) -> None:
    """Groups over three ranks, of which one has no rows: up to the order of float64 sums."""
    estimate, _ = ESTIMATORS[name]
    batch = batch_of([4, 3, 5, 1, 6], seed=5)
    whole = estimate(batch, identity)
    group = batch.group_ids // 10
    parts = [(group == 0) | (group == 3), torch.zeros_like(group).bool(), (group != 0) & (group != 3)]
    pieces = on_simulated_ranks([partial(estimate, batch.rows(part)) for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        torch.testing.assert_close(piece, whole[part], rtol=1e-6, atol=1e-7)


GROUP_RELATIVE = [name for name in ESTIMATORS if name not in ("reinforce++", "remax")]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize(
    ("rewards", "answered"),
    [
        ([1 / 3] * 7, [True] * 7),  # equal thirds, whose mean is rounded
        ([0.1], [True]),
        ([0.0, 1.0, 0.5], [False] * 3),
        ([0.0, 1.0, 0.5], [False, True, False]),
    ],
)
def test_a_group_that_distinguishes_nothing_gives_exact_zeros(
    name: str, rewards: list[float], answered: list[bool]
) -> None:
    """Beside a group that does, whose advantages are not 0."""
    scores, rows = torch.tensor([*rewards, 0.0, 1.0, 0.0]), len(rewards)
    mask = torch.tensor([*answered, True, True, True])[:, None].expand(-1, 3)
    group_ids = torch.tensor([7] * rows + [3] * 3)
    advantages = ESTIMATORS[name][0](Batch(scores, group_ids, mask, torch.zeros(mask.shape)), identity)
    assert not advantages[:rows].any()
    assert advantages[rows:].any() == (name != "pass@3")  # a set of three always has the right one


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_without_response_does_not_count(name: str) -> None:
    """Whatever reward it carries: to the bit for the others, 0 for itself."""
    estimate, _ = ESTIMATORS[name]
    batch = batch_of([4, 3, 5, 2], seed=3, failures=0.4)
    answered = batch.mask.any(dim=1)
    assert 0 < int(answered.sum()) < len(answered)
    batch.rewards[~answered] = 1e6
    advantages = estimate(batch, identity)
    assert torch.equal(advantages[answered], estimate(batch.rows(answered), identity))
    assert not advantages[~answered].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rank_without_rows_and_a_batch_without_responses(name: str) -> None:
    estimate, _ = ESTIMATORS[name]
    batch = batch_of([3, 2], seed=0, failures=1.0)
    assert not estimate(batch, identity).any()
    assert estimate(batch.rows(torch.zeros(5, dtype=torch.bool)), identity).shape == (0, 6)


def test_gdpo_normalises_a_part_where_it_is_present() -> None:
    """Two data sources with a part of their own each, one part of both, and a prompt without any; float64 numpy."""
    prompts = np.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    rng = np.random.default_rng(3)
    values = rng.normal(size=(10, 3)).astype(np.float32)
    values[:3, 1], values[3:8, 0], values[8:] = np.nan, np.nan, np.nan
    weights = (1.0, 0.5, 2.0)
    scores = np.zeros(10)
    for column, weight in enumerate(weights):
        for prompt in range(4):
            rows = prompts == prompt
            own = values[rows, column].astype(np.float64)
            if not np.isnan(own).any():
                scores[rows] += weight * (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    expected = scores / (np.sqrt((scores[:8] ** 2).sum() / 7) + 1e-6)
    mask = torch.ones(10, 2, dtype=torch.bool)
    parts = RewardParts(("a", "b", "c"), weights, torch.from_numpy(values))
    advantages = advantages_of(GDPO(), torch.zeros(10), torch.from_numpy(prompts), mask, parts=parts)
    np.testing.assert_allclose(advantages[:, 0].numpy(), expected, rtol=2e-6, atol=1e-7)
