"""Reward role over texts: the ranks of a replica share its responses, score each once, and exchange the scores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mega_rl.data.columns import RewardColumns
from mega_rl.parallel.agreement import all_failures, run_beside_meetings
from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Prompt, Rewards, Rollout
from mega_rl.workers.reward_calls import NoScore, NoScoreError, Response, Score, plan_call
from mega_rl.workers.scoring.concurrent import Calls, outcomes_of_batch
from mega_rl.workers.scoring.failures import FailureRule, Failures, RewardError, no_score
from mega_rl.workers.scoring.parts import PartRule
from mega_rl.workers.scoring.responses import ResponseReader, answered
from mega_rl.workers.scoring.sets import FunctionSet
from mega_rl.workers.scoring.slowest import SlowestCall

log = logging.getLogger(__name__)

Report = Callable[[str], None]  # receives what a scorer waits for from now on: "prompt 17"
Outcomes = list[Score | NoScore]


class TextScorer(Protocol):
    """Scorer of responses as texts."""

    @property
    def slowest(self) -> SlowestCall:
        """Longest call: of one response, of several by a function that takes them, or of a request."""
        ...

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report) -> Outcomes:
        """Return the score of each (prompt, response), as `as_score` gives it, or why there is none.

        Raises RewardError where the source of rewards as a whole is at fault.

        `report` is called at the start of each response or request, and never rarer than those end.
        """
        ...


class RewardWorker:
    """Reward role of one replica.

    Each rank of the replica scores its share of the rows and all get the sum: a scorer that is slow, random or a
    service sees each response once, and all ranks of a replica train on the same numbers. A share is every size-th row.
    """

    def __init__(
        self,
        scorer: TextScorer,
        *,
        reader: ResponseReader,
        replica: Ranks,
        everyone: Ranks,
        timeout_s: float,
        parts: PartRule | None = None,
        failed: FailureRule | None = None,
    ) -> None:
        """
        everyone: all ranks, which wait for each other's scores however long that takes all in all.
        timeout_s: a rank that has begun no response for so long ends the run.
        parts: the run's own, which changes; None: weights of 1.
        failed: treatment of responses without a score, on all ranks or on none; None: the first ends the run.
        """
        self._scorer = scorer
        self._reader = reader
        self._replica = replica
        self._everyone = everyone
        self._timeout_s = timeout_s
        self._parts = parts or PartRule()
        self._failures = None if failed is None else Failures(failed)
        self._metrics: Metrics = {}
        self._seconds = 0.0  # that the last scoring took on this rank

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop tokens that ended its turns. Failed samples are not scored: 0. A response
        that the reward leaves out (None) has NaN.
        Raises RewardError on every rank of the run, naming prompt, response and cause of the lowest rank's; UserError
        on every rank for settings that do not go with the parts of the reward.
        """
        # Neighbours are samples of one prompt and of like lengths, so a rank does not take them all.
        rows = answered(rollout)[self._replica.rank :: self._replica.size]
        items = self._reader.texts(rollout, rows, prompts)
        watch = _Watch(self._timeout_s, rank=self._everyone.rank)

        def work() -> tuple[Outcomes, RewardError | None]:
            begin = time.perf_counter()
            try:
                return self._scorer.score_texts(items, watch), None
            except RewardError as error:
                return [], error
            finally:
                self._seconds = time.perf_counter() - begin

        outcomes, failure = run_beside_meetings(work, self._everyone, stalled=watch.stalled)
        self._parts.settle(items, outcomes, self._everyone)
        scored = zip(items, outcomes, strict=False)  # of failed scoring there is nothing
        outcomes = [self._parts.checked(outcome, prompt) for (prompt, _), outcome in scored]
        row_scores: list[Score] = []
        try:
            row_scores = self._scores(items[: len(outcomes)], outcomes)
        except RewardError as error:
            failure = error
        messages, _ = all_failures(None if failure is None else str(failure), self._everyone, most=1)
        for rank, message in messages.items():
            raise failure if failure is not None and rank == self._everyone.rank else RewardError(message)
        self._count_failures()
        self._measure_latency(len(rows))
        columns = torch.zeros(len(rollout.lengths), 1 + len(self._parts.names or ()), dtype=torch.float32)
        for row, (prompt, _), score in zip(rows, items, row_scores, strict=True):
            columns[row] = torch.tensor(self._parts.columns(score, prompt))
        return self._parts.rewards(self._replica.sum(columns.to(rollout.tokens.device)))

    def _scores(self, items: Sequence[tuple[Prompt, Response]], outcomes: Outcomes) -> list[Score]:
        """Return the outcomes with scores for those that have none. Raises RewardError where no rule has one."""
        if self._failures is not None:
            return self._failures.replaced(items, outcomes)
        scores: list[Score] = []
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, NoScore):
                raise no_score(outcome.what, *item)
            scores.append(outcome)
        return scores

    def metrics(self) -> Metrics:
        """Return and reset the metrics since the last call, equal on all ranks: failures by kind."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _count_failures(self) -> None:
        """Add the failures of all ranks to the metrics; collective. Raises RewardError on all ranks at too many."""
        if self._failures is None:
            return
        for name, count in self._failures.settle(self._everyone).items():
            self._metrics[name] = self._metrics.get(name, 0.0) + count

    def _measure_latency(self, num_rows: int) -> None:
        """Add the mean time of a response and that of the longest call over all ranks to the metrics; collective.

        num_rows: responses that this rank has just scored.
        """
        longest = self._everyone.max(torch.tensor(self._scorer.slowest.take(), dtype=torch.float64))
        own = torch.tensor([float(num_rows), self._seconds if num_rows else 0.0], dtype=torch.float64)
        scored, seconds = self._everyone.sum(own).tolist()
        if scored:
            self._metrics |= {"time/reward_latency_s": seconds / scored, "time/reward_call_max_s": float(longest)}


class AbsentScorer:
    """Reward role of a run that learns from no reward: nothing is called, and every total is 0."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        return Rewards(torch.zeros(len(rollout.lengths), device=rollout.tokens.device), scored=False)

    def metrics(self) -> Metrics:
        return {}


