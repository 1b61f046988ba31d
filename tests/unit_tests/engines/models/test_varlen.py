"""Arguments of torch's attention of variable lengths, against a kernel that does what its documentation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit_tests.engines.models.attention_cases import (
    DIM,
    HEADS,
    Variant,
    core_attention,
    inputs,
    packed,
    reference,
)

LENGTHS = (1, 9, 4, 17)


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """`varlen_attn` written out: [T_q, H_q, D] in sequences, (W, 0) seeing W tokens before each and itself."""
    assert query.size(-1) == key.size(-1) == value.size(-1), "the kernel knows one size of heads"
    assert enable_gqa or query.size(1) == key.size(1), "heads in groups have to be announced"
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    left, right = window_size
    assert right == 0, "causal"
    contexts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (behind < 0) | (behind > (len(q) if left < 0 else left))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        contexts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(contexts)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel could run here."""
    from mega_rl.engines.models import attention, attention_kernels

    monkeypatch.setattr(attention_kernels, "varlen_attn", documented)
    monkeypatch.setattr(attention, "fits_varlen", lambda query, value, sinks: sinks is None)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(groups=2),
        Variant(groups=1, window=3),
        Variant(groups=2, scale=0.3),
        Variant(value_dim=DIM - 3),
        Variant(groups=2, window=30),
    ],
    ids=str,
)
def test_the_kernel_is_given_the_right_arguments(variant: Variant) -> None:
    """Groups, windows, scales and narrow values: the written-out attention to rounding of fp64, gradients as well."""
    module = core_attention(variant, layer=1)
    *given, grad = inputs(LENGTHS, variant)
    context = packed(module, LENGTHS, *given)
    expected = reference(LENGTHS, *given, variant)
    assert (context - expected).abs().max() < 1e-12
    ours, theirs = (torch.autograd.grad(each, given, grad) for each in (context, expected))
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(ours, theirs, strict=True))


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision on a GPU, heads of at most 256 in eights, values no wider than queries, no sinks."""
    from mega_rl.engines.models import attention_kernels

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def fits(
        wide: int, value: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", sinks: Any = None
    ) -> bool:
        query, values = (Like(dtype, torch.device(device), (5, 4, size)) for size in (wide, value))
        return attention_kernels.fits_varlen(query, values, sinks)  # type: ignore[arg-type]

    assert fits(128, 128)
    assert fits(192, 128)
    assert not fits(128, 192)
    assert not fits(264, 264)
    assert not fits(20, 20)
    assert not fits(128, 128, dtype=torch.float32)
    assert not fits(128, 128, device="cpu")
    assert not fits(128, 128, sinks=torch.zeros(4))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not fits(128, 128)


class Like:
    """A tensor as far as the choice looks at it."""

    def __init__(self, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> None:
        self.dtype, self.device, self.shape = dtype, device, shape

    def size(self, dimension: int) -> int:
        return self.shape[dimension]


@pytest.mark.usefixtures("on_cuda")
def test_eager_and_sinks_go_by_length_classes() -> None:
    """What is written out stays so, and sinks have no place in the kernel."""
    for variant in (Variant(kernel="eager"), Variant(sinks=True)):
        module = core_attention(variant)
        *given, _ = inputs(LENGTHS, variant)
        expected = reference(LENGTHS, *given, variant, module.softmax_offset)
        assert (packed(module, LENGTHS, *given) - expected).abs().max() < 1e-12
    assert HEADS == 4
