"""Collect the samples of a step: draw prompts, generate, score, and keep the rows that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.config.schema.rollout import OverlongConfig
from mega_rl.data.order import StepOrder, SuccessRates
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import EngineState, Piece, whole
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.tracking.records.reader import REDRAWN
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.rows import (
    Dropped,
    Samples,
    check_rows,
    first_rows,
    group_means,
    leave_unscored_out,
    scored_rows,
    shaped_rewards,
    share_out,
    spread_of,
)
from mega_rl.trainer.selection import Stock
from mega_rl.trainer.step_metrics import part_metrics, rollout_metrics
from mega_rl.trainer.validation import judged_values
from mega_rl.types import Arrived, Draw, JsonObject, Metrics, Prompt, Rewards, Rollout


@dataclass(frozen=True)
class SamplingPlan:
    """Sizes of a step's sampling. With `waves`, draw until enough prompts have different rewards."""

    samples: int = 0  # each prompt's; 0: as many as the source gives
    waves: int = 0  # most draws of a step with dynamic sampling; 0: every prompt trains
    prompts_per_step: int = 0  # prompts that train, where a step chooses
    prompts: int = 0  # prompts of each draw, where a step chooses
    ahead: int = 0  # steps that generation runs ahead, the largest age of a token
    steps: int = 0  # of the run, each of which trains all that is drawn for it; 0: nobody knows how many it drops
    max_response_tokens: int = 0
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
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

    A plain step trains on all prompts that are drawn for it. With dynamic sampling, or generation next to training,
    groups flow in and a step chooses; if generations run out, the earliest groups of equal rewards fill it.
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
    success: SuccessMeter | None = None
    stock: Stock | None = None  # groups among which steps choose; None: a step trains on its own prompts

    def take(self, step: int) -> Batch:
        """Return the samples that a step trains on; collective."""
        dropped: list[Dropped] = []
        if self.stock is None:
            prompts = self.order.batch(step)
            greedy, first = self._greedy_rewards(prompts, step), self.order.drawn_after(step)
            with self.stage("generate"):
                rollout = self.source.generate(prompts, step=step)
            samples = self._scored(prompts, Arrived([*range(first, first + len(prompts))], [], rollout, None))
        else:
            samples, dropped = self._chosen(self.stock, step)
            greedy = self._greedy_rewards(samples.prompts, step)
            self.stock.flow.go_on()
        with self.stage("reward"):
            rollout, rewards = samples.rollout, samples.rewards
            self.log.add(self.source.metrics() | self.rewards.metrics() | self.staleness(rollout))
            self.log.add(rollout_metrics(rollout, rewards, self.ranks))
            self.log.add(part_metrics(rewards.parts, rollout, self.ranks))
            rollout, rewards = leave_unscored_out(rollout, rewards)
            overlong, longest = self.plan.overlong, self.plan.max_response_tokens
            rewards, metrics = shaped_rewards(rollout, rewards, self.ranks, overlong, max_response_tokens=longest)
            self.log.add(metrics | self.order.metrics(self.drawn_after(step + 1)) | self.order.waits())
        return Batch(samples, rollout, rewards, greedy, dropped)

    def drawn_after(self, done: int) -> int:
        """Return the number of prompts drawn when `done` steps are done."""
        return self.order.drawn_after(done) if self.stock is None else self.stock.drawn

    def numbers(self, done: int) -> JsonObject:
        """Return the numbers of a checkpoint after `done` steps."""
        return {"prompts_drawn": self.order.drawn_after(done)} if self.stock is None else self.stock.numbers()

    def resume(self, numbers: JsonObject) -> None:
        """Resume from the `numbers` of a checkpoint, empty for a new run; collective."""
        tickets = sorted(ticket for ticket, *_ in numbers.get("in_flight", ()))
        if self.stock is not None and numbers:
            self.stock.resume(numbers, self.order.prompt_of)
        elif tickets and tickets[-1] - tickets[0] >= len(tickets):
            raise UserError(
                f"trainer.async_steps=0: the checkpoint has {len(tickets)} prompts in flight, of which later ones have "
                "been trained; set trainer.async_steps as it was, or another number above 0"
            )

    def _scored(self, prompts: Sequence[Prompt], arrived: Arrived) -> Samples:
        """Return checked and scored samples; collective."""
        rollout = arrived.rollout
        with self.stage("generate"):
            self.watch(rollout)
            check_rows(rollout, prompts, self.ranks, samples=self.plan.samples, own=arrived.own)
        with self.stage("reward"):
            samples = Samples(prompts, rollout, self.rewards.score(rollout, prompts), torch.tensor(arrived.tickets))
            if self.success is not None:
                self.success.record(samples, self.ranks)
        return samples

    def _chosen(self, stock: Stock, step: int) -> tuple[Samples, list[Dropped]]:
        """Wait until the step can choose; return this replica's rows, and the dropped groups."""
        plan, flow, pool = self.plan, stock.flow, stock.pool
        count, draws, wait, lacked = plan.prompts_per_step, 0, False, False
        sampled = torch.zeros(2, dtype=torch.float64)  # sum of rewards, number of samples
        stock.versions.begin()
        expired, is_first = stock.expire(), not stock.begun
        stock.redraw()
        while len(stock.begun) < min(stock.depth, plan.ahead + 1) * count and self._draw(stock, step):
            draws += 1
        while True:
            with self.stage("generate"):
                arrived = flow.arrived(wait=wait)
            if arrived is not None:
                sampled += self._add(stock, arrived)
                expired += stock.expire()
            if (chosen := stock.choose(count)) is not None:
                break
            wait, lacked = True, lacked or (int(pool.usable.sum()) < count and not is_first)
            if not flow.waiting:
                if 0 < plan.waves <= draws or not self._draw(stock, step):
                    chosen = pool.filled(count)
                    break
                draws += 1
        filled = float((~pool.usable[chosen]).sum())
        samples, dropped = stock.take(chosen)
        dropped += expired
        total, number = self.ranks.sum(sampled).tolist()
        self.log.add({"rollout/dropped_groups": float(len(dropped))})
        if plan.ahead:
            stock.adapt(count, lacked=lacked)
            self.log.add({"rollout/expired_groups": float(sum(one.reason in ("expired", REDRAWN) for one in dropped))})
            self.log.add({"rollout/steps_in_flight": float(stock.depth)})
        if plan.waves:
            self.log.add({"rollout/generations": float(draws), "rollout/filled_groups": filled})
            self.log.add({"reward/sampled_mean": total / max(number, 1.0)})
        samples = share_out(samples, self.ranks)
        check_rows(samples.rollout, samples.prompts, self.ranks, samples=plan.samples)
        return samples, dropped

    def _draw(self, stock: Stock, step: int) -> bool:
        """Draw prompts and begin their groups; False where the run needs no more."""
        first, size, plan = stock.drawn, self.plan.prompts, self.plan
        if plan.steps and len(stock.begun) >= (plan.steps - step) * plan.prompts_per_step:
            return False
        draw = Draw(first, size, first if plan.waves else first // size)
        stock.begin(draw, self.order.take(first, size))
        return True

    def _add(self, stock: Stock, arrived: Arrived) -> Tensor:
        """Add scored groups to the pool; return [2], sum and number of this replica's rewards."""
        prompts, plan = [stock.begun[ticket][1] for ticket in arrived.tickets], self.plan
        samples = self._scored(prompts, arrived)
        usable = torch.ones(len(prompts), dtype=torch.bool)
        if plan.waves:
            usable = spread_of(samples, self.ranks, by_parts=plan.by_parts)
        means = group_means(samples, self.ranks)
        stock.pool.add(samples, arrived.oldest, usable, means, count=plan.prompts_per_step)
        known = scored_rows(samples.rollout, samples.rewards) & first_rows(samples.rollout)
        totals = samples.rewards.totals[known].double()
        return torch.tensor([float(totals.sum()), float(len(totals))], dtype=torch.float64)

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