class _Watch:
    """Clock of one rank's scoring, started anew by each response."""

    def __init__(self, timeout_s: float, *, rank: int) -> None:
        self._timeout_s = timeout_s
        self._rank = rank
        self._begin, self._what = time.monotonic(), "its first response"

    def __call__(self, what: str) -> None:
        """Note what the scorer waits for from now on."""
        self._begin, self._what = time.monotonic(), what

    def stalled(self) -> str | None:
        """Return in words that the scorer has made no progress for too long; None if it has."""
        if time.monotonic() - self._begin < self._timeout_s:
            return None
        return (
            f"rank {self._rank} has scored no response for {self._timeout_s:g} s (trainer.timeout_s): its reward waits "
            f"for {self._what}"
        )


def ignore(what: str) -> None:
    """Take a report that is of no interest."""


class FunctionRewards:
    """Scores by a function or a set of them, called for one response after the other."""

    def __init__(
        self, function: Callable[..., object] | FunctionSet, *, concurrency: int = 64, batch_size: int = 64
    ) -> None:
        """
        concurrency: calls of an asynchronous function at a time.
        batch_size: responses of one call, of a function that takes several.
        """
        self._concurrency, self._batch_size = concurrency, batch_size
        self.slowest = SlowestCall()
        self.call = function if isinstance(function, FunctionSet) else plan_call(function)

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the function reads."""
        return self.call.columns

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report = ignore) -> Outcomes:
        """Return the scores, and why a response has none: the function raised, or returned something else."""
        if self.call.is_async:
            return self._together(items, report)
        size = self._batch_size if self.call.batched else 1
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        return [outcome for part in parts for outcome in self._of_part(part, report)]

    def _of_part(self, items: Sequence[tuple[Prompt, Response]], report: Report) -> Outcomes:
        """Return the outcomes of responses by one call, or, where it fails for several, by a call of each."""
        if len(items) > 1:
            report(f"{len(items)} responses from prompt {items[0][0].index} on, which the reward function is scoring")
            with contextlib.suppress(NoScoreError), self.slowest.timed():
                return outcomes_of_batch(self.call, [self.call.arguments(*item) for item in items])
        outcomes: Outcomes = []
        for prompt, response in items:
            report(f"prompt {prompt.index}, whose response the reward function is scoring")
            try:
                with self.slowest.timed():
                    outcomes.append(self.call.evaluate(self.call.arguments(prompt, response)))
            except NoScoreError as error:
                outcomes.append(NoScore("error", str(error)))
            except KeyboardInterrupt:  # a second Ctrl-C, or the function's own
                log.error("%s", no_score("the reward function was interrupted", prompt, response))
                raise
        return outcomes

    def _together(self, items: Sequence[tuple[Prompt, Response]], report: Report) -> Outcomes:
        """Return the outcomes of an asynchronous function, on an event loop of this batch."""
        report(f"one of {len(items)} responses, which the asynchronous reward function is scoring")
        batch = [self.call.arguments(prompt, response) for prompt, response in items]
        calls = Calls(self.call, self._concurrency, self._batch_size, slowest=self.slowest)
        return asyncio.run(calls.outcomes_of(batch))
