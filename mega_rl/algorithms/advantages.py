"""Advantage estimators: from rewards (and values) to a number for each response token.

Every [B, S] tensor is aligned to the token it speaks of (see mega_rl.types); `mask` is the loss mask, True on response
tokens, which form one contiguous run per row. Everything off the mask is ignored on input and 0 on output.
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_response_token(mask: Tensor) -> Tensor:
    """[B, S] bool, True on response tokens that no response token follows: one in each row with a response."""
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    following = torch.zeros_like(mask)
    following[:, :-1] = mask[:, 1:]
    return mask & ~following


def _is_one_run(mask: Tensor) -> bool:
    return bool((last_response_token(mask).sum(dim=1) <= 1).all())


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coef: float = 0.0) -> Tensor:
    """Per-token rewards [B, S] float32: the score on the last response token, minus the KL penalty of each token.

        r_t = score * [t is the last response token] - kl_coef * kl_t

    rewards [B] float32; mask [B, S] bool; kl [B, S] float32, any estimate of log(policy / reference). The score of a
    row without response tokens has no token to stand on and is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    assert _is_one_run(mask), "response tokens must form one contiguous run per row"
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl is not None:
        out = out - kl_coef * torch.where(mask, kl, 0.0)
    return out


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages, returns), both [B, S] float32, 0 off the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    token_rewards, values [B, S] float32; mask [B, S] bool. V_t is the value just before token t is emitted; after the
    last response token both V and A are 0: a response ends the episode, also one cut off by length.

    The recursion runs as a doubling scan, ceil(log2 S) vector steps instead of S: after step k each position holds the
    discounted sum of its next 2^k deltas. Padding a row further adds exact zeros, so the result does not depend on S.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    assert _is_one_run(mask), "response tokens must form one contiguous run per row"
    rewards = torch.where(mask, token_rewards.to(torch.float32), 0.0)
    values = torch.where(mask, values.to(torch.float32), 0.0)
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    advantages = torch.where(mask, rewards + gamma * next_values - values, 0.0)
    decay, span, length = gamma * lam, 1, mask.shape[1]
    while span < length:
        later = torch.zeros_like(advantages)
        later[:, :-span] = advantages[:, span:]
        advantages = advantages + decay**span * later
        span *= 2
    # Prompt positions before the run have gathered the run's discounted sum; they are no part of the answer.
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def grpo(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, std_normalization: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        A_i = (r_i - mean(group)) / (std(group) + eps)      std_normalization
        A_i =  r_i - mean(group)                            otherwise (Dr. GRPO)

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank; mask [B, S] bool.
    The standard deviation is the unbiased one (divided by n - 1), as in the implementations that published results
    come from; the population's would scale every advantage by sqrt(n / (n - 1)). A group whose rewards are all equal,
    hence also a group of one, gives exactly 0: rounding of the mean must not be blown up by a division by eps. A row
    without response tokens, as a failed sample has none, is in no group: it changes neither mean, deviation nor n.
    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, section 3.2.
    """
    ids, group = torch.unique(group_ids, return_inverse=True)
    answered = mask.any(dim=1)
    scores = torch.where(answered, rewards.double(), 0.0)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(ids.shape, dtype=torch.float64, device=x.device).index_add(0, group, x)

    def group_extreme(how: str, *, absent: float) -> Tensor:
        out = torch.zeros(ids.shape, dtype=torch.float64, device=scores.device)
        present = torch.where(answered, scores, absent)
        return out.scatter_reduce(0, group, present, reduce=how, include_self=False)

    counts = group_sum(answered.double())
    centred = torch.where(answered, scores - (group_sum(scores) / counts.clamp(min=1))[group], 0.0)
    if std_normalization:
        variance = group_sum(centred.square()) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    constant = (group_extreme("amax", absent=-torch.inf) == group_extreme("amin", absent=torch.inf))[group]
    advantages = torch.where(constant, 0.0, centred).to(torch.float32)
    return torch.where(mask, advantages[:, None], 0.0)
