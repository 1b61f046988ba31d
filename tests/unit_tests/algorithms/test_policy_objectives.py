"""Every policy loss against its paper's formula, written response by response in float64, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.losses import PolicyObjective, PolicyTokens
from mega_rl.algorithms.policy_losses import CISPO, DPPOKL, DPPOTV, GMPO, GSPO, SAPO, ClipCov, KLCov
from mega_rl.algorithms.statistics import Sequences

LENGTHS = (9, 1, 17, 6, 12)
PADDING = 3
TOKENS = sum(LENGTHS) + PADDING

# (new log-probs, old ones, advantages of one response, objective) -> sum of its token losses; all [n] float64
Definition = Callable[[Tensor, Tensor, Tensor], Tensor]


def gspo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Equation 5: a clipped ratio of the response, times its one advantage."""
    ratio = (new.sum() / len(new) - old.sum() / len(new)).exp()
    clipped = ratio.clamp(1 - 0.1, 1 + 0.2)
    return -torch.minimum(ratio * advantages[0], clipped * advantages[0]) * len(new)


def gmpo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The n-th root of a product of ratios, each the smaller in the direction of the advantage's sign."""
    sign = float(torch.sign(advantages[0]))
    product = torch.ones((), dtype=torch.float64)
    for x, y in zip(new, old, strict=True):
        ratio = (x - y).exp()
        product = product * (sign * torch.minimum(sign * ratio, sign * ratio.clamp(math.exp(-0.3), math.exp(0.2))))
    return -advantages[0] * product ** (1 / len(new)) * len(new)


def cispo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    weights = [min(math.exp(float(x - y)), 1.3) for x, y in zip(new.detach(), old, strict=True)]
    return -(torch.tensor(weights, dtype=torch.float64) * advantages * new).sum()


def sapo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for x, y, advantage in zip(new, old, advantages, strict=True):
        tau = 1.5 if advantage > 0 else 2.5
        total = total - advantage * 4 / tau / (1 + torch.exp(-tau * ((x - y).exp() - 1)))
    return total


