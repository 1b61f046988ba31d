"""Truncated importance sampling against its definition in float64, and what it does to the policy's loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.corrections import TIS
from mega_rl.algorithms.kl import KLController, k2
from mega_rl.algorithms.policy_losses import PPO
from mega_rl.algorithms.statistics import Sequences
from mega_rl.protocols import LossOutput
from mega_rl.types import TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss

ROWS, COLUMNS = 5, 7
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, ENTROPY_COEF, KL_COEF = 0.2, 0.3, 1.5, 0.01, 0.1


def tokens_of(seed: int, *, spread: float = 0.7) -> dict[str, Tensor]:
    """Per-token fields in float64; the first column is off the mask and holds what must not matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

    mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    mask[:, 0] = False
    old = normal(0.5) - 2
    fields = {
        "logprobs": old + normal(0.3),
        "entropy": normal(0.1) + 1,
        "old_logprobs": old,
        "rollout_logprobs": old + normal(spread),
        "ref_logprobs": old + normal(0.2),
        "advantages": normal(1.0),
        "loss_weights": torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64) * mask,
        "token_weights": mask / mask.sum(),
    }
    for name in ("old_logprobs", "rollout_logprobs", "advantages"):
        fields[name][:, 0] = torch.nan
    return fields


def sequences_of(fields: dict[str, Tensor]) -> Sequences:
    return Sequences(row_numbers(fields["token_weights"] > 0), ROWS)


def loss_of(
    fields: dict[str, Tensor], logprobs: Tensor, *, cap: float | None = None, on_policy: bool = False
) -> LossOutput:
    loss = PolicyLoss(
        PPO(CLIP_LOW, CLIP_HIGH, dual_clip=DUAL_CLIP),
        kl=KLController(KL_COEF),
        kl_estimator=k2,
        entropy_coef=ENTROPY_COEF,
        correction=None if cap is None else TIS(cap=cap),
        on_policy=on_policy,
    )
    return loss(TokenOutputs(logprobs=logprobs, entropy=fields["entropy"]), fields, sequences_of(fields))


def definition(fields: dict[str, Tensor], logprobs: Tensor, *, cap: float) -> Tensor:
    """Token by token, with Python's numbers where a number is enough."""
    total = torch.zeros((), dtype=torch.float64)
    for place in itertools.product(range(ROWS), range(1, COLUMNS)):
        new, old, sampler, advantage = (
            logprobs[place], fields["old_logprobs"][place], fields["rollout_logprobs"][place],
            fields["advantages"][place],
        )  # fmt: skip
        weight = min(float(torch.exp(old - sampler)), cap)
        ratio = torch.exp(new - old)
        objective = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        if advantage < 0:
            objective = torch.maximum(objective, DUAL_CLIP * advantage)
        token = -weight * objective
        token = token - ENTROPY_COEF * fields["entropy"][place]
        token = token + KL_COEF * ratio.detach() * 0.5 * (new - fields["ref_logprobs"][place]) ** 2
        total = total + fields["loss_weights"][place] * token
    return total


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0, 1e9])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_definition(seed: int, cap: float) -> None:
    """Only the policy loss is weighted, and no gradient goes through the weights. float64: 1e-12 is its rounding."""
    fields = tokens_of(seed)
    actual, expected = (fields["logprobs"].clone().requires_grad_() for _ in range(2))
    loss = loss_of(fields, actual, cap=cap).loss
    reference = definition(fields, expected, cap=cap)
    (gradient,) = torch.autograd.grad(loss, actual)
    (expected_gradient,) = torch.autograd.grad(reference, expected)
    assert float((loss - reference).abs()) < 1e-12
    assert float((gradient - expected_gradient).abs().max()) < 1e-12
    without = loss_of(fields, fields["logprobs"]).loss
    assert float((loss - without).abs()) > 1e-3  # it is a correction at all


@pytest.mark.parametrize("cap", [1.0, 2.0])
@pytest.mark.parametrize("on_policy", [False, True])
def test_where_the_policies_agree_nothing_changes(cap: float, on_policy: bool) -> None:
    """To the bit, in loss, gradient and metrics; with `on_policy` the old log-probs are those of the forward."""
    fields = {name: field.float() for name, field in tokens_of(4).items()}
    fields["rollout_logprobs"] = fields["logprobs"].clone() if on_policy else fields["old_logprobs"].clone()
    outputs = []
    for bound in (None, cap):
        logprobs = fields["logprobs"].clone().requires_grad_()
        out = loss_of(fields, logprobs, on_policy=on_policy, cap=bound)
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        outputs.append((out, gradient))
    (plain, plain_gradient), (corrected, gradient) = outputs
    assert torch.equal(plain.loss, corrected.loss)
    assert torch.equal(plain_gradient, gradient)
    extra = {
        "actor/correction_weight_mean": 1.0,
        "actor/correction_masked_fraction": 0.0,
        "actor/tis_truncated_fraction": 0.0,
    }
    assert {name: float(v) for name, v in corrected.sums.items()} == pytest.approx(
        {name: float(v) for name, v in plain.sums.items()} | extra, rel=1e-6, abs=0
    )


def test_on_policy_corrects_from_the_forward_at_hand() -> None:
    """The old log-probs of the fields are the rollout's stand-ins then, and say nothing."""
    fields = tokens_of(5)
    right = loss_of({**fields, "old_logprobs": fields["logprobs"]}, fields["logprobs"], cap=2.0).loss
    fields["old_logprobs"] = fields["rollout_logprobs"]
    assert torch.equal(loss_of(fields, fields["logprobs"], cap=2.0, on_policy=True).loss, right)
