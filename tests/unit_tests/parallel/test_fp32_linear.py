"""A bf16 linear map with a float32 result against float64: values and both gradients.

Tolerances: float32 sums of up to 300 terms round at some 1e-6 of the result's size. Gradients are rounded to bf16 once,
by at most 2^-8 of each element, and by what the sums have lost before. Two bf16 parts of a gradient lose 2^-17 of each
of its elements at most.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.parallel import vocab as module
from mega_rl.parallel.vocab import fp32_linear, parts


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [7, 2, 48] and weight [301, 48] in bf16, and a float32 gradient of the logits."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 2, 48, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(301, 48, generator=generator) / 3).bfloat16().requires_grad_()
    return hidden, weight, torch.randn(7, 2, 301, generator=generator) * torch.rand(7, 2, 1, generator=generator)


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("split", [False, True])
def test_values_and_gradients_equal_float64(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by float32 products, and by those of bf16 parts as on a GPU."""
    monkeypatch.setattr(module, "parts", lambda grad, split, original=parts, how=split: original(grad, split=how))
    hidden, weight, grad = inputs()
    logits = fp32_linear(hidden, weight)
    exact = hidden.detach().double() @ weight.detach().double().T
    assert logits.dtype == torch.float32
    assert relative(logits.detach(), exact) < 1e-6
    rounded = hidden.detach() @ weight.detach().T
    assert relative(rounded, exact) > 1000 * relative(logits.detach(), exact)
    logits.backward(grad)
    assert hidden.grad is not None
    assert weight.grad is not None
    flat = grad.double().flatten(0, 1)
    of_hidden = (flat @ weight.detach().double()).view_as(hidden)
    of_weight = flat.T @ hidden.detach().double().flatten(0, 1)
    for value, expected in ((hidden.grad, of_hidden), (weight.grad, of_weight)):
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), expected, rtol=2**-7.9, atol=1e-4)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_does_not_train_has_no_gradient(frozen: str) -> None:
    hidden, weight, grad = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    fp32_linear(hidden, weight).backward(grad)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_tokens_of_other_ranks_are_gathered_and_gradients_reduced() -> None:
    """With stand-ins for two ranks that have equal tokens: twice the rows, and this rank's half of their gradient."""
    hidden, weight, grad = inputs()
    logits = fp32_linear(
        hidden, weight, gather=lambda x: torch.cat([x, x]), reduce=lambda g: g[: len(hidden)] + g[len(hidden) :]
    )
    logits.backward(torch.cat([grad, 2 * grad]))
    twin, twin_weight, _ = inputs()
    fp32_linear(twin, twin_weight).backward(3 * grad)
    assert hidden.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(hidden.grad, twin.grad, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(weight.grad, twin_weight.grad, rtol=2**-7, atol=1e-4)
