"""Metrics of a step that come from its rollouts; each equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_rl.algorithms.kl import k3
from mega_rl.algorithms.losses.value import explained_variance
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Metrics, RewardParts, Rewards, Rollout

EQUAL_GROUPS = "reward/equal_groups_fraction"
GROUPS = (EQUAL_GROUPS, "reward/best_groups_fraction", "reward/worst_groups_fraction")


def rollout_metrics(rollout: Rollout, rewards: Rewards, ranks: Ranks, *, prefix: str = "") -> Metrics:
    """Return rewards, response lengths and how responses ended, over all ranks.

    Of a run that has no reward there are lengths and endings alone.

    `reward/equal_groups_fraction` is the share of prompts with several samples of which all got the same reward: GRPO
    learns nothing from them. Where rewards differ at all, `reward/best_groups_fraction` is the share of those that all
    got the step's highest reward, `reward/worst_groups_fraction` of those that all got its lowest. They are there where
    a prompt has several samples.
    Lengths of responses count tokens of the policy, not what a tool put between its turns.
    Failed samples are in no number but their own, `rollout/failed_samples`, which is there where samples may fail.
    Numbers of rewards are of the samples that have one; `reward/masked_fraction` is the share of answers that the
    reward leaves out, and of a batch without any reward it stands alone.
    """
    failures: Metrics = {}
    if rollout.failed is not None:
        failures[f"{prefix}rollout/failed_samples"] = float(ranks.sum(rollout.failed.double().sum()))
        answered = (~rollout.failed).nonzero().flatten()
        rollout, rewards = rollout[answered], rewards[answered]  # type: ignore[index]
    response = rollout.loss_mask.sum(dim=1).double()
    scored = ~rewards.totals.isnan()
    totals = rewards.totals[scored].double()
    highest, negated, longest = ranks.max(
        torch.stack([_highest(totals), _highest(-totals), _highest(response)])
    ).tolist()
    columns = [
        torch.tensor(float(response.numel()), dtype=torch.float64),
        response.sum(),
        rollout.finished.double().sum(),
        rollout.lengths.double().sum(),
        scored.double().sum(),
        totals.sum(),
        totals.square().sum(),
        *_groups(rollout.prompt_index[scored], totals, lowest=-negated, highest=highest),
    ]
    count, tokens, finished, total, of_scored, *of_rewards = ranks.sum(torch.stack(columns)).tolist()
    count = max(count, 1.0)
    metrics = {} if not rewards.scored else {"reward/masked_fraction": max(count - of_scored, 0.0) / count}
    if rewards.scored and of_scored:
        metrics |= _reward_metrics(of_rewards, count=of_scored, lowest=-negated, highest=highest)
    metrics |= {
        "rollout/sequences": count,
        "rollout/response_tokens_mean": tokens / count,
        "rollout/response_tokens_max": longest,
        "rollout/response_tokens": tokens,
        "rollout/finished_fraction": finished / count,
        "rollout/tokens": total,
    }
    return {f"{prefix}{name}": value for name, value in metrics.items()} | failures


def _highest(numbers: Tensor) -> Tensor:
    """Return the largest of [n] float64, -inf of none."""
    return numbers.max() if numbers.numel() else torch.tensor(-torch.inf, dtype=torch.float64)


def _reward_metrics(sums: Sequence[float], *, count: float, lowest: float, highest: float) -> Metrics:
    """Return the numbers of rewards from sums over all ranks: of rewards, of their squares, then those of `_groups`."""
    reward, square, several, *kinds = sums
    mean = reward / count
    return {
        "reward/mean": mean,
        "reward/std": max(square / count - mean**2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": lowest,
        **{name: kind / several for name, kind in zip(GROUPS, kinds, strict=True) if several},
    }


def part_metrics(parts: RewardParts | None, rollout: Rollout, ranks: Ranks) -> Metrics:
    """Return the mean of each part of the rewards by its name, over all ranks' samples that have it."""
    if parts is None:
        return {}
    answered = torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed
    known = ~parts.values.isnan() & answered[:, None]
    counts, totals = ranks.sum(torch.stack([known.double(), parts.values.nan_to_num().double() * known]).sum(dim=1))
    means = (totals / counts.clamp(min=1.0)).tolist()
    return {name: mean for name, mean, count in zip(parts.names, means, counts.tolist(), strict=True) if count}


def _groups(prompt_index: Tensor, rewards: Tensor, *, lowest: float, highest: float) -> list[Tensor]:
    """Return the number of prompts with several samples and, of them, those of each of `GROUPS`; float64, this rank's.

    prompt_index: [B] int64, the rows of a prompt are all on this rank; rewards: [B] float64; lowest, highest: of all
    ranks' rewards.
    """
    _, group, sizes = torch.unique(prompt_index, return_inverse=True, return_counts=True)
    top, bottom = (
        torch.zeros(len(sizes), dtype=torch.float64).scatter_reduce(
            0, group.cpu(), rewards.cpu(), how, include_self=False
        )
        for how in ("amax", "amin")
    )
    several = sizes.cpu() > 1
    equal = several & (top == bottom)
    spread = lowest < highest
    kinds = (several, equal, equal & (top == highest) & spread, equal & (top == lowest) & spread)
    return [kind.double().sum() for kind in kinds]


def experience_metrics(experience: Experience, ranks: Ranks, *, has_reference: bool, has_critic: bool) -> Metrics:
    """Return token means of the update's inputs, over all ranks.

    The KL to the reference is there where the run has one; where the update gives its own old log-probs, its kl/ref and
    kl/ref_k1 replace those made here. Values, returns and the explained variance of the returns are there where the run
    has a critic.
    """
    mask = experience.loss_mask
    columns = {"advantage/mean": experience.advantages, "advantage/abs_mean": experience.advantages.abs()}
    if has_reference:
        columns["kl/ref"] = k3(experience.old_logprobs, experience.ref_logprobs)
        columns["kl/ref_k1"] = experience.old_logprobs - experience.ref_logprobs
    if has_critic:
        columns |= {"returns/mean": experience.returns, "values/mean": experience.values}
    sums = torch.stack([mask.sum().double(), *((column.double() * mask).sum() for column in columns.values())])
    count, *totals = ranks.sum(sums).tolist()
    means = {name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)}
    if has_critic:
        explained = explained_variance(experience.values, experience.returns, mask, sum_over_ranks=ranks.sum)
        means["values/explained_variance"] = float(explained)
    return means


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Return the mean over a step's updates; the maximum for names in `_max`, the sum for those in `_steps`."""
    merged: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            merged.setdefault(name, []).append(value)
    return {name: _merged(name, values) for name, values in merged.items()}


def _merged(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return sum(values) if name.endswith("_steps") else sum(values) / len(values)
