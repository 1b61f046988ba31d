"""Attention of packed sequences: the fused kernel of cuDNN by its arguments, and what the unfused path asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.fake_te import enums

Layout, Mask, Bias = enums.NVTE_QKV_Layout, enums.NVTE_Mask_Type, enums.NVTE_Bias_Type
Softmax, Backend, DType = enums.NVTE_Softmax_Type, enums.NVTE_Fused_Attn_Backend, enums.DType


def get_fused_attn_backend(is_training: bool, q_dtype: Any, kv_dtype: Any, *_: Any) -> Any:
    """Return the kernel that takes these: cuDNN's has 16-bit numbers alone."""
    here = q_dtype == kv_dtype and q_dtype in (DType.kFloat16, DType.kBFloat16)  # type: ignore[attr-defined]
    return Backend.NVTE_F16_arbitrary_seqlen if here else Backend.NVTE_No_Backend  # type: ignore[attr-defined]


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias_: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Return [context [T, heads, E], log-sum-exp [T, heads, 1] float32, random state] of packed q, k and v."""
    _check(qkv_layout, bias_type, attn_mask_type, softmax_type, p_dropout, Bias_, SoftmaxOffset, s_quantizer)
    _check_lengths(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    out = Q.new_zeros(*Q.shape[:-1], V.size(-1))
    lse = torch.zeros(*Q.shape[:-1], 1)
    for q, k in _spans(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        scores = _scores(Q[q].float(), K[k].float(), attn_scale, attn_mask_type, window_size)
        values = _heads(V[k].float(), Q.size(1))
        out[q] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), values).to(out.dtype)
        lse[q] = scores.logsumexp(-1).T[:, :, None]
    return [out, lse, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    fake_dtype: Any,
    dqkv_type: Any,
    Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients [of q, of k, of v, of a bias, of softmax offsets], from the saved log-sum-exp."""
    _check(qkv_layout, bias_type, attn_mask_type, softmax_type, p_dropout, None, None, s_quantizer)
    grads = [torch.zeros_like(x) for x in (Q, K, V)]
    lse = Aux_CTX_Tensors[0]
    for q, k in _spans(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        queries, keys, values = Q[q].float(), K[k].float(), _heads(V[k].float(), Q.size(1))
        scores = _scores(queries, keys, attn_scale, attn_mask_type, window_size)
        weights = (scores - lse[q, :, 0].T[:, :, None]).exp()
        grad = dO[q].float()
        of_weights = torch.einsum("qhe,khe->hqk", grad, values)
        mean = (grad * O[q].float()).sum(-1).T[:, :, None]
        of_scores = weights * (of_weights - mean) * attn_scale
        grads[0][q] = torch.einsum("hqk,khd->qhd", of_scores, _heads(keys, Q.size(1))).to(Q.dtype)
        grads[1][k] = _groups(torch.einsum("hqk,qhd->khd", of_scores, queries), K.size(1)).to(K.dtype)
        grads[2][k] = _groups(torch.einsum("hqk,qhe->khe", weights, grad), V.size(1)).to(V.dtype)
    return [*grads, None, None]


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Return [B, S, heads, D], zeros behind each sequence, of packed [T, heads, D]."""
    out = tensor.new_zeros(b, int(max_seq_len), *tensor.shape[1:])
    for row, (begin, end) in enumerate(_pairs(cu_seqlens)):
        out[row, : end - begin] = tensor[begin:end]
    return out


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Return packed [T, heads, D] of [B, S, heads, D]."""
    out = tensor.new_zeros(int(t), *tensor.shape[2:])
    for row, (begin, end) in enumerate(_pairs(cu_seqlens)):
        out[begin:end] = tensor[row, : end - begin]
    return out


def _check(layout: Any, bias: Any, mask: Any, softmax: Any, dropout: float, *absent: Any) -> None:
    """Refuse what the kernel of this stand-in does not compute."""
    assert layout == Layout.NVTE_THD_THD_THD, layout  # type: ignore[attr-defined]
    assert bias == Bias.NVTE_NO_BIAS, bias  # type: ignore[attr-defined]
    assert softmax == Softmax.NVTE_VANILLA_SOFTMAX, softmax  # type: ignore[attr-defined]
    assert dropout == 0.0
    assert mask in (Mask.NVTE_PADDING_CAUSAL_MASK, Mask.NVTE_PADDING_MASK), mask  # type: ignore[attr-defined]
    assert all(each is None for each in absent)


def _check_lengths(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_q: int, max_kv: int) -> None:
    for bounds, longest in ((cu_seqlens_q, max_q), (cu_seqlens_kv, max_kv)):
        assert bounds.dtype == torch.int32
        assert int(bounds.diff().max()) <= longest, f"a sequence is longer than max_seqlen={longest}"


def _spans(q: Tensor, kv: Tensor, q_padded: Tensor | None, kv_padded: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each sequence among queries and among keys; padded bounds say where they begin."""
    yield from zip(_rows(q, q_padded), _rows(kv, kv_padded), strict=True)


def _rows(bounds: Tensor, padded: Tensor | None) -> list[slice]:
    begins = (bounds if padded is None else padded)[:-1].tolist()
    return [slice(begin, begin + length) for begin, length in zip(begins, bounds.diff().tolist(), strict=True)]


def _pairs(bounds: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds.tolist()))


def _scores(q: Tensor, k: Tensor, scale: float, mask: Any, window: tuple[int, int]) -> Tensor:
    """[heads, queries, keys] scores of a sequence, -inf where a query may not look."""
    scores = torch.einsum("qhd,khd->hqk", q, _heads(k, q.size(1))) * scale
    behind = torch.arange(len(q))[:, None] - torch.arange(len(k))[None, :]
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if mask == Mask.NVTE_PADDING_CAUSAL_MASK:  # type: ignore[attr-defined]
        hidden |= behind < 0
    if window[0] >= 0:
        hidden |= behind > window[0]
    return scores.masked_fill(hidden, -torch.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.size(1), dim=1)


def _groups(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).sum(2)
