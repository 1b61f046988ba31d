"""KL estimators against the exact divergence, and the coefficient's controllers."""

from __future__ import annotations

import math

import pytest
import torch

from mega_rl.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, k1, k2, k3
from mega_rl.errors import RunError, UserError


def test_estimators_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.2)])
    ref = torch.tensor([math.log(0.25), math.log(0.4)])
    # log ratios: log 2, -log 2
    torch.testing.assert_close(k1(logprobs, ref), torch.tensor([0.6931472, -0.6931472]))
    torch.testing.assert_close(k2(logprobs, ref), torch.tensor([0.2402265, 0.2402265]))
    # q/p - 1 + log p/q: 0.5 - 1 + 0.6931472, 2 - 1 - 0.6931472
    torch.testing.assert_close(k3(logprobs, ref), torch.tensor([0.1931472, 0.3068528]))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_the_unbiased_ones_have_the_divergence_as_expectation(estimator: KLEstimator) -> None:
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), exact)


def test_equal_policies_have_none_and_tiny_differences_survive() -> None:
    logprobs = torch.tensor([-1.5])
    for estimator in (k1, k2, k3):
        assert estimator(logprobs, logprobs).item() == 0.0
    # exp(x) - 1 - x by plain float32 would be pure rounding at x = 1e-3; the true value is x^2 / 2 = 5e-7.
    small = k3(torch.zeros(1), torch.full((1,), 1e-3)).item()
    assert small == pytest.approx(5.0e-7, rel=1e-2)


def test_k3_stays_finite_where_the_policy_collapsed() -> None:
    logprobs = torch.tensor([-300.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-0.1]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_fixed() -> None:
    kl = FixedKL(0.25)
    kl.update(100.0, 10)
    kl.restore(kl.state())
    assert kl.value == 0.25


def test_adaptive_by_hand() -> None:
    kl = AdaptiveKL(0.1, target=2.0, horizon=100)
    kl.update(2.1, 50)  # error 0.05: 0.1 * (1 + 0.05 * 0.5)
    assert kl.value == pytest.approx(0.1025)
    kl.update(40.0, 50)  # error cut to 0.2: * (1 + 0.1)
    assert kl.value == pytest.approx(0.11275)
    kl.update(0.0, 50)  # error cut to -0.2: * (1 - 0.1)
    assert kl.value == pytest.approx(0.101475)


def test_adaptive_stays_positive_for_a_batch_beyond_its_horizon() -> None:
    kl = AdaptiveKL(1.0, target=1.0, horizon=10)
    kl.update(0.0, 10_000)
    assert kl.value == pytest.approx(0.8)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_ends_the_run_before_its_coefficient_is_lost(kl: float) -> None:
    controller = AdaptiveKL(0.1, target=1.0, horizon=10)
    with pytest.raises(RunError, match=rf"kl/ref={kl}: .* resume from an earlier checkpoint"):
        controller.update(kl, 10)
    assert controller.value == 0.1


def test_adaptive_resumes() -> None:
    kl = AdaptiveKL(0.1, target=1.0, horizon=10)
    kl.update(3.0, 10)
    resumed = AdaptiveKL(0.1, target=1.0, horizon=10)
    resumed.restore(kl.state())
    assert resumed.value == kl.value != 0.1


def test_adaptive_never_leaves_zero_and_says_so() -> None:
    with pytest.raises(UserError, match=r"kl_coef=0\.0"):
        AdaptiveKL(0.0, target=1.0, horizon=10)
