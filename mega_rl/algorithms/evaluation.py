"""Estimates of an evaluation: pass@k, avg@k, maj@k of a prompt's samples, and their means over prompts.

All in float64, from counts and votes alone; no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
MOST_SAMPLES = 1024  # of a prompt: C(n, k) of more does not fit a float64


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with the 95 % interval of the mean over prompts like these."""

    mean: float
    low: float
    high: float
    prompts: int  # that it is the mean of


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without putting back, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k), unbiased for samples that are independent. Source: Chen et al. 2021 (Codex),
    arXiv:2107.03374, equation 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} samples: needs 0 <= c <= n and 1 <= k <= n")
    missed = 1.0
    for right in range(c):  # C(n - c, k) / C(n, k) = prod of (n - k - i) / (n - i) over the c right samples
        missed *= max(n - k - right, 0) / (n - right)
    return 1.0 - missed


def maj_at_k(votes: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Return the expected rightness of the answer that most of k samples give, over all sets of k of the n samples.

    votes: [n] answer of each sample, None for one without, which takes a place in a set but no part in its vote; right:
    [n] whether the reward calls the sample right. Answers with equally many votes share the set evenly. Where samples
    with one answer are not all right, as a judge may have it, that answer counts with the share that are. A set without
    a vote is wrong. The sum over sets is exact: over the votes that an answer gets, the sets in which no other answer
    has more are counted with their ties. Raises ValueError unless 1 <= k <= n <= `MOST_SAMPLES`.
    """
    n = len(votes)
    if not (1 <= k <= n <= MOST_SAMPLES) or len(right) != n:
        raise ValueError(f"maj@{k} of {n} votes, {len(right)} samples: needs 1 <= k <= n <= {MOST_SAMPLES}")
    tallies: dict[Hashable, list[int]] = {}  # answer -> [votes, right ones]
    for vote, is_right in zip(votes, right, strict=True):
        if vote is not None:
            tally = tallies.setdefault(vote, [0, 0])
            tally[0] += 1
            tally[1] += is_right
    counts = sorted(count for count, _ in tallies.values())
    silent = n - sum(counts)
    total = 0.0
    for count, num_right in tallies.values():
        if num_right:
            others = counts.copy()
            others.remove(count)
            total += num_right / count * _wins(count, tuple(others), silent, k)
    return min(total, 1.0)


@cache
def _wins(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Return the share of sets of k samples that an answer of `count` votes wins; a tie of t answers counts 1 / t.

    others: votes of each other answer; silent: samples without a vote.
    """
    n = count + sum(others) + silent
    wins = 0.0
    for own in range(1, min(count, k) + 1):
        most_ties = k // own - 1  # answers that can have as many votes as this one
        # ways[t, j]: choices of j samples of other answers, t of which have `own` votes and none more
        ways = np.zeros((most_ties + 1, k - own + 1))
        ways[0, 0] = 1.0
        for other in others:
            ways = _with_answer(ways, other, own)
        ways = _with_answer(ways, silent, silent + 1)
        wins += math.comb(count, own) * float((ways[:, k - own] / (1.0 + np.arange(most_ties + 1))).sum())
    return wins / math.comb(n, k)


def _with_answer(ways: npt.NDArray[np.float64], votes: int, own: int) -> npt.NDArray[np.float64]:
    """Return the choices when an answer with so many votes joins: at most `own` of them, of which `own` is a tie."""
    joined = np.zeros_like(ways)
    room = ways.shape[1]
    for taken in range(min(votes, own, room - 1) + 1):
        chosen = math.comb(votes, taken) * ways[:, : room - taken]
        if taken < own:
            joined[:, taken:] += chosen
        else:
            joined[1:, taken:] += chosen[:-1]
    return joined


def mean_with_interval(values: Sequence[float], *, samples: int) -> Estimate:
    """Return the mean of one number in [0, 1] for each prompt, with a 95 % interval; values must not be empty.

    Prompts are the clusters: the samples of one say little of another. The interval is Wilson's with as many trials as
    the spread between prompts makes it worth, P p (1 - p) / variance (Korn and Graubard 1998, for surveys), at most
    all samples, P * samples. With one sample each that is P, Wilson's own interval of right prompts. It stays in
    [0, 1] and has a width where all prompts agree.

    samples: that stand behind each prompt's number.
    """
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / count
    bernoulli = mean * (1.0 - mean)
    trials = float(count)
    if bernoulli > 0.0:
        trials = min(count * bernoulli / variance, float(count * samples)) if variance > 0.0 else float(count * samples)
    low, high = wilson(mean, trials)
    return Estimate(mean, low, high, count)


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a share over so many trials.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22.
    """
    square = Z_95**2 / trials
    center = (share + square / 2.0) / (1.0 + square)
    half = Z_95 * math.sqrt(share * (1.0 - share) / trials + square / (4.0 * trials)) / (1.0 + square)
    low, high = max(center - half, 0.0), min(center + half, 1.0)
    return (0.0 if share == 0.0 else low), (1.0 if share == 1.0 else high)  # as it is without rounding
