"""Loss of the critic, and the share of the returns' variance that it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import SumOverRanks, global_moments, identity
from mega_rl.protocols import LossOutput


def clipped_value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    token_weights: Tensor,
    value_clip: float,
) -> LossOutput:
    """Return the critic's loss on one micro-batch, a share of the mini-batch's.

        near = old + clip(V - old, -value_clip, value_clip)
        loss = sum w * max((V - R)^2, (near - R)^2) / 2

    w is `token_weights`, 1 / (tokens of the global mini-batch): the mean over tokens, whatever aggregation the policy's
    loss has, whose scale would otherwise be the critic's too (that of a sum over a response is hundreds of times
    larger, and its gradient always clipped). All tensors share one shape, packed or padded; float32. value_clip 0 turns
    the clipping off. Values where `token_weights` is 0 touch neither loss nor gradient.

    sums: critic/loss; critic/clip_fraction (tokens whose gradient the clip cut off),
    critic/value_mean, critic/return_mean, token means. maxima: critic/error_max, the largest |V - R|.
    Source: Schulman et al. 2016, arXiv:1506.02438, section 5; the clip: OpenAI baselines, ppo2.
    """
    active = token_weights > 0
    values = torch.where(active, values, 0.0)
    old_values = torch.where(active, old_values, 0.0)
    returns = torch.where(active, returns, 0.0)

    error = (values - returns).square()
    clip_fraction = torch.zeros((), dtype=torch.float32, device=values.device)
    if value_clip > 0.0:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        near_error = (near - returns).square()
        # The distance is tested too: inside the clip the two errors may differ by a rounding.
        cut = (near_error > error) & ((values - old_values).abs() > value_clip)
        clip_fraction = (token_weights * cut).sum()
        token_loss = 0.5 * torch.maximum(error, near_error)
    else:
        token_loss = 0.5 * error
    loss = (token_weights * token_loss).sum()
    sums = {
        "critic/loss": loss.detach(),
        "critic/clip_fraction": clip_fraction.detach(),
        "critic/value_mean": (token_weights * values).sum().detach(),
        "critic/return_mean": (token_weights * returns).sum().detach(),
    }
    return LossOutput(loss=loss, sums=sums, maxima={"critic/error_max": error.max().sqrt().detach()})


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity
) -> Tensor:
    """Return 1 - Var[returns - values] / Var[returns] over the global batch, scalar float64; at most 1.

    values, returns [B, S] float32; mask [B, S] bool. 1 is a perfect critic, 0 one no better than a constant. Where all
    returns are equal (variance 0) the ratio has no meaning and the result is 0.
    """
    error = global_moments(returns.double() - values.double(), mask, sum_over_ranks=sum_over_ranks)
    target = global_moments(returns, mask, sum_over_ranks=sum_over_ranks)
    has_spread = target.variance > 0
    ratio = error.variance / torch.where(has_spread, target.variance, 1.0)
    return torch.where(has_spread, 1.0 - ratio, 0.0)
