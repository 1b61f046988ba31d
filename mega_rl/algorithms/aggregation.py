"""How the losses of single tokens become one number.

Every mode is a weighted sum: loss = sum over all ranks and micro-batches of weight * token_loss. The denominators are
those of the whole mini-batch, counted before the backward, so neither the loss nor its gradient depends on how the rows
are spread over ranks or cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.errors import UserError


def token_and_sequence_counts(mask: Tensor) -> Tensor:
    """[2] float64: response tokens, and rows that have any; sum it over data parallel to get the global counts."""
    per_row = mask.sum(dim=1)
    return torch.stack([per_row.sum(), (per_row > 0).sum()]).double()


def loss_weights(
    mask: Tensor, mode: str, *, global_tokens: float, global_sequences: float, max_response_tokens: int
) -> Tensor:
    """Weight of each token's loss in the mini-batch's loss; [B, S] float32, 0 off the mask.

        token-mean             1 / N                 every token counts the same
        seq-mean-token-mean    1 / (M * n_row)       every sequence counts the same (GRPO)
        seq-mean-token-sum     1 / M                 a sequence counts as much as it is long
        seq-mean-token-sum-norm  1 / (M * L)         the same, scaled by a constant length (Dr. GRPO)

    N = global_tokens and M = global_sequences count the response tokens of the whole mini-batch and its rows that have
    any (see token_and_sequence_counts); n_row is the row's number of response tokens; L = max_response_tokens.
    mask [B, S] bool; this rank's rows, which must hold whole responses. A row without response tokens weighs 0.
    Raises UserError on another mode. Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3 (token-mean);
    Shao et al. 2024, arXiv:2402.03300, eq. 3; Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    per_row = mask.sum(dim=1, keepdim=True).double().clamp(min=1.0)
    tokens, sequences = max(global_tokens, 1.0), max(global_sequences, 1.0)
    if mode == "token-mean":
        row_weight = torch.full_like(per_row, 1.0 / tokens)
    elif mode == "seq-mean-token-mean":
        row_weight = 1.0 / (sequences * per_row)
    elif mode == "seq-mean-token-sum":
        row_weight = torch.full_like(per_row, 1.0 / sequences)
    elif mode == "seq-mean-token-sum-norm":
        row_weight = torch.full_like(per_row, 1.0 / (sequences * max_response_tokens))
    else:
        legal = "token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm"
        raise UserError(f"loss_aggregation={mode!r}: must be one of {legal}")
    return torch.where(mask, row_weight, 0.0).to(torch.float32)
