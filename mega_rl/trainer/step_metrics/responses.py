"""Metrics of rewards and responses, from a table of all ranks' samples.

Every replica gets the numbers of all samples, in the order of prompt and sample, and computes the same from them: so
quantiles are exact, and no number depends on the layout, not in its last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.protocols import Ranks
from mega_rl.trainer.experience import gather_column
from mega_rl.trainer.step_metrics.repetition import repeated_fractions
from mega_rl.types import Metrics, RewardParts, Rewards, Rollout

EQUAL_GROUPS = "reward/equal_groups_fraction"
GROUPS = (EQUAL_GROUPS, "reward/best_groups_fraction", "reward/worst_groups_fraction")
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class Samples:
    """Numbers of all ranks' samples that have an answer, ordered by prompt and sample; each [N] float64."""

    prompt: Tensor  # position in the step's batch
    reward: Tensor
    prompt_tokens: Tensor
    response_tokens: Tensor  # of the policy, not what a tool put between its turns
    tokens: Tensor  # of all, those of a tool too
    finished: Tensor  # 1 where a stop token ended it
    repeated: Tensor  # see `repeated_fractions`

    def where(self, chosen: Tensor) -> Samples:
        """Return the samples of `chosen`, [N] bool."""
        return Samples(**{name: column[chosen] for name, column in vars(self).items()})


def rollout_metrics(rollout: Rollout, rewards: Rewards, ranks: Ranks, *, prefix: str = "") -> Metrics:
    """Return rewards, response lengths and how responses ended, over all ranks.

    Of a run that has no reward there are lengths and endings alone. A number of some kind of samples is there where the
    step has such samples. Failed samples are in no number but their own, `rollout/failed_samples`, which is there where
    samples may fail. Numbers of rewards are of the samples that have one; `reward/masked_fraction` is the share of
    answers that the reward leaves out, and of a batch without any reward it stands alone.
    """
    failures: Metrics = {}
    if rollout.failed is not None:
        failures[f"{prefix}rollout/failed_samples"] = float(ranks.sum(rollout.failed.double().sum()))
    samples = _gathered(rollout, rewards, ranks)
    metrics: Metrics = {}
    if rewards.scored:
        scored = samples.where(~samples.reward.isnan())
        metrics["reward/masked_fraction"] = 1.0 - len(scored.reward) / max(len(samples.reward), 1)
        metrics |= (_reward_metrics(scored) | _right_and_wrong(scored)) if len(scored.reward) else {}
    metrics |= _length_metrics(samples)
    return {f"{prefix}{name}": value for name, value in metrics.items()} | failures


def part_metrics(parts: RewardParts | None, rollout: Rollout, ranks: Ranks, *, prefix: str = "reward/") -> Metrics:
    """Return the mean of each part of the rewards by prefix and name, over all ranks' samples that have it."""
    if parts is None:
        return {}
    known = ~parts.values.isnan() & _answered(rollout)[:, None]
    counts, totals = ranks.sum(torch.stack([known.double(), parts.values.nan_to_num().double() * known]).sum(dim=1))
    means = (totals / counts.clamp(min=1.0)).tolist()
    counted = zip(parts.names, means, counts.tolist(), strict=True)
    return {f"{prefix}{name}": mean for name, mean, count in counted if count}


def _answered(rollout: Rollout) -> Tensor:
    """Return [B] bool: the samples that count."""
    return torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed


def _gathered(rollout: Rollout, rewards: Rewards, ranks: Ranks) -> Samples:
    """Return the table of all ranks' samples; collective."""
    rows = _answered(rollout).nonzero().flatten()
    response = rollout.loss_mask.sum(dim=1).double()
    columns = (
        rollout.prompt_index, rollout.sample_index, rewards.totals, rollout.prompt_lengths, response,
        rollout.lengths, rollout.finished, repeated_fractions(rollout.tokens, rollout.loss_mask),
    )  # fmt: skip
    own = torch.stack([column.cpu().double() for column in columns], dim=1)[rows.cpu()]
    table = gather_column(own, ranks)
    samples_of_a_prompt = 1.0 + (table[:, 1].max() if len(table) else 0.0)
    table = table[(table[:, 0] * samples_of_a_prompt + table[:, 1]).argsort(stable=True)]
    prompt, _, reward, *others = table.unbind(dim=1)
    return Samples(prompt, reward, *others)


