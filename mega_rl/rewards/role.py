"""Reward role that splits texts over a replica's ranks, and the columns (parts) of a reward."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import first_names, raise_together, run_beside_meetings
from mega_rl.processes import Running
from mega_rl.protocols import Ranks
from mega_rl.rewards.pool import FunctionRewards
from mega_rl.rewards.score import (
    Item,
    Outcome,
    Response,
    ResponseReader,
    RewardError,
    RewardFailure,
    Score,
    answered,
    is_finite,
    no_score,
    shortened,
)
from mega_rl.types import Metrics, Prompt, RewardParts, Rewards, Rollout


class RewardComponents:
    """Names and weights of a reward's components, settled by each data source's first response."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, reader: str = "", sources: Sequence[str] = ()):
        """
        weights: reward.weights; a component without one has 1.
        reader: the setting that reads components, "algorithm.advantage=gdpo"; empty where a number will do.
        sources: of rows, each with its own components; empty: those of all rows are the same.
        """
        self._weights = dict(weights or {})
        self._reader = reader
        self._sources = tuple(sources) or ("",)
        self._settled: dict[str, tuple[str, ...]] = {}  # names, under each source; () for numbers
        self._names: tuple[str, ...] = ()  # all sources', in alphabetical order

    def settle(self, items: Sequence[Item], outcomes: Sequence[Outcome], everyone: Ranks) -> None:
        """Settle names by the first score of the lowest rank that has one.

        Collective while some names are not known. Raises UserError on all ranks alike for settings that do not fit.
        """
        unknown = [source for source in self._sources if source not in self._settled]
        for source in unknown:
            own = None
            for (prompt, _), outcome in zip(items, outcomes, strict=False):  # no outcomes where scoring failed
                is_score = outcome is not None and not isinstance(outcome, RewardFailure)
                if own is None and is_score and self._source(prompt) == source:
                    own = list(outcome) if isinstance(outcome, dict) else []
            names = first_names(own, everyone)
            if names is None:
                continue
            self._settled[source] = tuple(names)
            if self._reader and not names:
                raise UserError(
                    f"{self._reader} reads named parts of the reward, but the reward is a number; return a mapping, as "
                    "{'correct': 1.0, 'format': 0.0}, or take an estimator that reads a number, as "
                    "algorithm.advantage=grpo"
                )
        self._names = tuple(sorted({name for names in self._settled.values() for name in names}))
        unused = [name for name in self._weights if name not in self._names]
        if unknown and unused and len(self._settled) == len(self._sources):
            has = f"has the parts {', '.join(self._names)}" if self._names else "is a number, without named parts"
            raise UserError(f"reward.weights.{unused[0]} has no effect: the reward {has}")

    def columns(self, score: Score, prompt: Prompt) -> list[float] | RewardFailure:
        """Return [1 + K], reward and components; a RewardFailure for wrong parts or non-finite sums.

        All are NaN for a response that is left out. One that the prompt's source does not have is NaN, and in no sum.
        """
        if score is None:
            return [math.nan] * self.width
        own, values = self._settled.get(self._source(prompt), ()), score if isinstance(score, dict) else {}
        names = tuple(values)
        if names != own:
            has = f"the parts {', '.join(own)}" if own else "no parts"
            return RewardFailure("error", f"the reward {shortened(score)} has not {has}, as those of other responses")
        total = sum(self._weights.get(name, 1.0) * values[name] for name in own) if own else score
        assert isinstance(total, int | float), "without parts the score is a number"
        if not is_finite(total):
            what = f"the weighted sum of the parts {shortened(score)} is not finite in float32"
            return RewardFailure("error", what)
        return [total, *(values.get(name, math.nan) for name in self._names)]

    def everywhere(self, score: float, prompt: Prompt) -> Score:
        """Return a score that is the number in every component of the prompt's source."""
        return dict.fromkeys(self._settled.get(self._source(prompt), ()), score) or score

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return 1 + len(self._names)

    def rewards(self, columns: Tensor) -> Rewards:
        """Return the rewards of rows from `columns` [B, 1 + K] float32."""
        has_parts = bool(self._names) or (not self._settled and bool(self._reader))
        weights = tuple(self._weights.get(name, 1.0) for name in self._names)
        return Rewards(columns[:, 0], RewardParts(self._names, weights, columns[:, 1:]) if has_parts else None)

    def _source(self, prompt: Prompt) -> str:
        return prompt.source if self._sources != ("",) else ""


log = logging.getLogger(__name__)


def of_all_rows(columns: Tensor, rollout: Rollout) -> Tensor:
    """Return columns [B, ...] of which each row has those of its trajectory's first row."""
    if rollout.branch is None:
        return columns
    return columns[torch.arange(len(columns), device=columns.device) - rollout.branch]


Place = tuple[int, int]  # row of the prompt in its data, number of the sample
Key = tuple[int, int, Response]


def _places(rollout: Rollout, prompts: Sequence[Prompt]) -> list[Place]:
    rows = [prompts[place].index for place in rollout.prompt_index.tolist()]
    return list(zip(rows, rollout.sample_index.tolist(), strict=True))


