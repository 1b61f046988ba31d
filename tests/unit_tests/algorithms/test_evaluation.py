"""Estimates of evaluations against exact fractions, against every set of k samples, and against simulated prompts."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from statistics import mean, multimode

import numpy as np
import pytest

from mega_rl.algorithms.evaluation import maj_at_k, mean_with_interval, pass_at_k, wilson


def test_pass_at_k_is_the_exact_fraction() -> None:
    """Every n up to 32, c and k; to 1e-15, a few roundings of float64."""
    for n in range(1, 33):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
            assert abs(pass_at_k(n, c, k) - float(exact)) <= 1e-15, (n, c, k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_maj_at_k_is_the_mean_of_votes() -> None:
    """Random votes of up to nine samples: ties, samples without an answer, answers that are right at times."""
    dice = random.Random(0)
    for _ in range(60):
        n = dice.randint(1, 9)
        votes = [dice.choice(["a", "b", "c", "d", None]) for _ in range(n)]
        right = [vote == "a" or (vote == "b" and dice.random() < 0.5) for vote in votes]
        share = {vote: mean([r for v, r in zip(votes, right, strict=True) if v == vote]) for vote in votes}
        for k in range(1, n + 1):
            results = []
            for number in range(n // k):
                cast = [vote for vote in votes[number * k :][:k] if vote is not None]
                results.append(mean([share[vote] for vote in multimode(cast)]) if cast else 0.0)
            assert maj_at_k(votes, right, k) == pytest.approx(mean(results))


def test_the_interval_of_single_samples_is_wilsons() -> None:
    """Against the roots of (p - share)^2 = z^2 p (1 - p) / n, which define it."""
    estimate = mean_with_interval([1.0] * 3 + [0.0] * 7, samples=1)
    assert (estimate.mean, estimate.prompts) == (0.3, 10)
    for edge in (estimate.low, estimate.high):
        assert (edge - 0.3) ** 2 == pytest.approx(1.959963984540054**2 * edge * (1 - edge) / 10)
    assert wilson(0.0, 10.0)[0] == 0.0
    assert wilson(1.0, 10.0)[1] == 1.0


def test_the_interval_is_of_no_more_trials_than_there_are_samples() -> None:
    """Prompts that differ by less than independent samples would are worth their samples, and not more."""
    values = [0.5, 0.5, 0.5, 0.75]
    estimate = mean_with_interval(values, samples=4)
    assert (estimate.low, estimate.high) == wilson(0.5625, 16.0)


def test_prompts_that_agree_have_an_interval_still() -> None:
    for values in ([0.0] * 5, [1.0] * 5, [0.5] * 5, [0.5]):
        estimate = mean_with_interval(values, samples=8)
        assert estimate.low < estimate.high
        assert 0.0 <= estimate.low <= estimate.mean <= estimate.high <= 1.0


@pytest.mark.parametrize("shape", [(2.0, 2.0), (0.3, 0.3), (1.0, 4.0)])
def test_the_interval_holds_the_mean_in_95_of_100_evaluations(shape: tuple[float, float]) -> None:
    """40 prompts of random difficulty, 4 samples each, pass@1 and pass@2; 0.02 is three errors of 1,200 trials."""
    dice = np.random.default_rng(7)
    for k in (1, 2):
        table = [pass_at_k(4, c, k) for c in range(5)]
        difficulties = dice.beta(*shape, size=1_000_000)
        truth = float((1.0 - (1.0 - difficulties) ** k).mean())
        held = 0
        for _ in range(1200):
            right = dice.binomial(4, dice.beta(*shape, size=40))
            estimate = mean_with_interval([table[c] for c in right], samples=4)
            held += estimate.low <= truth <= estimate.high
        assert 0.93 <= held / 1200 <= 0.98
