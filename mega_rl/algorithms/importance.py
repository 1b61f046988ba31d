"""Importance weights of the trainer's policy to what sampled the tokens, measured whether or not a loss uses them.

    token:     w = pi / pi_rollout
    response:  W = prod w           geometric mean: W^(1 / tokens)
    effective share of n weights:   (sum w)^2 / (n sum w^2)         Kish 1965: 1 where all are equal, 1/n at worst
    k3:        mean(w - 1 - log w), an estimate of KL(rollout || trainer)
    chi2:      mean((w - 1)^2), an estimate of chi^2(trainer || rollout)

Log ratios, also of whole responses, are bounded by +-20 nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.kl import LOG_RATIO_LIMIT

IMPORTANCE_SIZE = 15


def importance_summary(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return [IMPORTANCE_SIZE] float64: sums and extremes over this rank's tokens and responses.

    logprobs, rollout_logprobs: [B, S] floating, of the trainer and of what sampled; mask: [B, S] bool.
    """
    mask = mask.cpu()
    rows = mask.any(dim=1)
    if not rows.any():
        return torch.zeros(IMPORTANCE_SIZE, dtype=torch.float64)
    trainer, rollout = (torch.where(mask, x.cpu().double(), 0.0) for x in (logprobs, rollout_logprobs))
    log_ratio = trainer - rollout
    tokens = log_ratio[mask].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weights, distance = tokens.exp(), torch.expm1(tokens)
    response = log_ratio.sum(dim=1)[rows]
    geometric = (response / mask.sum(dim=1)[rows]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    products = response.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    numbers = [
        mask.sum(), trainer.sum(), rollout.sum(), weights.sum(), weights.square().sum(),
        (distance - tokens).sum(), distance.square().sum(), weights.min(), weights.max(),
        rows.sum(), products.sum(), products.square().sum(), products.max(), geometric.min(), geometric.max(),
    ]  # fmt: skip
    return torch.stack([number.double() for number in numbers])


def importance_metrics(summaries: Tensor) -> dict[str, float]:
    """Return the numbers over all ranks from each one's summary, [ranks, IMPORTANCE_SIZE]; empty without tokens."""
    filled = summaries[summaries[:, 0] > 0]
    if not len(filled):
        return {}
    tokens, trainer, rollout, weights, squares, k3, chi2, _, _, rows, products, product_squares = (
        filled[:, :12].sum(dim=0).tolist()
    )
    least, geometric_least = filled[:, 7].min(), filled[:, 13].min()
    most, product_most, geometric_most = filled[:, [8, 12, 14]].max(dim=0).values.tolist()
    return {
        "importance/weight_min": float(least),
        "importance/weight_max": most,
        "importance/weight_mean": weights / tokens,
        "importance/effective_fraction": weights**2 / (tokens * squares),
        "importance/k3": k3 / tokens,
        "importance/chi2": chi2 / tokens,
        "importance/response_weight_mean": products / rows,
        "importance/response_weight_max": product_most,
        "importance/response_effective_fraction": products**2 / (rows * product_squares),
        "importance/response_geometric_min": float(geometric_least),
        "importance/response_geometric_max": geometric_most,
        "importance/trainer_perplexity": _perplexity(trainer / tokens),
        "importance/rollout_perplexity": _perplexity(rollout / tokens),
    }


def _perplexity(mean_logprob: float) -> float:
    return float(torch.tensor(-mean_logprob, dtype=torch.float64).exp())
