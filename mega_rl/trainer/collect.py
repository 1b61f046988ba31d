"""Collect the samples of a step: draw prompts, generate, score, and keep the rows that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.data.order import StepOrder, SuccessRates
from mega_rl.parallel.boxes import EngineState, Piece, whole
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.rows import (
    Dropped,
    Overlong,
    Samples,
    check_rows,
    choose,
    first_rows,
    group_means,
    leave_unscored_out,
    scored_rows,
    share_out,
    spread_of,
)
from mega_rl.trainer.step_metrics import part_metrics, rollout_metrics
from mega_rl.trainer.validation import judged_values
from mega_rl.types import Metrics, Prompt, Rewards, Rollout


@dataclass(frozen=True)
class SamplingPlan:
    """Sizes of a step's sampling. With `waves`, draw until enough prompts have different rewards."""

    samples: int = 0  # each prompt's; 0: as many as the source gives
    waves: int = 0  # most generations of a step with dynamic sampling; 0: one generation, and every prompt trains
    prompts_per_step: int = 0  # prompts that train, with dynamic sampling
    prompts: int = 0  # prompts of each generation, with dynamic sampling
    by_parts: bool = False  # a difference in a weighted component counts, even if the totals are equal
    greedy: bool = False  # the estimator compares samples with greedy responses


@dataclass
class SuccessMeter:
    """Counts the right samples of training prompts; failed and unscored samples do not count."""

    rates: SuccessRates
    right_above: float
    right_part: str  # component of the reward; "": the reward itself

    def record(self, samples: Samples, ranks: Ranks) -> None:
        """Add all replicas' samples to the rates; collective."""
        rollout, rewards = samples.rollout, samples.rewards
        values = judged_values(rewards, self.right_part, setting="data.curriculum.right_part")
        # A data source may lack the component.
        known = scored_rows(rollout, rewards) & ~values.isnan() & first_rows(rollout)
        columns = torch.stack([(values > self.right_above) & known, known], dim=1).double()
        counts = torch.zeros(len(samples.prompts), 2, dtype=torch.float64).index_add(0, rollout.prompt_index, columns)
        right, total = ranks.sum(counts).unbind(1)
        self.rates.record(samples.prompts, right=right.tolist(), samples=total.tolist())


@dataclass(frozen=True)
class OrderState:
    """`protocols.StatefulModel` of an order: rank 0 writes its success rates, and every rank reads them."""

    order: StepOrder
    rates: SuccessRates | None
    ranks: Ranks  # all of the run

    def state(self) -> EngineState:
        columns = {} if self.rates is None else {"right": self.rates.right, "samples": self.rates.samples}
        pieces = [
            Piece(name, column.shape, whole(column.shape), torch.from_numpy(column), owned=self.ranks.rank == 0)
            for name, column in columns.items()
        ]
        return EngineState(pieces, dict(self.order.numbers()))

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.order.restore({name: int(number) for name, number in numbers.items()})


class Batch(NamedTuple):
    """Samples of a step and the part of them that trains."""

    samples: Samples  # generated and scored rows, all of them
    rollout: Rollout  # rows without a reward are off the loss mask
    rewards: Rewards  # with the punishment of overlong responses
    # [P] float32, reward of each prompt's greedy response, NaN where there is none; None: the estimator needs none
    greedy: Tensor | None = None
    dropped: Sequence[Dropped] = ()  # groups drawn for this step that do not train


