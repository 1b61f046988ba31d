"""Metrics of steps and evaluations: rewards, responses, inputs of updates, updates.

Every replica gets the numbers of all ranks' samples, in the order of prompt and sample, and computes the same from
them: so quantiles are exact, and no number depends on the layout, not even in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.algorithms.kl import k3
from mega_rl.algorithms.losses import explained_variance
from mega_rl.algorithms.statistics import QUANTILES, SUMMARY, combine, histogram, summary
from mega_rl.protocols import Ranks
from mega_rl.trainer.rows import answered, first_rows, gather_column, with_parts
from mega_rl.types import TRAINED_TOKENS, Experience, Metrics, RewardParts, Rewards, Rollout, over_trajectory

EQUAL_GROUPS = "reward/equal_groups_fraction"
GROUPS = (EQUAL_GROUPS, "reward/best_groups_fraction", "reward/worst_groups_fraction")
LENGTH_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
NGRAM = 8  # tokens; shorter ones come back in any long text
_FACTOR = 6364136223846793005  # odd and large: the hash of n tokens is a polynomial in it modulo 2^64
# Metrics of an update itself. All others are means over the tokens of its mini-batch.
PER_UPDATE = {"grad_norm", "grad_clipped_fraction", "lr", "num_microbatches"}
_COLUMNS = 4  # before the parts: prompt, sample, reward, response tokens


@dataclass(frozen=True)
class SampleTable:
    """Numbers of all ranks' answered samples, by prompt and sample; each [N] float64."""

    prompt: Tensor  # position in the step's batch
    reward: Tensor
    prompt_tokens: Tensor
    response_tokens: Tensor  # sampled by the policy, without a tool's
    tokens: Tensor  # sampled ones and a tool's
    finished: Tensor  # 1 where its task is done, 0 where a limit cut it off
    repeated: Tensor  # see `repeated_fractions`

    def where(self, chosen: Tensor) -> SampleTable:
        """Return the samples of `chosen`, [N] bool."""
        return SampleTable(**{name: column[chosen] for name, column in vars(self).items()})


def rollout_metrics(rollout: Rollout, rewards: Rewards, ranks: Ranks) -> Metrics:
    """Return rewards, response lengths and how responses ended, over all ranks."""
    failures = {}
    if rollout.failed is not None:
        failures["rollout/failed_samples"] = float(ranks.sum((rollout.failed & first_rows(rollout)).double().sum()))
    response = over_trajectory(rollout.loss_mask.sum(dim=1), rollout.branch).double()
    tokens = over_trajectory(rollout.lengths, rollout.branch)
    columns = (
        rewards.totals, rollout.prompt_lengths, response, tokens, rollout.finished,
        repeated_fractions(rollout.tokens, rollout.loss_mask),
    )  # fmt: skip
    prompt, _, *others = _by_sample(_own_rows(rollout, columns, ranks)).unbind(dim=1)
    samples, metrics = SampleTable(prompt, *others), Metrics()
    if rewards.scored:
        scored = samples.where(~samples.reward.isnan())
        metrics["reward/masked_fraction"] = 1.0 - len(scored.reward) / max(len(samples.reward), 1)
        if len(scored.reward):
            right, wrong = right_and_wrong(scored.prompt, scored.reward)
            metrics |= _reward_metrics(scored)
            metrics |= _lengths("right_response_tokens", scored.response_tokens[right])
            metrics |= _lengths("wrong_response_tokens", scored.response_tokens[wrong])
    return metrics | _length_metrics(samples) | failures


def part_metrics(parts: RewardParts | None, rollout: Rollout, ranks: Ranks) -> Metrics:
    """Return the mean of each part of the rewards over all ranks' samples that have it."""
    if parts is None:
        return {}
    known = ~parts.values.isnan() & (answered(rollout) & first_rows(rollout))[:, None]
    counts, totals = ranks.sum(torch.stack([known.double(), parts.values.nan_to_num().double() * known]).sum(dim=1))
    means = (totals / counts.clamp(min=1.0)).tolist()
    counted = zip(parts.names, means, counts.tolist(), strict=True)
    return {f"reward/{name}": mean for name, mean, count in counted if count}


def _own_rows(rollout: Rollout, columns: Sequence[Tensor], ranks: Ranks, *, first: int = 0) -> Tensor:
    """Return [N, 2 + K] float64 of answered samples: prompt + `first`, sample, columns; collective.

    The columns of a trajectory are those of its first row.
    """
    whole = (rollout.prompt_index + first, rollout.sample_index, *columns)
    chosen = (answered(rollout) & first_rows(rollout)).cpu()
    own = torch.stack([column.cpu().double() for column in whole], dim=1)[chosen]
    return gather_column(own, ranks)


