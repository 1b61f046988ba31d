"""Mean policy gradients of estimators by enumeration of every group that may be sampled, in float64.

A response is one token of a vocabulary of 4, a group n samples: 4^n groups, each with its probability. Their mean of
1/n sum_i A_i grad log p(y_i) is compared with the derivative of the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.advantages.groups import grpo, opo, pass_at_k, rloo
from mega_rl.algorithms.advantages.returns import remax

REWARDS = torch.tensor([1.0, 0.25, -2.0, 0.5], dtype=torch.float64)
RIGHT = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
LOGITS = torch.tensor([0.3, -0.9, 0.1, 0.6], dtype=torch.float64)


def expected_gradient(advantages: Callable[[Tensor, Tensor, Tensor], Tensor], rewards: Tensor, *, n: int) -> Tensor:
    """[4] float64, the mean gradient with respect to the logits."""
    samples = torch.tensor(list(product(range(4), repeat=n)))  # [4^n, n]
    groups = torch.arange(len(samples)).repeat_interleave(n)
    mask = torch.ones(samples.numel(), 1, dtype=torch.bool)
    weights = advantages(rewards[samples.flatten()], groups, mask).double().view(-1, n)
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[samples]
    probability = logprobs.detach().sum(dim=1, keepdim=True).exp()
    (gradient,) = torch.autograd.grad((probability * weights * logprobs).sum() / n, logits)
    return gradient


def exact_gradient(objective: Callable[[Tensor], Tensor]) -> Tensor:
    """[4] float64, the derivative of a function of the probabilities."""
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(logits.softmax(0)), logits)
    return gradient


@pytest.mark.parametrize("n", [2, 3, 5])
def test_leave_one_out_gives_the_gradient_of_the_mean_reward(n: int) -> None:
    """Advantages are float32: 1e-6 of numbers below 1."""
    exact = exact_gradient(lambda p: (p * REWARDS).sum())
    torch.testing.assert_close(expected_gradient(rloo, REWARDS, n=n), exact, rtol=1e-6, atol=1e-6)


def test_a_baseline_of_another_sample_gives_the_gradient_of_the_mean_reward() -> None:
    """Of ReMax, whatever the greedy reward is; with one sample."""
    exact = exact_gradient(lambda p: (p * REWARDS).sum())
    for greedy in (0.0, 0.7):
        gradient = expected_gradient(
            lambda rewards, _, mask, own=greedy: remax(rewards, torch.full_like(rewards, own), mask), REWARDS, n=1
        )
        torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_baseline_that_holds_the_sample_gives_a_share_of_it(n: int) -> None:
    """Of GRPO without a deviation, and of OPO where all responses have one length: (n - 1) / n."""
    exact = (n - 1) / n * exact_gradient(lambda p: (p * REWARDS).sum())
    for estimator in (lambda *rows: grpo(*rows, std="none"), opo):
        torch.testing.assert_close(expected_gradient(estimator, REWARDS, n=n), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 1), (3, 2), (5, 2), (5, 3), (5, 4)])
def test_pass_at_k_without_its_deviation_gives_a_share_of_the_gradient_of_pass_at_k(n: int, k: int) -> None:
    """(n - k) / (n k) of that of 1 - (1 - p(right))^k."""
    exact = (n - k) / (n * k) * exact_gradient(lambda p: 1 - (1 - (p * RIGHT).sum()) ** k)
    gradient = expected_gradient(lambda *rows: pass_at_k(*rows, k=k, normalize=False), RIGHT, n=n)
    torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-6)
