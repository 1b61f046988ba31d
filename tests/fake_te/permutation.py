"""Transformer Engine's Triton kernels of a mixture, by the names and arguments of `transformer_engine.pytorch.triton`.

A row map has a row per token and 2 E + 1 columns, of which the first E say the row of the token among those of each
expert, or -1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the row map of [n, E] choices: rows go by expert, and by token within an expert."""
    chosen = routing_map.bool()
    assert chosen.shape == (num_tokens, num_experts)
    rows = chosen.T.flatten().cumsum(0).view(num_experts, num_tokens).T - 1
    rest = torch.zeros(num_tokens, num_experts + 1, dtype=torch.int32)
    return torch.cat([torch.where(chosen, rows, -1).int(), rest], dim=1)


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, None, Tensor | None]:
    """Return (rows [num_out_tokens, H] by expert, None, their weights) of tokens [n, H] with weights [n, E]."""
    assert scale is None
    token, expert, row = _places(row_id_map, num_experts)
    out = inp.new_zeros(num_out_tokens, hidden_size)
    out[row] = inp[token]
    if probs is None:
        return out, None, None
    weights = probs.new_zeros(num_out_tokens)
    weights[row] = probs[token, expert]
    return out, None, weights


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return (sums [n, H] over each token's rows, weighted by [n, E], and row weights as [n, E]); added in FP32."""
    token, expert, row = _places(row_id_map, num_experts)
    parts = inp[row].float()
    if merging_probs is not None:
        parts = parts * merging_probs[token, expert].float()[:, None]
    out = torch.zeros(num_tokens, hidden_size).index_add_(0, token, parts).to(inp.dtype)
    if permuted_probs is None:
        return out, None
    weights = permuted_probs.new_zeros(num_tokens, num_experts)
    weights[token, expert] = permuted_probs[row]
    return out, weights


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of merging weights."""
    token, expert, row = _places(row_id_map, num_experts)
    grad = fwd_output_grad[token].float()
    rows = fwd_input.new_zeros(num_out_tokens, hidden_size)
    rows[row] = (grad * merging_probs[token, expert].float()[:, None]).to(rows.dtype)
    weights = torch.zeros_like(merging_probs)
    weights[token, expert] = (grad * fwd_input[row].float()).sum(-1).to(weights.dtype)
    return rows, weights


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Return [n] int32, the new row of each when the chunks stand in the order of `sorted_indices`."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    order = torch.cat([chunks[index] for index in sorted_indices.tolist()])
    rows = torch.empty(num_tokens, dtype=torch.int32)
    rows[order] = torch.arange(num_tokens, dtype=torch.int32)
    return rows


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Return rows [n, H] and their weights [n] at their new places, or back at their old ones."""
    rows = row_id_map.long()
    source = rows.argsort() if is_forward else rows
    return inp[source], None if probs is None else probs[source]


def _places(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, experts, rows) of all choices, [n * k] each."""
    rows = row_id_map[:, :num_experts].long()
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    return token, expert, rows[token, expert]