def _by_sample(table: Tensor) -> Tensor:
    """Return rows that begin with prompt and sample in the order of these."""
    samples = 1.0 + (table[:, 1].max() if len(table) else 0.0)
    return table[(table[:, 0] * samples + table[:, 1]).argsort(stable=True)]


def _reward_metrics(samples: SampleTable) -> Metrics:
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
    """Return the highest and lowest reward of each of `count` groups; group: [N] int64."""
    empty = torch.zeros(count, dtype=torch.float64)
    top, bottom = (empty.scatter_reduce(0, group, rewards, how, include_self=False) for how in ("amax", "amin"))
    return top, bottom


def right_and_wrong(prompt: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples are right and which are wrong, [N] bool each, only by rewards.

    Of two values in the step the higher one is right. Of more values, above the mean of the prompt's samples is right,
    below it wrong; where prompts have one sample each, the step's mean. prompt: [N], rewards: [N] float64.
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


def _lengths(name: str, tokens: Tensor) -> Metrics:
    """Return mean and quantiles, interpolated between neighbours, of numbers of tokens [n] float64; none of none."""
    if not len(tokens):
        return {}
    points = torch.quantile(tokens, torch.tensor(list(LENGTH_QUANTILES.values()), dtype=torch.float64)).tolist()
    quantiles = {f"rollout/{name}_{label}": point for label, point in zip(LENGTH_QUANTILES, points, strict=True)}
    return {f"rollout/{name}_mean": float(tokens.sum()) / len(tokens)} | quantiles


def _length_metrics(samples: SampleTable) -> Metrics:
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


def repeated_fractions(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return [B] float64: share of a response's n-grams of `NGRAM` tokens that are repeated.

    tokens: [B, S] int64; mask: [B, S] bool, response tokens: an n-gram with any other token does not count. NaN in rows
    without an n-gram. N-grams are compared by hashes of 64 bits.
    """
    width = tokens.size(1) - NGRAM + 1
    if width < 1 or not len(tokens):
        return torch.full((len(tokens),), torch.nan, dtype=torch.float64)
    hashes = torch.zeros(len(tokens), width, dtype=torch.int64)
    whole = torch.ones(len(tokens), width, dtype=torch.bool)
    for place in range(NGRAM):
        hashes = hashes * _FACTOR + tokens[:, place : place + width].cpu() + 1
        whole &= mask[:, place : place + width].cpu()
    # Positions that do not count become one value, which looks like one more n-gram that comes back.
    outside = torch.iinfo(torch.int64).max
    hashes = hashes.clamp(max=outside - 1).masked_fill(~whole, outside).sort(dim=1).values
    again = (hashes[:, 1:] == hashes[:, :-1]) & (hashes[:, 1:] != outside)
    count = whole.sum(dim=1).double()
    return again.sum(dim=1).double() / torch.where(count > 0, count, torch.nan)


def experience_metrics(experience: Experience, ranks: Ranks, *, has_reference: bool, has_critic: bool) -> Metrics:
    """Return token means, spread and quantiles of the update's inputs, over all ranks."""
    mask = experience.loss_mask
    columns = {"advantage/mean": experience.advantages, "advantage/abs_mean": experience.advantages.abs()}
    spread = {"advantage": experience.advantages[mask]}
    if has_reference:
        columns["kl/ref"] = k3(experience.old_logprobs, experience.ref_logprobs)
        columns["kl/ref_k1"] = experience.old_logprobs - experience.ref_logprobs
    if has_critic:
        columns |= {"returns/mean": experience.returns, "values/mean": experience.values}
        spread["values"] = experience.values[mask]
    sums = torch.stack([mask.sum().double(), *((column.double() * mask).sum() for column in columns.values())])
    sums, summaries, histograms = _over_ranks(sums, list(spread.values()), ranks)
    count, *totals = sums.tolist()
    means = {name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)}
    for number, area in enumerate(spread):
        numbers = combine(summaries[:, number], histograms[number], quantiles=QUANTILES)
        means |= {f"{area}/{name}": value for name, value in numbers.items()}
    if has_critic:
        explained = explained_variance(experience.values, experience.returns, mask, sum_over_ranks=ranks.sum)
        means["values/explained_variance"] = float(explained)
    return means


def _over_ranks(sums: Tensor, columns: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return sums over all ranks, then summaries [ranks, columns, SUMMARY] and histograms [columns, BINS]."""
    summaries = torch.zeros(ranks.size, len(columns), SUMMARY, dtype=torch.float64)
    summaries[ranks.rank] = torch.stack([summary(column) for column in columns])
    histograms = torch.stack([histogram(column) for column in columns])
    parts = [sums, summaries, histograms]
    whole = ranks.sum(torch.cat([part.flatten() for part in parts]))
    taken = whole.split([part.numel() for part in parts])
    return [numbers.view(part.shape) for numbers, part in zip(taken, parts, strict=True)]


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Return the mean over a role's updates of a step, weighted by tokens that train.

    Metrics of `PER_UPDATE` weigh every update alike. Names that end in `_max` and `_min` have the extreme, in `_steps`
    and `_tokens` the sum. A metric that no update has is not there.
    """
    merged: dict[str, list[tuple[float, float]]] = {}
    for update in updates:
        tokens = next((value for name, value in update.items() if name.endswith(TRAINED_TOKENS)), 1.0)
        for name, value in update.items():
            merged.setdefault(name, []).append((value, 1.0 if name.partition("/")[2] in PER_UPDATE else tokens))
    return {name: _merged(name, *zip(*pairs, strict=True)) for name, pairs in merged.items()}


def _merged(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    for ending, merge in (("_max", max), ("_min", min), ("_steps", sum), ("_tokens", sum)):
        if name.endswith(ending):
            return float(merge(values))
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


@dataclass
class AnswerTable:
    """Answered samples of one set: reward, length, parts and vote of each."""

    ranks: Ranks  # the data-parallel replicas
    scored: bool = True  # the run has a reward
    _tables: list[Tensor] = field(default_factory=list, init=False)  # each [n, 4 + K] float64
    _parts: list[tuple[str, ...]] = field(default_factory=list, init=False)  # names of the K parts of each table
    _votes: list[tuple[int, int, bool, str | None]] = field(default_factory=list, init=False)

    def add(self, rows: Rollout, rewards: Rewards, *, first: int) -> None:
        """Add all replicas' samples; collective. first: position of the rows' prompt 0 in the set."""
        parts = rewards.parts
        known: Sequence[Tensor] = () if parts is None else parts.values.unbind(dim=1)
        columns = (rewards.totals, over_trajectory(rows.loss_mask.sum(dim=1), rows.branch), *known)
        self._tables.append(_own_rows(rows, columns, self.ranks, first=first))
        self._parts.append(() if parts is None else parts.names)
        self.scored = self.scored and rewards.scored

    def add_votes(
        self, votes: Sequence[str | None], right: Sequence[bool | None], rows: Rollout, *, first: int
    ) -> None:
        """Add the vote of each of this replica's samples that a reward judges; collective."""
        columns = (rows.prompt_index, rows.sample_index, first_rows(rows))
        own = zip(*(column.tolist() for column in columns), right, votes, strict=True)
        judged = [
            (first + prompt, sample, is_right, vote)
            for prompt, sample, counts, is_right, vote in own
            if counts and is_right is not None
        ]
        self._votes += [tuple(vote) for part in self.ranks.gather_json(judged) for vote in part]

    def votes(self) -> list[tuple[int, bool, str | None]]:
        """Return (prompt, right, vote) of each judged sample, by prompt and sample."""
        return [(prompt, right, vote) for prompt, _, right, vote in sorted(self._votes, key=lambda vote: vote[:2])]

    def metrics(self) -> Metrics:
        """Return the means of rewards, parts and lengths that exist, as "val/reward_mean"."""
        names = sorted({name for parts in self._parts for name in parts})
        tables = [
            with_parts(table, own, names, first=_COLUMNS, missing=torch.nan)
            for table, own in zip(self._tables, self._parts, strict=True)
        ]
        table = _by_sample(torch.cat(tables) if tables else torch.zeros(0, _COLUMNS))
        _, _, reward, tokens, *parts = table.unbind(dim=1)
        has_reward = ~reward.isnan()
        metrics = _mean("val/reward_mean", reward[has_reward]) if self.scored else {}
        if self.scored and not has_reward.all():
            metrics["val/reward_masked_fraction"] = 1.0 - float(has_reward.sum()) / len(table)
        metrics |= _mean("val/response_tokens_mean", tokens)
        for name, values in zip(names, parts, strict=True):
            metrics |= _mean(f"val/reward_{name}", values[~values.isnan()])
        return metrics


def _mean(name: str, values: Tensor) -> Metrics:
    return {name: float(values.sum()) / len(values)} if len(values) else {}
