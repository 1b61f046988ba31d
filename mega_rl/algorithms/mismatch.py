"""Mismatch between log-probs of the trainer and of the sampling engine, and importance weights.

The weights of the trainer's policy to what sampled the tokens are measured whether or not a loss uses them:

    token:     w = pi / pi_rollout
    response:  W = prod w           geometric mean: W^(1 / tokens)
    effective share of n weights:   (sum w)^2 / (n sum w^2)         Kish 1965: 1 where all are equal, 1/n at worst
    k3:        mean(w - 1 - log w), an estimate of KL(rollout || trainer)
    chi2:      mean((w - 1)^2), an estimate of chi^2(trainer || rollout)

Log ratios, also of whole responses, are bounded by +-20 nats.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from mega_rl.algorithms.kl import LOG_RATIO_LIMIT

LARGE = 1.0  # nats
IMPORTANCE_SIZE = 15


@dataclass(frozen=True)
class LogprobMismatch:
    """|trainer - rollout| log-prob over some tokens, and the token where it is largest."""

    sum: float  # nats, over all tokens
    count: int  # tokens
    max: float  # nats; a difference that is not a number counts as infinite
    prompt_index: int = -1  # the worst token's; -1 when there are no tokens
    sample_index: int = -1
    position: int = -1  # column of the worst token in its row: prompt, then response
    token_id: int = -1
    rollout_logprob: float = 0.0
    trainer_logprob: float = 0.0
    large: int = 0  # tokens with a difference of LARGE or more

    @property
    def mean(self) -> float:
        """Return the mean difference in nats; 0 without tokens."""
        return self.sum / self.count if self.count else 0.0

    @property
    def share_of_large(self) -> float:
        """Return the share of tokens with a difference of `LARGE` or more; 0 without tokens."""
        return self.large / self.count if self.count else 0.0

    def metrics(self) -> dict[str, float]:
        """Return `rollout/logprob_diff_max`, `_mean` and `_large_fraction`."""
        numbers = {"max": self.max, "mean": self.mean, "large_fraction": self.share_of_large}
        return {f"rollout/logprob_diff_{name}": number for name, number in numbers.items()}

    def describe_worst(self) -> str:
        """Describe the worst token, for the message that stops a run."""
        return (
            f"token id {self.token_id} at position {self.position} of prompt_index={self.prompt_index}, "
            f"sample_index={self.sample_index}: rollout log-prob {self.rollout_logprob:.6g}, trainer log-prob "
            f"{self.trainer_logprob:.6g}, difference {self.max:.6g} nats"
        )

    def pack(self) -> Tensor:
        """Return the fields, [10] float64, for `combine`."""
        return torch.tensor(astuple(self), dtype=torch.float64)


def logprob_mismatch(
    rollout_logprobs: Tensor,
    trainer_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    tokens: Tensor,
    prompt_index: Tensor,
    sample_index: Tensor,
) -> LogprobMismatch:
    """Return the mismatch over the masked tokens of one rank.

    rollout_logprobs, trainer_logprobs: [B, S] floating; loss_mask: [B, S] bool; tokens: [B, S] int64; prompt_index,
    sample_index: [B] int64. The first of several equal differences, row by row, is the worst token.
    """
    rows, columns = loss_mask.nonzero(as_tuple=True)
    if not len(rows):
        return LogprobMismatch(sum=0.0, count=0, max=0.0)
    difference = (trainer_logprobs[rows, columns].double() - rollout_logprobs[rows, columns].double()).abs()
    difference = torch.where(difference.isnan(), torch.inf, difference)
    worst = int(difference.argmax())
    row, column = int(rows[worst]), int(columns[worst])
    return LogprobMismatch(
        sum=float(difference.sum()),
        count=len(rows),
        max=float(difference[worst]),
        prompt_index=int(prompt_index[row]),
        sample_index=int(sample_index[row]),
        position=column,
        token_id=int(tokens[row, column]),
        rollout_logprob=float(rollout_logprobs[row, column]),
        trainer_logprob=float(trainer_logprobs[row, column]),
        large=int((difference >= LARGE).sum()),
    )


def combine(packed: Tensor) -> LogprobMismatch:
    """Return the mismatch over all ranks.

    packed: [ranks, 10] float64, what each one's `LogprobMismatch.pack` returned. Equal
    worst differences are settled by (prompt, sample, position), so it does not matter which rank held which row.
    """
    empty = LogprobMismatch(sum=0.0, count=0, max=0.0)
    kinds = [type(value) for value in astuple(empty)]
    rows = [LogprobMismatch(*(kind(value) for kind, value in zip(kinds, own, strict=True))) for own in packed.tolist()]
    filled = [row for row in rows if row.count]
    if not filled:
        return empty
    worst = min(filled, key=lambda row: (-row.max, row.prompt_index, row.sample_index, row.position))
    return replace(
        worst,
        sum=sum(row.sum for row in filled),
        count=sum(row.count for row in filled),
        large=sum(row.large for row in filled),
    )


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