class EarlyScores:
    """Scores that a thread makes of responses as they come."""

    def __init__(self, score: Callable[[Sequence[Item]], list[Outcome]]) -> None:
        self._score, self._changed = score, threading.Condition()
        self._asked: dict[Key, Item] = {}  # nobody has their outcomes yet
        self._waiting: dict[Key, Item] = {}  # those of them that the thread has not begun
        self._outcomes: dict[Key, Outcome] = {}
        self._thread: Running[None] | None = None  # None: nothing waits

    def add(self, items: Mapping[Key, Item]) -> None:
        """Let the thread score responses, with all others that wait when it is free."""
        with self._changed:
            self._asked.update(items)
            self._waiting.update(items)
            self._outcomes = {key: one for key, one in self._outcomes.items() if key not in items}
            if items:
                self._thread = self._thread or Running(self._work, name="early scores")

    def begun(self, places: Collection[Place]) -> Mapping[Key, Item]:
        """Drop responses of these samples that wait; return those that are or will be scored."""
        with self._changed:
            own = {key: item for key, item in self._asked.items() if key[:2] in places}
            for key in own.keys() & self._waiting.keys():
                del self._waiting[key], self._asked[key], own[key]
            return own

    def outcomes(self, keys: Collection[Key]) -> Mapping[Key, Outcome]:
        """Wait for the outcomes of these responses and return them once. Raises the thread's error."""
        with self._changed:
            while not self._outcomes.keys() >= set(keys):
                if self._thread is not None and self._thread.error is not None:
                    raise self._thread.error
                self._changed.wait(BEAT_S)  # here a signal's handler may raise
            for key in set(keys):
                del self._asked[key]
            return {key: self._outcomes.pop(key) for key in set(keys)}

    def forget(self) -> None:
        """Drop all responses."""
        with self._changed:
            self._asked, self._waiting, self._outcomes = {}, {}, {}

    def _work(self) -> None:
        while items := self._next():
            outcomes = self._score([*items.values()])
            with self._changed:
                scored = zip(items.items(), outcomes, strict=True)
                self._outcomes |= {key: one for (key, item), one in scored if self._asked.get(key) is item}
                self._changed.notify_all()

    def _next(self) -> Mapping[Key, Item]:
        with self._changed:
            items, self._waiting = self._waiting, {}
            self._thread = self._thread if items else None
            return items


KINDS = {"timeout": "reward/timeouts", "crash": "reward/crashes", "error": "reward/errors"}
NAMED = 5  # failed responses in the log of one batch
BEAT_S = 1.0


