"""Metrics of an update's inputs, over the response tokens of all ranks; one sum over ranks has them all."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.distribution import QUANTILES, SUMMARY, combine, histogram, summary
from mega_rl.algorithms.kl import k3
from mega_rl.algorithms.losses.value import explained_variance
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Metrics


def experience_metrics(experience: Experience, ranks: Ranks, *, has_reference: bool, has_critic: bool) -> Metrics:
    """Return token means, spread and quantiles of the update's inputs, over all ranks.

    The KL to the reference is there where the run has one; where the update gives its own old log-probs, its kl/ref and
    kl/ref_k1 replace those made here. Values, returns and the explained variance of the returns are there where the run
    has a critic. Halves of responses: see `halves`; a half is there where a response has two tokens.
    """
    mask = experience.loss_mask
    columns = {"advantage/mean": experience.advantages, "advantage/abs_mean": experience.advantages.abs()}
    by_half = {"actor/entropy": -experience.old_logprobs}
    spread = {"advantage": experience.advantages[mask]}
    if has_reference:
        by_half["kl/ref"] = columns["kl/ref"] = k3(experience.old_logprobs, experience.ref_logprobs)
        columns["kl/ref_k1"] = experience.old_logprobs - experience.ref_logprobs
    if has_critic:
        columns |= {"returns/mean": experience.returns, "values/mean": experience.values}
        spread["values"] = experience.values[mask]
    sums = torch.stack([mask.sum().double(), *((column.double() * mask).sum() for column in columns.values())])
    of_halves = [
        torch.stack([half.sum().double(), *((column.double() * half).sum() for column in by_half.values())])
        for half in halves(mask)
    ]
    sums, *of_halves, summaries, histograms = _over_ranks([sums, *of_halves], list(spread.values()), ranks)
    count, *totals = sums.tolist()
    means = {name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)}
    for which, half in zip(("first", "second"), of_halves, strict=True):
        tokens, *totals = half.tolist()
        if tokens:
            means |= {f"{name}_{which}_half": total / tokens for name, total in zip(by_half, totals, strict=True)}
    for number, area in enumerate(spread):
        numbers = combine(summaries[:, number], histograms[number], quantiles=QUANTILES)
        means |= {f"{area}/{name}": value for name, value in numbers.items()}
    if has_critic:
        explained = explained_variance(experience.values, experience.returns, mask, sum_over_ranks=ranks.sum)
        means["values/explained_variance"] = float(explained)
    return means


def halves(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, S] bool twice: the first half of each row's response tokens, with the middle one, and the second."""
    position = mask.cumsum(dim=1)
    first = mask & (2 * position <= mask.sum(dim=1, keepdim=True) + 1)
    return first, mask & ~first


def _over_ranks(sums: list[Tensor], columns: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the sums over all ranks, then [ranks, columns, SUMMARY] and [columns, BINS] of the columns; collective."""
    summaries = torch.zeros(ranks.size, len(columns), SUMMARY, dtype=torch.float64)
    summaries[ranks.rank] = torch.stack([summary(column) for column in columns])
    histograms = torch.stack([histogram(column) for column in columns])
    parts = [*sums, summaries, histograms]
    whole = ranks.sum(torch.cat([part.flatten() for part in parts]))
    taken = whole.split([part.numel() for part in parts])
    return [numbers.view(part.shape) for numbers, part in zip(taken, parts, strict=True)]