@dataclass
class Collector:
    """Batch source of a policy's own samples.

    With dynamic sampling the place of a generation in the order seeds its samples. Every rank takes the same decision,
    from the rewards of all. If generations run out, the earliest groups of equal rewards fill the step.
    """

    order: StepOrder
    source: RolloutSource
    rewards: Scorer
    plan: SamplingPlan
    ranks: Ranks  # the data-parallel replicas
    stage: Stages
    log: StepLog
    watch: Callable[[Rollout], None] = lambda rollout: None  # called with every generation that trains
    staleness: Callable[[Rollout], Metrics] = lambda rollout: {}  # raises for samples older than the run allows
    count_data: Callable[[int], Metrics] = lambda drawn: {"data/prompts": float(drawn)}  # given the prompts drawn
    overlong: Overlong = field(default_factory=Overlong)
    success: SuccessMeter | None = None
    drawn: int = field(default=0, init=False)  # prompts since the run began, with dynamic sampling

    def take(self, step: int) -> Batch:
        """Return the samples that a step trains on; collective."""
        if self.plan.waves:
            samples, dropped = self._until_rewards_differ()
            greedy = self._greedy_rewards(samples.prompts, step)
        else:
            prompts = self.order.batch(step)
            greedy, dropped = self._greedy_rewards(prompts, step), []
            samples = self._sample(prompts, step, ticket=self.order.drawn_after(step))
        with self.stage("reward"):
            rollout, rewards = samples.rollout, samples.rewards
            self.log.add(self.source.metrics() | self.rewards.metrics() | self.staleness(rollout))
            self.log.add(rollout_metrics(rollout, rewards, self.ranks))
            self.log.add(part_metrics(rewards.parts, rollout, self.ranks))
            rollout, rewards = leave_unscored_out(rollout, rewards)
            rewards, metrics = self.overlong.shape(rollout, rewards, self.ranks)
            self.log.add(metrics | self.count_data(self.drawn_after(step + 1)))
        return Batch(samples, rollout, rewards, greedy, dropped)

    def drawn_after(self, done: int) -> int:
        """Return the number of prompts drawn when `done` steps are done; a checkpoint keeps it."""
        return self.drawn if self.plan.waves else self.order.drawn_after(done)

    def _sample(self, prompts: Sequence[Prompt], step: int, *, ticket: int) -> Samples:
        """Return scored samples of prompts that were drawn one after another, from `ticket` on; collective."""
        with self.stage("generate"):
            rollout = self.source.generate(prompts, step=step)
            self.watch(rollout)
            check_rows(rollout, prompts, self.ranks, samples=self.plan.samples)
        with self.stage("reward"):
            tickets = torch.arange(ticket, ticket + len(prompts))
            samples = Samples(prompts, rollout, self.rewards.score(rollout, prompts), tickets)
            if self.success is not None:
                self.success.record(samples, self.ranks)
        return samples

    def _until_rewards_differ(self) -> tuple[Samples, list[Dropped]]:
        """Generate until enough prompts have different rewards; return this replica's rows of them, and the rest."""
        kept: Samples | None = None
        spread = torch.zeros(0, dtype=torch.bool)  # for each prompt drawn in this step
        means = torch.zeros(0, 2, dtype=torch.float64)  # for each as well, response tokens and reward
        sampled = torch.zeros(2, dtype=torch.float64)  # sum of rewards, number of samples
        generations = 0
        while spread.sum() < self.plan.prompts_per_step and generations < self.plan.waves:
            wave = self._sample(self.order.take(self.drawn, self.plan.prompts), self.drawn, ticket=self.drawn)
            self.drawn += len(wave.prompts)
            generations += 1
            known = scored_rows(wave.rollout, wave.rewards) & first_rows(wave.rollout)
            totals = wave.rewards.totals[known].double()
            sampled += torch.tensor([float(totals.sum()), float(len(totals))], dtype=torch.float64)
            spread = torch.cat([spread, spread_of(wave, self.ranks, by_parts=self.plan.by_parts)])
            means = torch.cat([means, group_means(wave, self.ranks)])
            chosen = choose(spread, self.plan.prompts_per_step)
            # Later prompts never displace earlier ones, so drop the rest now.
            kept = wave if kept is None else kept.join(wave)
            kept = kept.select(torch.isin(kept.rollout.prompt_index, chosen).nonzero().flatten())
        assert kept is not None
        total, count = self.ranks.sum(sampled).tolist()
        self.log.add(
            {
                "rollout/generations": float(generations),
                "rollout/dropped_groups": float(len(kept.prompts) - len(chosen)),
                "rollout/filled_groups": float((~spread[chosen]).sum()),
                "reward/sampled_mean": total / max(count, 1.0),
            }
        )
        left = sorted(set(range(len(kept.prompts))) - set(chosen.tolist()))
        dropped = [
            Dropped(int(kept.tickets[one]), "surplus" if spread[one] else "equal", *means[one].tolist()) for one in left
        ]
        samples = share_out(kept, chosen, self.ranks)
        check_rows(samples.rollout, samples.prompts, self.ranks, samples=self.plan.samples)
        return samples, dropped

    def _greedy_rewards(self, prompts: Sequence[Prompt], step: int) -> Tensor | None:
        """Return [P] float32, the reward of each prompt's greedy response; None if the estimator needs none."""
        if not self.plan.greedy:
            return None
        with self.stage("baseline"):
            rollout = self.source.generate(prompts, step=step, greedy=True)
            check_rows(rollout, prompts, self.ranks, samples=1)
            self.stage.hold("reward")
            rewards = self.rewards.score(rollout, prompts).totals
        table = torch.full((len(prompts),), torch.nan)
        table[rollout.prompt_index] = torch.where(rollout.loss_mask.any(dim=1), rewards.float(), torch.nan)
        known = ~table.isnan()
        total, count = self.ranks.sum(torch.stack([table.nan_to_num().double().sum(), known.double().sum()])).tolist()
        self.log.add({"reward/greedy_mean": total / max(count, 1.0)})
        return table
