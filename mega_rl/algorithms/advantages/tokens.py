"""Response tokens of rows: their order, the last of each row, and the rewards that stand on them.

The response tokens of a row need not be adjacent: between two turns of a conversation stand tokens that the policy did
not sample, such as a tool's answer. They are off the mask and no steps of the policy, so the successor of a response
token is the next response token of its row. Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def response_order(mask: Tensor) -> Tensor:
    """[B, S] int64, the columns of each row with response tokens first, otherwise in their order.

    `x.gather(1, order)` puts the response tokens of a row next to each other, `zeros.scatter(1, order, y)` puts them
    back.
    """
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return torch.argsort(~mask, dim=1, stable=True)


def last_response_token(mask: Tensor) -> Tensor:
    """[B, S] bool, True on the last response token of each row; a row without a response has none."""
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def token_rewards(rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Per-token rewards [B, S] float32: the score on the last response token, minus the KL penalty of each token.

        r_t = score * [t is the last response token] - kl_penalty_t

    rewards [B] float32; mask [B, S] bool; kl_penalty [B, S] float32, the coefficient times log(policy / reference). The
    score of a row without response tokens has no token to stand on and is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl_penalty is not None:
        out = out - torch.where(mask, kl_penalty, 0.0)
    return out


def length_adaptive_lambda(mask: Tensor, *, alpha: float) -> Tensor:
    """[B, 1] float64, a lambda for each row, whose weights of TD errors sum to alpha times the response's length.

        lambda = 1 - 1 / (alpha * l), at least 0      since sum of lambda^t over t = 0, 1, ... is 1 / (1 - lambda)

    mask [B, S] bool; l the row's response tokens. A constant lambda of 0.95 forgets the score within some 60 tokens.
    Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, where alpha is 0.05.
    """
    lengths = mask.sum(dim=1, keepdim=True).double().clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)
