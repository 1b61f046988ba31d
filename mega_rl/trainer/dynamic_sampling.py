"""Dynamic sampling: prompts are drawn until enough of them have samples with different rewards.

Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2: a group whose rewards are all equal has advantages of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.experience import check_rows, gather_column
from mega_rl.trainer.unscored import scored_rows
from mega_rl.types import Draws, Metrics, Prompt, Rewards, Rollout


@dataclass(frozen=True)
class SamplingPlan:
    """Sizes of a step's sampling."""

    prompts_per_step: int  # that train
    prompts: int  # of each generation
    max_generations: int
    by_parts: bool = False  # a difference in a part of the rewards that has a weight is one, even of equal totals


@dataclass
class DynamicSampling:
    """Prompt source, rollout source and scorer of steps that train on prompts whose rewards differ.

    The prompts of a step are known when it has sampled them, so `batch` generates and scores; `generate` and `score`,
    called with the prompts that it returned, hand out what it kept, and pass on what else they are asked (validation).

    Prompts come in the order of `draw`, each generation the next ones, and its place in that order seeds its samples:
    both depend on nothing but the number of prompts drawn before, which a checkpoint keeps. Every rank takes the same
    decision, from the rewards of all. When generations run out, groups of equal rewards fill the step, the earliest
    first. Groups arrive whole, in the order drawn, an equal number on each rank, as `RolloutWorker` would give them.
    """

    draw: Callable[[int, int], list[Prompt]]  # (number of prompts drawn before, how many) -> prompts
    source: RolloutSource
    scorer: Scorer
    ranks: Ranks  # the data-parallel replicas
    phase: Callable[[str], AbstractContextManager[None]]
    plan: SamplingPlan
    drawn: int = 0  # prompts, since the run began
    _prompts: list[Prompt] = field(default_factory=list, init=False)  # of the step, with its rollout and rewards
    _kept: tuple[Rollout, Rewards] | None = field(default=None, init=False)
    _metrics: Metrics = field(default_factory=dict, init=False)

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts that a step trains on, having sampled and scored them; collective."""
        prompts: list[Prompt] = []
        pool: tuple[Rollout, Rewards] | None = None  # rows of this rank that may be kept, and their rewards
        spread = torch.zeros(0, dtype=torch.bool)  # of each prompt drawn in this step
        sampled = torch.zeros(2, dtype=torch.float64)  # sum of rewards, number of samples
        generations = 0
        while spread.sum() < self.plan.prompts_per_step and generations < self.plan.max_generations:
            first = len(prompts)
            drawn, rollout, rewards = self._generate()
            prompts += drawn
            of_samples = rewards.totals[scored_rows(rollout, rewards)].double()
            sampled += torch.tensor([float(of_samples.sum()), float(len(of_samples))], dtype=torch.float64)
            rollout.prompt_index = rollout.prompt_index + first
            spread = torch.cat([spread, self._spread(rollout, rewards, first=first, count=len(drawn))])
            pool = (rollout, rewards) if pool is None else _joined(pool, (rollout, rewards))
            chosen = choose(spread, self.plan.prompts_per_step)
            pool = _rows_of(pool, chosen)  # what is not chosen now never will be
            generations += 1
        assert pool is not None
        self._kept = self._deliver(*pool, chosen)
        self._prompts = [prompts[number] for number in chosen.tolist()]
        total, count = self.ranks.sum(sampled).tolist()
        self._metrics = {
            "rollout/generations": float(generations),
            "rollout/dropped_groups": float(len(prompts) - len(chosen)),
            "rollout/filled_groups": float((~spread[chosen]).sum()),
            "reward/sampled_mean": total / max(count, 1.0),
        }
        return self._prompts

    def drawn_after(self, done: int) -> int:
        """Return the prompts drawn by the steps that are done."""
        return self.drawn

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return this replica's rows of the prompts that `batch` returned; of others, as the source generates them."""
        if prompts is self._prompts and self._kept is not None and not greedy and draws is None:
            return self._kept[0]
        return self.source.generate(prompts, step=step, greedy=greedy, draws=draws)

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the rewards of what `generate` returned; of other rollouts, as the scorer gives them."""
        if self._kept is not None and rollout is self._kept[0]:
            return self._kept[1]
        return self.scorer.score(rollout, prompts)

    def metrics(self) -> Metrics:
        """Return the numbers of source, scorer and sampling since the last call: the loop asks source and scorer."""
        own, self._metrics = self._metrics, {}
        return self.source.metrics() | self.scorer.metrics() | own

    def _generate(self) -> tuple[list[Prompt], Rollout, Rewards]:
        """Return the next prompts with this replica's rows and their rewards."""
        prompts = self.draw(self.drawn, self.plan.prompts)
        with self.phase("generate"):
            rollout = self.source.generate(prompts, step=self.drawn)
            check_rows(rollout, prompts, self.ranks)
        with self.phase("reward"):
            rewards = self.scorer.score(rollout, prompts)
        self.drawn += len(prompts)
        return prompts, rollout, rewards

    def _spread(self, rollout: Rollout, rewards: Rewards, *, first: int, count: int) -> Tensor:
        """Return [count] bool of the prompts from `first` on: whether rewards differ; the same on every rank.

        Samples that have failed or are left out do not count: a group of them alone has no spread.
        """
        rows = scored_rows(rollout, rewards).nonzero().flatten()
        numbers = gather_column(rollout.prompt_index[rows] - first, self.ranks)
        compared = rewards.totals[:, None]
        if self.plan.by_parts and rewards.parts is not None:
            weighted = [column for column, weight in enumerate(rewards.parts.weights) if weight]
            compared = rewards.parts.values[:, weighted]
        gathered = gather_column(compared[rows], self.ranks)
        spread = torch.zeros(count, dtype=torch.bool)
        for column in gathered.unbind(dim=1):
            spread |= has_spread(numbers, column, count=count)
        return spread

    def _deliver(self, rows: Rollout, rewards: Rewards, chosen: Tensor) -> tuple[Rollout, Rewards]:
        """Return this rank's part of the chosen prompts, numbered from 0, and their rewards; collective."""
        rows.prompt_index = torch.searchsorted(chosen, rows.prompt_index)
        samples = 1 + int(self.ranks.max(rows.sample_index.max() if len(rows.sample_index) else torch.tensor(0)))
        keys = gather_column(rows.prompt_index * samples + rows.sample_index, self.ranks)
        columns = gather_column(rewards.columns(), self.ranks)[keys.argsort()]
        own = self.ranks.exchange_rows(rows, rows.prompt_index * self.ranks.size // len(chosen))
        own_keys = own.prompt_index * samples + own.sample_index
        own = _trimmed(_selected(own, own_keys.argsort()))
        return own, rewards.with_columns(columns[torch.searchsorted(keys.sort().values, own_keys.sort().values)])


def has_spread(prompt_index: Tensor, rewards: Tensor, *, count: int) -> Tensor:
    """Return [count] bool: whether a prompt has samples of different rewards; prompt_index [N] int64, rewards [N]."""
    known = ~rewards.isnan()  # not of a part that the prompt's data source does not have
    prompt_index, rewards = prompt_index[known], rewards[known]
    lowest = torch.full((count,), torch.inf).scatter_reduce(0, prompt_index, rewards, "amin")
    highest = torch.full((count,), -torch.inf).scatter_reduce(0, prompt_index, rewards, "amax")
    return lowest < highest


def choose(spread: Tensor, count: int) -> Tensor:
    """Return the numbers, ascending, of the first `count` prompts with a spread, filled with the first without.

    spread: [P] bool. Returns int64, of `count` prompts or all there are.
    """
    with_spread, without = spread.nonzero().flatten(), (~spread).nonzero().flatten()
    return torch.cat([with_spread, without])[:count].sort().values


def _answered(rollout: Rollout) -> Tensor:
    """Return [B] bool: rows that have not failed."""
    return torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed


def _rows_of(rows: tuple[Rollout, Rewards], chosen: Tensor) -> tuple[Rollout, Rewards]:
    """Return the rows of the chosen prompts with their rewards."""
    kept = torch.isin(rows[0].prompt_index, chosen).nonzero().flatten()
    return _selected(rows[0], kept), rows[1][kept]


def _joined(first: tuple[Rollout, Rewards], second: tuple[Rollout, Rewards]) -> tuple[Rollout, Rewards]:
    """Return the rows of both, padded with zeros to one width. Where failures are known of one, the other has none.

    Parts of rewards are known once a response has been scored; rows from before have zeros in them.
    """
    rollouts = (first[0], second[0])
    width = max(rollout.tokens.size(1) for rollout in rollouts)
    if any(rollout.failed is not None for rollout in rollouts):
        for rollout in rollouts:
            rollout.failed = ~_answered(rollout)
    columns = [_columns(rollout) for rollout in rollouts]
    fields = {name: torch.cat([_widened(of[name], width) for of in columns]) for name in columns[0]}
    rewards = [_renamed(first[1], second[1]), second[1].columns()]
    rewards = [_widened(of, max(rows.size(1) for rows in rewards)) for of in rewards]
    known = second[1] if second[1].parts is not None and second[1].parts.names else first[1]
    return Rollout.from_rows(**fields), known.with_columns(torch.cat(rewards))


def _renamed(first: Rewards, second: Rewards) -> Tensor:
    """Return the columns of the first under the parts of the second, which has those of the first and maybe more.

    A data source that is scored for the first time brings parts of its own; rows of others have NaN in them.
    """
    columns, before, after = first.columns(), first.parts, second.parts
    if before is None or after is None or not before.names or before.names == after.names:
        return columns
    wide = columns.new_full((len(columns), 1 + len(after.names)), torch.nan)
    wide[:, [0, *(1 + after.names.index(name) for name in before.names)]] = columns
    return wide


def _widened(column: Tensor, width: int) -> Tensor:
    """Return [B, S, ...] padded with zeros to S = width; [B] as it is."""
    if column.dim() == 1 or column.size(1) == width:
        return column
    return torch.cat([column, column.new_zeros(len(column), width - column.size(1), *column.shape[2:])], dim=1)


def _trimmed(rows: Rollout) -> Rollout:
    """Return the rows without columns that are padding in all of them."""
    width = int(rows.lengths.max()) if len(rows.lengths) else rows.tokens.size(1)
    fields = {name: column if column.dim() == 1 else column[:, :width] for name, column in _columns(rows).items()}
    return Rollout.from_rows(**fields)


def _columns(rows: Rollout) -> dict[str, Tensor]:
    """Return the fields of a rollout by name, without optional ones that it lacks."""
    columns = {name: getattr(rows, name) for name in Rollout.__annotations__}
    return {name: column for name, column in columns.items() if column is not None}


def _selected(rows: Rollout, numbers: Tensor) -> Rollout:
    """Return some rows of a rollout in this order; numbers: [n] int64."""
    return Rollout.from_rows(**{name: column[numbers] for name, column in _columns(rows).items()})