def dppo(divergence: Callable[[float, float], float], threshold: float) -> Definition:
    def definition(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y, advantage in zip(new, old, advantages.tolist(), strict=True):
            p, q = math.exp(x.item()), math.exp(y.item())
            away = (advantage > 0 and p > q) or (advantage < 0 and p < q)
            if not (away and divergence(p, q) > threshold):
                total = total - min(p / q, 1.4) * advantage * x
        return total

    return definition


def covariances(new: Tensor, advantages: Tensor) -> list[float]:
    mean = math.fsum(new.tolist()) / len(new)
    return [a * (x - mean) for a, x in zip(advantages.tolist(), new.tolist(), strict=True)]


def clip_cov(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clip and dual clip; a constant in the place of a token of large covariance."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y, a, c in zip(new, old, advantages, covariances(new, advantages), strict=True):
        ratio = ((x.detach() if c >= 0.4 else x) - y).exp()
        objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        total = total - (torch.maximum(objective, 3 * a) if a < 0 else objective)
    return total


def kl_cov(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for x, y, a, c in zip(new, old, advantages, covariances(new, advantages), strict=True):
        objective = (x - y).exp() * a
        total = total - (torch.maximum(objective, 1.5 * a) if a < 0 else objective)
        if c >= 0.4:
            total = total + 0.7 * (x - y).abs()
    return total


def binary_kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


# name -> (loss, its definition, whether it reads one advantage for a response)
CASES: dict[str, tuple[PolicyObjective, Definition, bool]] = {
    "gspo": (GSPO(clip_low=0.1, clip_high=0.2), gspo, True),
    "gmpo": (GMPO(clip_low=0.3, clip_high=0.2), gmpo, True),
    "cispo": (CISPO(cap=1.3), cispo, False),
    "sapo": (SAPO(tau_positive=1.5, tau_negative=2.5), sapo, False),
    "dppo_tv": (DPPOTV(threshold=0.05, cap=1.4), dppo(lambda p, q: abs(p - q), 0.05), False),
    "dppo_kl": (DPPOKL(threshold=0.01, cap=1.4), dppo(binary_kl, 0.01), False),
    "clip_cov": (ClipCov(clip_high=0.2, threshold=0.4), clip_cov, False),
    "kl_cov": (KLCov(threshold=0.4, coef=0.7, dual_clip=1.5), kl_cov, False),
}


def tokens_of(seed: int, *, of_responses: bool, dtype: torch.dtype = torch.float64) -> tuple[PolicyTokens, Tensor]:
    """Five packed responses and padding; log-probs of -0.01 to -4, ratios around 1 whose mean differs by response."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([*LENGTHS, PADDING])
    rows = torch.repeat_interleave(torch.tensor([1, 2, 3, 4, 5, 0]), lengths)
    active = (rows > 0).double()
    logprobs = -(1e-2 + 1.3 * normal(TOKENS).abs()) * active
    log_ratio = (0.2 * normal(6).repeat_interleave(lengths) + 0.3 * normal(TOKENS)) * active
    advantages = (normal(6).repeat_interleave(lengths) if of_responses else normal(TOKENS)) * active
    old = (logprobs - log_ratio).clamp(max=-5e-3) * active
    leaf = logprobs.to(dtype).requires_grad_()
    weights = (active / sum(LENGTHS)).to(dtype)
    tokens = PolicyTokens(
        leaf, leaf - old.to(dtype), advantages.to(dtype), weights, weights, Sequences(rows, len(LENGTHS))
    )
    return tokens, leaf


def defined(definition: Definition, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the definition, averaged as the weights of `tokens_of` average."""
    new = tokens.logprobs.detach().double().requires_grad_()
    old = (tokens.logprobs - tokens.log_ratio).detach().double()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(1, len(LENGTHS) + 1):
        at = tokens.sequences.rows == row
        total = total + definition(new[at], old[at], tokens.advantages[at].double()) / sum(LENGTHS)
    return total.detach(), torch.autograd.grad(total, new)[0]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_definition(name: str, seed: int) -> None:
    """float64: 1e-12 is its rounding. Padding gets no gradient."""
    objective, definition, of_responses = CASES[name]
    tokens, leaf = tokens_of(seed, of_responses=of_responses)
    token_loss, means = objective(tokens)
    loss = (tokens.loss_weights * token_loss).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected_loss, expected = defined(definition, tokens)
    assert float((loss.detach() - expected_loss).abs()) < 1e-12
    assert float((gradient - expected).abs().max()) < 1e-12
    assert float(expected.abs().max()) > 1e-3
    assert not any(value.requires_grad for value in means.values())


@pytest.mark.parametrize("name", list(CASES))
def test_float32_is_as_near_as_float32_is(name: str) -> None:
    """Some roundings of ratios and sums of a dozen tokens."""
    objective, definition, of_responses = CASES[name]
    tokens, leaf = tokens_of(4, of_responses=of_responses, dtype=torch.float32)
    (gradient,) = torch.autograd.grad((tokens.loss_weights * objective(tokens)[0]).sum(), leaf)
    expected = defined(definition, tokens)[1]
    assert gradient.dtype == torch.float32
    assert float((gradient - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize("name", list(CASES))
def test_where_policies_agree_each_is_the_policy_gradient(name: str) -> None:
    """At a ratio of 1 the gradient is -A * grad log p, but for tokens that clip_cov leaves out."""
    objective, _, of_responses = CASES[name]
    tokens, leaf = tokens_of(5, of_responses=of_responses)
    tokens = replace(tokens, log_ratio=leaf - leaf.detach())
    token_loss, means = objective(tokens)
    (gradient,) = torch.autograd.grad((tokens.loss_weights * token_loss).sum(), leaf)
    left_out = float(means["actor/covariance_fraction"]) if name == "clip_cov" else 0.0
    expected = -tokens.loss_weights * tokens.advantages
    different = (gradient - expected).abs() > 1e-12
    assert float(different.sum()) == pytest.approx(left_out * sum(LENGTHS), abs=1e-9)
    assert (name != "clip_cov") or (0 < left_out < 0.5)


def test_gspo_keeps_the_advantage_of_each_token() -> None:
    """GSPO-token, equation 13: the ratio of the response weighs each token's own policy gradient."""
    tokens, leaf = tokens_of(6, of_responses=False)
    token_loss, _ = GSPO(clip_low=0.9, clip_high=9.0)(tokens)
    (gradient,) = torch.autograd.grad((tokens.loss_weights * token_loss).sum(), leaf)
    for row in range(1, len(LENGTHS) + 1):
        at = tokens.sequences.rows == row
        ratio = tokens.log_ratio[at].mean().exp()
        assert torch.allclose(gradient[at], -tokens.loss_weights[at] * ratio * tokens.advantages[at], atol=1e-14)


def test_metrics_count_what_is_cut_off() -> None:
    """By hand: two responses of two tokens each, the first of ratio 1.5, the second of ratio 0.5."""
    rows = torch.tensor([1, 1, 2, 2])
    new = torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64).log()
    change = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log()
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    gains = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    losses = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

    def means(objective: PolicyObjective, advantages: Tensor) -> dict[str, float]:
        tokens = PolicyTokens(new, change, advantages, weights, weights, Sequences(rows, 2))
        return {name.removeprefix("actor/"): round(float(value), 12) for name, value in objective(tokens)[1].items()}

    both = {"sequence_ratio_mean": 1.0, "clip_fraction_high": 0.5, "clip_fraction_low": 0.5}
    assert means(GSPO(), losses) == both
    assert means(GSPO(), gains) == both | {"clip_fraction_low": 0.0}
    assert means(GMPO(clip_low=0.1, clip_high=0.1), losses) == both | {
        "sequence_ratio_mean": round((math.exp(0.1) + math.exp(-0.1)) / 2, 12)
    }
    assert means(CISPO(cap=1.4), gains) == {"capped_fraction": 0.5}
    assert means(DPPOTV(threshold=0.16), losses) == {"masked_fraction": 1.0}  # 1/3 to 1/2, and 1/2 to 1/4
    assert means(DPPOTV(threshold=0.2), losses) == {"masked_fraction": 0.5}
    assert means(DPPOTV(threshold=0.2), gains) == {"masked_fraction": 0.0}  # the second comes back
    assert means(KLCov(), gains) == {"covariance_fraction": 0.0}


def test_no_response_has_no_loss() -> None:
    """An empty micro-batch of a rank with fewer rows: finite zeros."""
    nothing = torch.zeros(1, 4)
    for objective, _, _ in CASES.values():
        zeros = torch.zeros(1, 4, requires_grad=True)
        tokens = PolicyTokens(zeros, zeros * 1, nothing, nothing, nothing, Sequences(nothing.long(), 3))
        loss = (nothing * objective(tokens)[0]).sum()
        assert float(loss.detach()) == 0.0
        assert not torch.autograd.grad(loss, zeros)[0].any()


@pytest.mark.parametrize("name", list(CASES))
def test_a_response_of_one_token_far_away_stays_finite(name: str) -> None:
    """Ratios of e^20 and e^-20, and log-probs of exactly 0 (a probability of 1), in float32."""
    objective = CASES[name][0]
    logprobs = torch.tensor([0.0, -20.0, 0.0, -20.0], requires_grad=True)
    log_ratio = logprobs - torch.tensor([-20.0, 0.0, -20.0, 0.0])
    advantages, weights = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.full((4,), 0.25)
    tokens = PolicyTokens(logprobs, log_ratio, advantages, weights, weights, Sequences(torch.arange(1, 5), 4))
    token_loss, means = objective(tokens)
    (gradient,) = torch.autograd.grad((weights * token_loss).sum(), logprobs)
    assert bool(gradient.isfinite().all())
    assert bool(token_loss.isfinite().all())
    assert all(bool(value.isfinite()) for value in means.values())
