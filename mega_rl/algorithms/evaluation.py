"""Estimates of an evaluation: pass@k, avg@k, maj@k of a prompt's samples, and their means over prompts.

All in float64, only from counts and votes; no tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with the 95 % interval of the mean over prompts like these."""

    mean: float
    low: float
    high: float
    prompts: int  # number of prompts behind the mean


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples, without replacement, include one of c right samples.

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
    """Return the mean rightness of the majority's answer over disjoint sets of k of n samples.

    votes: [n] answer of each sample, None for one without, which takes a place in a set but no part in its vote; right:
    [n] whether the reward calls the sample right. Answers with equally many votes share the set evenly. Where samples
    with one answer are not all right, as a judge may have it, that answer counts with the share that are. A set without
    a vote is wrong. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= len(votes) == len(right):
        raise ValueError(f"maj@{k} of {len(votes)} votes, {len(right)} samples: needs 1 <= k <= n")
    given, right_ones = Counter(votes), Counter(vote for vote, is_right in zip(votes, right, strict=True) if is_right)
    sets = [Counter(votes[first : first + k]) for first in range(0, len(votes) - k + 1, k)]
    total = 0.0
    for counts in sets:
        most = max((count for vote, count in counts.items() if vote is not None), default=0)
        winners = [vote for vote, count in counts.items() if vote is not None and count == most]
        total += sum(right_ones[vote] / given[vote] for vote in winners) / max(len(winners), 1)
    return total / len(sets)


def mean_with_interval(values: Sequence[float], *, samples: int) -> Estimate:
    """Return mean and 95 % interval of `values` in [0, 1], one per prompt, not empty.

    The interval is Wilson's with as many trials as the spread between prompts makes it worth,
    P p (1 - p) / variance (Korn and Graubard 1998, for surveys), at most all samples, P * samples.

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
    """Return Wilson's 95 % score interval of a share over a number of trials.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22.
    """
    square = Z_95**2 / trials
    center = (share + square / 2.0) / (1.0 + square)
    half = Z_95 * math.sqrt(share * (1.0 - share) / trials + square / (4.0 * trials)) / (1.0 + square)
    low, high = max(center - half, 0.0), min(center + half, 1.0)
    return (0.0 if share == 0.0 else low), (1.0 if share == 1.0 else high)  # exact at both ends, without rounding