@dataclass
class TextScorer:
    """Reward role of one replica over a source of scores.

    Each rank of the replica scores every size-th row and all get the sum: a source sees each response once. A rank that
    was given rows by `begin` has scored them before, for all; its thread then makes all calls of the source.
    """

    source: FunctionRewards
    reader: ResponseReader
    replica: Ranks
    everyone: Ranks  # all ranks, which wait for each other's scores however long that takes in all
    timeout_s: float  # a rank that has begun no response for so long ends the run
    components: RewardComponents = field(default_factory=RewardComponents)  # the run's own, which changes
    failure_score: float | None = None  # for a response without a score, in every component; None leaves it out
    max_failed_share: float = 0.0  # share of a step's responses; more failures end the run
    _metrics: Metrics = field(default_factory=dict, init=False)
    _early: EarlyScores | None = field(default=None, init=False)
    _spent: tuple[int, float] = field(default=(0, 0.0), init=False)  # responses and seconds of calls
    _heard: tuple[float, str] = field(default=(0.0, ""), init=False)  # when, and what the source waits for since

    def begin(self, rollout: Rollout, prompts: Sequence[Prompt]) -> None:
        """Let a thread score rows that `score` will get too; each trajectory comes whole."""
        rows, places = answered(rollout), _places(rollout, prompts)
        self._early = self._early or EarlyScores(self._call)
        items = self.reader.texts(rollout, rows, prompts)
        self._early.add({(*places[row], item[1]): item for row, item in zip(rows, items, strict=True)})

    def forget(self) -> None:
        if self._early is not None:
            self._early.forget()

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop tokens that ended its turns. Failed samples are not scored: 0. A response that the
        reward leaves out (None) has NaN.

        Raises on every rank RewardError, and UserError for settings that do not go with the reward's components.
        """
        rank, size, early = self.replica.rank, self.replica.size, self._early
        every, places = answered(rollout), _places(rollout, prompts)
        known = {} if early is None else early.begun({places[row] for row in every})
        here = {key[:2] for key in known}
        # Neighbours are samples of one prompt and of like lengths, so a rank does not take them all.
        rows, came = every[rank::size], [row for row in every if places[row] in here]
        read = sorted({*rows, *came})
        texts = dict(zip(read, self.reader.texts(rollout, read, prompts), strict=True))
        keys = {row: (*places[row], texts[row][1]) for row in read}
        # A trajectory that ran again may have another response, and a row of other data the same number.
        begun = {row: keys[row] for row in came if known.get(keys[row]) == texts[row]}
        taken = self.replica.max(torch.tensor([row in begun for row in every]).long()).tolist()
        left = {row: texts[row] for row, is_taken in zip(rows, taken[rank::size], strict=True) if not is_taken}
        if early is not None:
            early.add({keys[row]: item for row, item in left.items()})
            left, begun = {}, begun | {row: keys[row] for row in left}
        scored = self._outcomes(left, begun, early)
        if any(taken):
            parts = self.replica.gather_json([*scored.items()])
            scored = {row: RewardFailure.or_score(one) for part in parts for row, one in part}
        items, outcomes = [texts[row] for row in rows], [scored[row] for row in rows]
        self.components.settle(items, outcomes, self.everyone)
        numbers = self._numbers(items, outcomes)
        columns = torch.zeros(len(rollout.lengths), self.components.width, dtype=torch.float32)
        if rows:
            columns[rows] = torch.tensor(numbers, dtype=torch.float32)
        return self.components.rewards(of_all_rows(self.replica.sum(columns.to(rollout.tokens.device)), rollout))

    def metrics(self) -> Metrics:
        """Return and reset the metrics since the last call, equal on all ranks."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _outcomes(
        self, left: Mapping[int, Item], begun: Mapping[int, Key], early: EarlyScores | None
    ) -> dict[int, Outcome]:
        """Return outcomes of rows that are left and of those begun early; collective; raises on all ranks."""

        def work() -> tuple[dict[int, Outcome], RewardError | None]:
            try:
                made = {} if early is None else early.outcomes(begun.values())
                outcomes = {row: made[key] for row, key in begun.items()}
                return outcomes | dict(zip(left, self._call([*left.values()]) if left else [], strict=True)), None
            except RewardError as error:
                return {}, error

        self._heard = (time.monotonic(), "its first response" if early is None else self._heard[1])
        outcomes, failure = run_beside_meetings(work, self.everyone, stalled=self._stalled)
        raise_together(failure, self.everyone, error=RewardError)
        spent, self._spent = self._spent, (0, 0.0)
        count, total_s = self.everyone.sum(torch.tensor(spent, dtype=torch.float64)).tolist()
        if count:
            self._metrics["time/reward_latency_s"] = total_s / count
        return outcomes

    def _call(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the source's outcomes; measures their time."""
        begin = time.perf_counter()
        outcomes = self.source.score(items, self._report)
        self._spent = (self._spent[0] + len(items), self._spent[1] + time.perf_counter() - begin)
        return outcomes

    def _report(self, what: str) -> None:
        self._heard = (time.monotonic(), what)

    def _stalled(self) -> str | None:
        since, waits_for = self._heard
        if time.monotonic() - since < self.timeout_s:
            return None
        return (
            f"rank {self.everyone.rank} has scored no response for {self.timeout_s:g} s (trainer.timeout_s): its "
            f"reward waits for {waits_for}"
        )

    def _numbers(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> list[list[float]]:
        """Return the columns of each response, in place of a failure those of `failure_score`; collective.

        Counts and names failures. Raises RewardError on all ranks if they are too many.
        """
        counts: Counter[str] = Counter()
        numbers, first = [], ""
        for (prompt, response), outcome in zip(items, outcomes, strict=True):
            result = outcome if isinstance(outcome, RewardFailure) else self.components.columns(outcome, prompt)
            if isinstance(result, RewardFailure):
                counts[result.kind] += 1
                what = str(no_score(result.what, prompt, response))
                if counts.total() <= NAMED:
                    log.warning(
                        "%s; its score is %s", what, "none" if self.failure_score is None else self.failure_score
                    )
                first = first or what
                score = self.failure_score
                result = self.components.columns(
                    None if score is None else self.components.everywhere(score, prompt), prompt
                )
                assert isinstance(result, list), "the components of a failure are those of its source"
            numbers.append(result)
        own = [float(len(items)), *(float(counts[kind]) for kind in KINDS)]
        total, *failed = self.everyone.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        too_many = None
        if first and sum(failed) > self.max_failed_share * total:
            too_many = RewardError(
                f"{sum(failed):.0f} of {total:.0f} responses have no score, more than the share of "
                f"{self.max_failed_share:g} that may fail (reward.source.max_failed_share); the first: {first}"
            )
        raise_together(too_many, self.everyone, error=RewardError)
        for name, count in zip(KINDS.values(), failed, strict=True):
            self._metrics[name] = self._metrics.get(name, 0.0) + count
        return numbers


class EnvironmentScorer:
    """Reward role of a run whose environment scores its trajectories."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        assert rollout.scores is not None, "rows without scores are refused before"
        return Rewards(rollout.scores)

    def metrics(self) -> Metrics:
        return {}


class AbsentScorer:
    """Reward role of a run that learns from no reward: every total is 0."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        return Rewards(torch.zeros(len(rollout.lengths), device=rollout.tokens.device), scored=False)

    def metrics(self) -> Metrics:
        return {}
