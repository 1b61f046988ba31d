"""The policy loss against numbers by hand, its gradient against finite differences, and its shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms import losses
from mega_rl.algorithms.kl import k1, k3
from mega_rl.algorithms.losses import KLTerm, PolicyObjective, PolicyTokens
from mega_rl.algorithms.policy_losses import CISPO, DPPOKL, DPPOTV, PPO
from mega_rl.algorithms.statistics import Sequences
from mega_rl.protocols import LossOutput


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    token_weights: Tensor,
    **rest: Any,
) -> LossOutput:
    """The loss of tokens by their fields."""
    tokens = PolicyTokens.of(
        logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        loss_weights=loss_weights,
        token_weights=token_weights,
        sequences=Sequences((token_weights > 0).long(), 1),
    )
    return losses.policy_loss(tokens, entropy, **rest)


def loss_of(ratios: list[float], advantages: list[float], **changed: Any) -> LossOutput:
    """Loss of tokens with these ratios, all weights 1 / n unless given; `changed` may also hold settings."""
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios]) - 1.0
    weights = torch.full((len(ratios),), 1.0 / len(ratios))
    arguments: dict[str, Any] = {
        "old_logprobs": torch.full((len(ratios),), -1.0),
        "advantages": torch.tensor(advantages),
        "loss_weights": weights,
        "token_weights": weights,
        "entropy": None,
    } | changed
    objective = PPO(clip_low=0.2, clip_high=0.3, dual_clip=arguments.pop("dual_clip", 0.0))
    return policy_loss(logprobs, arguments.pop("entropy"), objective=objective, **arguments)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "high", "low"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside
        (1.5, 2.0, -2.6, 1, 0),  # above the upper bound 1.3 with a gain: cut
        (0.5, 2.0, -1.0, 0, 0),  # below the lower bound with a gain: the pessimistic side, not cut
        (0.5, -2.0, 1.6, 0, 1),  # below the lower bound 0.8 with a loss: cut
        (1.5, -2.0, 3.0, 0, 0),  # above the upper bound with a loss: not cut
        (1.5, 0.0, 0.0, 0, 0),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, expected: float, high: int, low: int) -> None:
    out = loss_of([ratio], [advantage])
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    assert out.sums["actor/clip_fraction_high"].item() == high
    assert out.sums["actor/clip_fraction_low"].item() == low
    assert out.sums["actor/ratio_mean"].item() == pytest.approx(ratio, rel=1e-6)
    assert out.maxima["actor/ratio_max"].item() == pytest.approx(ratio, rel=1e-6)
    assert out.sums["actor/ppo_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-5)


def test_dual_clip_by_hand() -> None:
    # A = -2: the plain loss 10 at ratio 5 is bounded by 2 * 3; at ratio 2 it is 4, below the bound. A > 0 is untouched.
    assert loss_of([5.0], [-2.0], dual_clip=3.0).loss.item() == pytest.approx(6.0)
    assert loss_of([2.0], [-2.0], dual_clip=3.0).loss.item() == pytest.approx(4.0)
    assert loss_of([5.0], [2.0], dual_clip=3.0).loss.item() == pytest.approx(-2.6)
    both = loss_of([5.0, 2.0], [-2.0, -2.0], dual_clip=3.0)
    assert both.sums["actor/clip_fraction_dual"].item() == 0.5
    assert "actor/clip_fraction_dual" not in loss_of([5.0], [-2.0]).sums
    assert list(PPO(dual_clip=0.5).problems()) == ["dual_clip=0.5: legal: 0 (off) or above 1"]


def test_entropy_and_reference_terms_by_hand() -> None:
    out = loss_of(
        [1.0, 1.0],
        [1.0, 3.0],
        entropy=torch.tensor([0.5, 1.5]),
        entropy_coef=0.1,
        kl=KLTerm(torch.tensor([-1.0, -1.0 + math.log(2)]), 0.5, k3),
    )
    # policy -(1 + 3) / 2; entropy mean 1; k3 of q/p = 1 and 2: 0 and 2 - 1 - log 2 = 0.3068528, mean 0.1534264
    assert out.sums["actor/policy_loss"].item() == pytest.approx(-2.0)
    assert out.sums["actor/entropy"].item() == pytest.approx(1.0)
    assert out.sums["actor/ref_kl"].item() == pytest.approx(0.1534264, rel=1e-5)
    assert out.sums["actor/kl_loss"].item() == pytest.approx(0.0767132, rel=1e-5)
    assert out.loss.item() == pytest.approx(-2.0 - 0.1 + 0.0767132, rel=1e-6)
    assert out.sums["actor/loss"].item() == out.loss.item()


def test_loss_weights_weigh_the_loss_and_token_weights_the_metrics() -> None:
    out = loss_of(
        [1.0, 1.0],
        [1.0, 3.0],
        entropy=torch.tensor([0.5, 1.5]),
        entropy_coef=0.1,
        kl=KLTerm(torch.tensor([-1.0, -1.5]), 0.2, k1),
        loss_weights=torch.tensor([1.0, 2.0]),
    )
    # policy -(1 + 2 * 3); entropy 0.5 + 2 * 1.5 = 3.5; kl 0 + 2 * 0.5 = 1
    assert out.loss.item() == pytest.approx(-7.0 - 0.35 + 0.2)
    assert out.sums["actor/entropy"].item() == pytest.approx(1.0)
    assert out.sums["actor/ref_kl"].item() == pytest.approx(0.25)


def test_gradient_equals_finite_differences() -> None:
    g = torch.Generator().manual_seed(0)
    old, advantages, shift, entropy_shift = torch.randn(4, 3, 5, generator=g, dtype=torch.float64)
    ref = old + 0.5 * shift  # near enough for k3 and its weight to be unbounded
    weights = torch.rand(3, 5, generator=g, dtype=torch.float64)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(
            logprobs,
            entropy,
            old_logprobs=old,
            advantages=advantages,
            loss_weights=weights,
            token_weights=torch.full_like(weights, 1 / 15),
            objective=PPO(clip_low=0.2, clip_high=0.3, dual_clip=2.0),
            entropy_coef=0.3,
            kl=KLTerm(ref, 0.2, k3),
        ).loss

    logprobs = (old + 0.5 * entropy_shift).requires_grad_()
    assert torch.autograd.gradcheck(loss, (logprobs, entropy_shift.clone().requires_grad_()))


@pytest.mark.parametrize(("advantage", "sign"), [(2.0, 1), (-2.0, -1)])
@pytest.mark.parametrize("nats", [-1e4, -20.1, -19.9, -0.3, -0.1, 0.1, 0.3, 1.0, 1.2, 19.9, 20.1, 1e4])
def test_gradients_at_any_ratio_are_bounded_by_default(nats: float, advantage: float, sign: int) -> None:
    """By the settings' bounds: -A ratio where nothing is cut; a gain is cut above 1.2, a loss below 0.8 and above 3."""
    logprobs, one = torch.tensor([nats], requires_grad=True), torch.ones(1)
    out = policy_loss(
        logprobs, None, old_logprobs=torch.zeros(1), advantages=advantage * one, loss_weights=one, token_weights=one,
        objective=PPO(),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    counts = -20 < nats < math.log(1.2) if sign > 0 else math.log(0.8) < nats < math.log(3.0)
    assert gradient.item() == pytest.approx(-advantage * math.exp(nats) if counts else 0.0, rel=1e-6)
    assert abs(gradient.item()) <= 3.0 * abs(advantage)
    assert math.isfinite(out.loss.item())
    assert abs(out.loss.item()) <= 3.0 * abs(advantage)


@pytest.mark.parametrize("objective", [CISPO(cap=1.3), DPPOTV(threshold=0.05, cap=1.4), DPPOKL(threshold=0.01)])
def test_drift_from_the_sampler_is_its_definition(objective: PolicyObjective) -> None:
    """coef * (log p - log q)^2 / 2 of every token, masked and corrected ones too, by loops in float64."""
    g = torch.Generator().manual_seed(3)
    old, moves, noise, advantages = torch.randn(4, 12, generator=g, dtype=torch.float64)
    old, coef = old.exp().neg(), 0.7
    new, sampled = (old + 0.4 * moves).requires_grad_(), old + 0.2 * noise
    weights = torch.where(torch.arange(12) < 10, torch.rand(12, generator=g, dtype=torch.float64), 0.0)
    fields = {
        "old_logprobs": old,
        "advantages": advantages,
        "loss_weights": weights,
        "token_weights": (weights > 0) / 10,
    }
    more = {"objective": objective, "correction": torch.where(moves > 0, 0.0, 0.5)}
    drifting = {"rollout_logprobs": torch.where(weights > 0, sampled, torch.nan), "drift_coef": coef}
    plain, out = policy_loss(new, None, **fields, **more), policy_loss(new, None, **fields, **more, **drifting)
    (before,), (after,) = (torch.autograd.grad(each.loss, new) for each in (plain, out))
    rows = list(zip(weights.tolist(), new.tolist(), sampled.tolist(), strict=True))
    expected = math.fsum(w * coef * (p - q) ** 2 / 2 for w, p, q in rows)
    assert (out.loss - plain.loss).item() == pytest.approx(expected, rel=1e-12)
    pull = torch.tensor([w * coef * (p - q) for w, p, q in rows], dtype=torch.float64)
    torch.testing.assert_close(after - before, pull, rtol=0.0, atol=1e-13)
    assert out.sums["actor/drift"].item() == pytest.approx(math.fsum((p - q) ** 2 / 20 for _, p, q in rows[:10]))
    assert "actor/drift" not in plain.sums