def _reward_metrics(samples: Samples) -> Metrics:
    """Return the numbers of rewards, and of those of prompts with several samples, where there are such.

    `reward/equal_groups_fraction` is the share of prompts with several samples of which all got the same reward: GRPO
    learns nothing from them. Where rewards differ at all, `reward/best_groups_fraction` is the share of those that all
    got the step's highest reward, `reward/worst_groups_fraction` of those that all got its lowest.
    """
    rewards, count = samples.reward, len(samples.reward)
    mean = float(rewards.sum()) / count
    metrics = {"reward/mean": mean, "reward/std": float((rewards - mean).square().sum() / count) ** 0.5}
    lowest, highest = float(rewards.min()), float(rewards.max())
    metrics |= {"reward/max": highest, "reward/min": lowest}
    for name, chosen in (("finished", samples.finished > 0), ("truncated", samples.finished == 0)):
        if chosen.any():
            metrics[f"reward/{name}_mean"] = float(rewards[chosen].mean())
    _, group, sizes = torch.unique(samples.prompt, return_inverse=True, return_counts=True)
    several = sizes > 1
    number = float(several.sum())
    if not number:
        return metrics
    top, bottom = _extremes(rewards, group, len(sizes))
    centred = rewards - (torch.zeros_like(sizes, dtype=torch.float64).index_add(0, group, rewards) / sizes)[group]
    deviation = (torch.zeros_like(top).index_add(0, group, centred.square()) / sizes).sqrt()
    deviation = torch.where(top == bottom, 0.0, deviation)  # rounding of a mean is no deviation
    equal = several & (top == bottom)
    spread = lowest < highest
    kinds = (equal, equal & (top == highest) & spread, equal & (top == lowest) & spread)
    metrics |= {name: float(kind.sum()) / number for name, kind in zip(GROUPS, kinds, strict=True)}
    return metrics | {"reward/group_std_mean": float(deviation[several].sum()) / number}


def _extremes(rewards: Tensor, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest and the lowest reward of each of `count` groups; group: [N] int64, of each reward."""
    empty = torch.zeros(count, dtype=torch.float64)
    top, bottom = (empty.scatter_reduce(0, group, rewards, how, include_self=False) for how in ("amax", "amin"))
    return top, bottom


def right_and_wrong(prompt: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples are right and which are wrong, [N] bool each, by rewards alone.

    Rewards of two values in the step: the higher one is right, the lower one wrong. Of more values: above the mean of
    the prompt's samples is right, below it wrong; where a prompt has one sample each, above or below the step's mean.
    Neither: what is equal to that mean, and every sample of a step whose rewards are all equal.
    prompt: [N], rewards: [N] float64.
    """
    values = rewards.unique()
    if len(values) <= 2:
        differ = len(values) == 2
        return (rewards == values[-1:]) & differ, (rewards == values[:1]) & differ
    _, group, sizes = torch.unique(prompt, return_inverse=True, return_counts=True)
    if int(sizes.max()) == 1:
        return rewards > rewards.mean(), rewards < rewards.mean()
    means = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, group, rewards) / sizes
    top, bottom = _extremes(rewards, group, len(sizes))
    mixed = (top > bottom)[group]
    return (rewards > means[group]) & mixed, (rewards < means[group]) & mixed


def _right_and_wrong(samples: Samples) -> Metrics:
    """Return lengths of right and of wrong responses, where there are such."""
    right, wrong = right_and_wrong(samples.prompt, samples.reward)
    return _lengths("right_response_tokens", samples.response_tokens[right]) | _lengths(
        "wrong_response_tokens", samples.response_tokens[wrong]
    )


def _lengths(name: str, tokens: Tensor) -> Metrics:
    """Return mean and quantiles, interpolated between neighbours, of numbers of tokens [n] float64; none of none."""
    if not len(tokens):
        return {}
    points = torch.quantile(tokens, torch.tensor(list(QUANTILES.values()), dtype=torch.float64)).tolist()
    quantiles = {f"rollout/{name}_{label}": point for label, point in zip(QUANTILES, points, strict=True)}
    return {f"rollout/{name}_mean": float(tokens.sum()) / len(tokens)} | quantiles


def _length_metrics(samples: Samples) -> Metrics:
    """Return lengths of prompts and responses, endings, and repetition."""
    response, count = samples.response_tokens, len(samples.prompt)
    metrics = {
        "rollout/sequences": float(count),
        "rollout/response_tokens": float(response.sum()),
        "rollout/response_tokens_mean": 0.0,
        "rollout/finished_fraction": float(samples.finished.sum()) / max(count, 1),
        "rollout/tokens": float(samples.tokens.sum()),
    }
    if not count:
        return metrics
    metrics |= _lengths("response_tokens", response)
    metrics |= _lengths("truncated_response_tokens", response[samples.finished == 0])
    metrics |= {
        "rollout/response_tokens_min": float(response.min()),
        "rollout/response_tokens_max": float(response.max()),
        "rollout/prompt_tokens_mean": float(samples.prompt_tokens.sum()) / count,
        "rollout/prompt_tokens_max": float(samples.prompt_tokens.max()),
        "rollout/truncated_fraction": float((samples.finished == 0).sum()) / count,
    }
    known = samples.repeated[~samples.repeated.isnan()]
    return metrics | ({"rollout/repeated_fraction": float(known.mean())} if len(known) else {})
