"""Aggregate the losses of single tokens into one number.

Every aggregation is a weighted sum: loss = sum over all ranks and micro-batches of weight * token_loss. The
denominators are those of the whole mini-batch, counted before the backward, so neither the loss nor its gradient
depends on how the rows are spread over ranks or cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Numbers of the global mini-batch, at least 1 each, that a token's loss is divided by."""

    tokens: float  # N: response tokens
    sequences: float  # M: rows that have response tokens
    max_response_tokens: int  # L
    of_prompts: Tensor | None = None  # [B, 1] float64: P prompts with tokens * n_prompt of the row's prompt


# (response tokens of each row [B, 1] float64, at least 1; denominators) -> weight of the row's tokens [B, 1] float64
Aggregation = Callable[[Tensor, Denominators], Tensor]

# Weights, n_row response tokens of the row. token-mean: every token counts the same, Yu et al. 2025 (DAPO),
# arXiv:2503.14476, section 3.3. seq-mean-token-mean: every sequence does, Shao et al. 2024 (GRPO), arXiv:2402.03300,
# eq. 3. seq-mean-token-sum: a sequence counts by its length; -norm: over a constant length, Liu et al. 2025 (Dr. GRPO),
# arXiv:2503.20783, section 3.2. prompt-mean: every prompt counts the same, Khatri et al. 2025, arXiv:2510.13786.
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": lambda n_row, over: torch.full_like(n_row, 1.0 / over.tokens),
    "seq-mean-token-mean": lambda n_row, over: 1.0 / (over.sequences * n_row),
    "seq-mean-token-sum": lambda n_row, over: torch.full_like(n_row, 1.0 / over.sequences),
    "seq-mean-token-sum-norm": lambda n_row, over: torch.full_like(
        n_row, 1.0 / (over.sequences * over.max_response_tokens)
    ),
    "prompt-mean": lambda n_row, over: 1.0 / _given(over.of_prompts),
}


def _given(of_prompts: Tensor | None) -> Tensor:
    assert of_prompts is not None, "a mean over prompts needs the tokens of each prompt"
    return of_prompts


def token_and_sequence_counts(mask: Tensor) -> Tensor:
    """Return [2] float64: response tokens, and rows that have any; its sum over data parallel has the global counts."""
    per_row = mask.sum(dim=1)
    return torch.stack([per_row.sum(), (per_row > 0).sum()]).double()


def loss_weights(
    mask: Tensor,
    aggregation: Aggregation,
    *,
    global_tokens: float,
    global_sequences: float,
    max_response_tokens: int,
    prompt_index: Tensor | None = None,
    prompt_tokens: Tensor | None = None,
) -> Tensor:
    """Return the weight of each token's loss in the mini-batch's loss; [B, S] float32, 0 off the mask.

    mask [B, S] bool; this rank's rows, which must hold whole responses. A row without response tokens weighs 0.
    global_tokens and global_sequences are the sums of `token_and_sequence_counts` over the whole mini-batch. A mean
    over prompts needs prompt_index [B] int64, and prompt_tokens [prompts] float64 of the whole mini-batch.
    """
    row_tokens = mask.sum(dim=1, keepdim=True).double().clamp(min=1.0)
    over = Denominators(max(global_tokens, 1.0), max(global_sequences, 1.0), max_response_tokens)
    if prompt_tokens is not None:
        over = replace(over, of_prompts=((prompt_tokens > 0).sum() * prompt_tokens[prompt_index, None]).clamp(min=1.0))
    return torch.where(mask, aggregation(row_tokens, over), 0.0).to(torch.float32)
