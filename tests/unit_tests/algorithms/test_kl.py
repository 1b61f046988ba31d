"""KL estimators against the exact divergence, and the coefficient's controllers."""

from __future__ import annotations

import math

import pytest
import torch

from mega_rl.algorithms.kl import KLController, KLEstimator, k1, k2, k3, kl_penalty
from mega_rl.errors import RunError


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


@pytest.mark.parametrize("far", [-300.0, -15.0, -2.62, 11.01, 300.0])
def test_k3_of_one_token_is_bounded(far: float) -> None:
    """Policy minus reference in nats: 2.62 and 11.01 are just beyond the bound of 10, 2.6 and 10.9 just inside."""
    assert k3(torch.tensor([far]), torch.zeros(1)).item() == 10.0
    inside = {-2.62: -2.6, 11.01: 10.9}.get(far, 0.5)
    assert k3(torch.tensor([inside]), torch.zeros(1)).item() == pytest.approx(math.expm1(-inside) + inside)
    assert k3(torch.tensor([inside]), torch.zeros(1)).item() < 10.0


@pytest.mark.parametrize("estimator", [k2, k3])
@pytest.mark.parametrize(
    ("far", "moved", "value", "gradient"),
    [
        (-1.0, 0.0, None, -1.0),  # no bound acts
        (-15.0, 0.0, 10.0, -15.0),  # k3 is bounded, its gradient goes on
        (-300.0, 0.0, 10.0, -20.0),  # the pull is bounded, and does not let go
        (300.0, 0.0, 10.0, 20.0),
        (-15.0, -300.0, 0.0, 0.0),  # the policy has no part of such tokens left: they say nothing of it
        (-15.0, 300.0, 100.0, -150.0),  # a weight of 10 at most
    ],
)
def test_the_penalty_of_extreme_tokens_pulls_back_within_bounds(
    estimator: KLEstimator, far: float, moved: float, value: float | None, gradient: float
) -> None:
    """far: policy minus reference, moved: policy minus the one that sampled, nats."""
    logprobs = torch.tensor([far], requires_grad=True)
    penalty = kl_penalty(
        logprobs, torch.zeros(1), log_ratio=(logprobs + (moved - far)).clamp(-20, 20), estimator=estimator
    )
    (actual,) = torch.autograd.grad(penalty.sum(), logprobs)
    if estimator is k3 and value is not None:
        assert penalty.item() == pytest.approx(value, abs=1e-6)
    assert actual.item() == pytest.approx(gradient, abs=1e-6)


def test_adaptive_by_hand() -> None:
    kl = KLController(0.1, target=2.0, horizon=100)
    kl.update(2.1, 50)  # error 0.05: 0.1 * (1 + 0.05 * 0.5)
    assert kl.value == pytest.approx(0.1025)
    kl.update(40.0, 50)  # error cut to 0.2: * (1 + 0.1)
    assert kl.value == pytest.approx(0.11275)
    kl.update(0.0, 50)  # error cut to -0.2: * (1 - 0.1)
    assert kl.value == pytest.approx(0.101475)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_ends_the_run_before_its_coefficient_is_lost(kl: float) -> None:
    controller = KLController(0.1, target=1.0, horizon=10)
    with pytest.raises(RunError, match=rf"kl/ref={kl}: .* resume from an earlier checkpoint"):
        controller.update(kl, 10)
    assert controller.value == 0.1


def test_adaptive_resumes() -> None:
    kl = KLController(0.1, target=1.0, horizon=10)
    kl.update(3.0, 10)
    resumed, fixed = KLController(0.1, target=1.0, horizon=10), KLController(0.25)
    resumed.restore(kl.state())
    assert resumed.value == kl.value != 0.1
    fixed.update(100.0, 10)
    fixed.restore({"value": 3.0})
    assert (fixed.value, fixed.state()) == (0.25, {})
