"""torch in the place of flash-linear-attention on a CPU: transformers' numbers, and no state between sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm, torch_chunk_gated_delta_rule

from mega_rl.parallel.accelerator.patches import patches

HEADS, KEY, VALUE, KERNEL = 3, 5, 7, 4
LENGTHS = (9, 1, 70, 3)  # shorter than the convolution's kernel, and longer than a chunk of the rule
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOLERANCE = 2e-6  # fp32; sums over a batch of sequences may run in another order


@pytest.fixture(scope="module")
def upstream() -> SimpleNamespace:
    """Megatron-Core's module as the patch leaves it; its rule is the one of transformers that it was taken from."""

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return torch_chunk_gated_delta_rule(q, k, v, g, beta)

    module = SimpleNamespace(torch_chunk_gated_delta_rule=rule, HAVE_FLA=False)
    next(patch for patch in patches() if patch.name == "delta_rule_of_torch").apply(module)  # type: ignore[arg-type]
    assert module.HAVE_FLA
    return module


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def inputs(length: int) -> list[Tensor]:
    """Queries, keys, values, logs of decays and strengths of packed tokens."""
    query, key, value = (normal(1, length, HEADS, size) for size in (KEY, KEY + 1, VALUE))
    decay, strength = (normal(1, length, HEADS) for _ in range(2))
    return [query, l2norm(key[..., :KEY]), value, -decay.exp(), strength.sigmoid()]


def differs(packed: Tensor, alone: list[Tensor], leaves: list[Tensor]) -> float:
    """Largest difference of outputs, and of the gradients of their squares."""
    joined = torch.cat(alone, dim=1)
    pairs = [(packed, joined)]
    made, expected = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (packed, joined))
    pairs += list(zip(made, expected, strict=True))
    return max(float(((left - right).abs().max() / right.abs().max()).detach()) for left, right in pairs)


def test_no_state_passes_between_packed_sequences(upstream: SimpleNamespace) -> None:
    """Outputs and gradients of the rule are those of each sequence by itself."""
    leaves = inputs(sum(LENGTHS))
    query, key, value, decay, strength = leaves
    packed, state = upstream.chunk_gated_delta_rule(query, key, value, g=decay, beta=strength, cu_seqlens=BOUNDS)
    assert state is None
    alone = [
        torch_chunk_gated_delta_rule(*rows)[0] for rows in zip(*(x.split(LENGTHS, 1) for x in leaves), strict=True)
    ]
    assert differs(packed, alone, leaves) <= TOLERANCE


def test_the_convolution_sees_one_sequence(upstream: SimpleNamespace) -> None:
    """Outputs and gradients are those of torch's padded convolution of each sequence by itself."""
    tokens, weight = normal(1, sum(LENGTHS), HEADS), normal(HEADS, KERNEL)
    made = torch.nn.Conv1d(HEADS, HEADS, KERNEL, groups=HEADS, padding=KERNEL - 1, bias=False)
    del made.weight
    made.weight = weight[:, None]  # type: ignore[assignment]

    def conv(rows: Tensor) -> Tensor:
        return torch.nn.functional.silu(made(rows.transpose(1, 2))[..., : rows.size(1)]).transpose(1, 2)

    packed, _ = upstream.causal_conv1d(x=tokens, weight=weight, bias=None, activation="silu", cu_seqlens=BOUNDS)
    assert differs(packed, [conv(rows) for rows in tokens.split(LENGTHS, 1)], [tokens, weight]) <= TOLERANCE


def test_rows_without_bounds_are_whole(upstream: SimpleNamespace) -> None:
    """Padded batches come without boundaries; the norm is transformers'."""
    leaves = inputs(30)
    query, key, value, decay, strength = leaves
    made, _ = upstream.chunk_gated_delta_rule(query, key, value, g=decay, beta=strength)
    assert torch.equal(made, torch_chunk_gated_delta_rule(*leaves)[0])
    assert (upstream.l2norm(value) - l2norm(value, dim=-1, eps=1e-6)).abs().max() <= TOLERANCE
