"""Reward role over texts: a replica's ranks share its responses and exchange the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from mega_rl.config.user_files import users_code
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import all_failures, raise_together, run_beside_meetings
from mega_rl.protocols import Ranks
from mega_rl.rewards.call import CallWatch, RewardCall
from mega_rl.rewards.components import Failures, OnFailure, RewardComponents
from mega_rl.rewards.score import (
    Item,
    Outcome,
    Report,
    ResponseReader,
    RewardError,
    Score,
    ScoreSource,
    answered,
    ignore,
    no_score,
)
from mega_rl.types import Metrics, Prompt, Rewards, Rollout

log = logging.getLogger(__name__)


class TextScorer:
    """Reward role of one replica over a source of scores.

    Each rank of the replica scores every size-th row and all get the sum: a source that is slow, random or a service
    sees each response once, and all ranks of a replica train on the same numbers.
    """

    def __init__(
        self,
        source: ScoreSource,
        *,
        reader: ResponseReader,
        replica: Ranks,
        everyone: Ranks,
        timeout_s: float,
        components: RewardComponents | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        """
        everyone: all ranks. They wait for each other's scores however long that takes in all.
        timeout_s: a rank that has begun no response for so long ends the run.
        components: the run's own, which changes; None: weights of 1.
        on_failure: on all ranks or on none; None: the first failure ends the run.
        """
        self._source = source
        self._reader = reader
        self._replica = replica
        self._everyone = everyone
        self._timeout_s = timeout_s
        self._components = components or RewardComponents()
        self._failures = Failures(on_failure)
        self._metrics: Metrics = {}

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop tokens that ended its turns. Failed samples are not scored: 0. A response that the
        reward leaves out (None) has NaN.

        Raises:
            RewardError: on every rank of the run, naming prompt, response and cause of the lowest rank's.
            UserError: on every rank, for settings that do not go with the reward's components.
        """
        # Neighbours are samples of one prompt and of like lengths, so a rank does not take them all.
        rows = answered(rollout)[self._replica.rank :: self._replica.size]
        items = self._reader.texts(rollout, rows, prompts)
        outcomes, seconds, failure = self._outcomes(items)
        self._components.settle(items, outcomes, self._everyone)
        scores: list[Score] = []
        try:
            checked = [self._components.checked(one, item[0]) for one, item in zip(outcomes, items, strict=False)]
            scores = self._failures.replaced(items[: len(checked)], checked)
        except RewardError as error:
            failure = error
        messages, _ = all_failures(None if failure is None else str(failure), self._everyone, most=1)
        for rank, message in messages.items():
            raise failure if failure is not None and rank == self._everyone.rank else RewardError(message)
        for name, count in self._failures.settle(self._everyone).items():
            self._metrics[name] = self._metrics.get(name, 0.0) + count
        self._measure_latency(len(rows), seconds)
        columns = torch.zeros(len(rollout.lengths), self._components.width, dtype=torch.float32)
        if rows:
            numbers = [
                self._components.columns(score, prompt) for (prompt, _), score in zip(items, scores, strict=True)
            ]
            columns[rows] = torch.tensor(numbers, dtype=torch.float32)
        return self._components.rewards(self._replica.sum(columns.to(rollout.tokens.device)))

    def metrics(self) -> Metrics:
        """Return and reset the metrics since the last call, equal on all ranks."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _outcomes(self, items: Sequence[Item]) -> tuple[list[Outcome], float, RewardError | None]:
        """Return this rank's outcomes, the seconds that they took, and what the source raised; collective."""
        watch = StallWatch(
            f"rank {self._everyone.rank} has scored no response for {self._timeout_s:g} s (trainer.timeout_s): its "
            "reward waits for ",
            self._timeout_s,
            what="its first response",
        )

        def work() -> tuple[list[Outcome], float, RewardError | None]:
            begin = time.perf_counter()
            try:
                outcomes, failure = self._source.score(items, watch), None
            except RewardError as error:
                outcomes, failure = [], error
            return outcomes, time.perf_counter() - begin, failure

        return run_beside_meetings(work, self._everyone, stalled=watch.stalled)

    def _measure_latency(self, num_rows: int, seconds: float) -> None:
        """Measure a response's mean time and the longest call over all ranks; collective."""
        longest = self._everyone.max(torch.tensor(self._source.longest_s, dtype=torch.float64))
        self._source.longest_s = 0.0
        own = torch.tensor([float(num_rows), seconds if num_rows else 0.0], dtype=torch.float64)
        scored, total_s = self._everyone.sum(own).tolist()
        if scored:
            self._metrics |= {"time/reward_latency_s": total_s / scored, "time/reward_call_max_s": float(longest)}


class AbsentScorer:
    """Reward role of a run that learns from no reward: every total is 0."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        return Rewards(torch.zeros(len(rollout.lengths), device=rollout.tokens.device), scored=False)

    def metrics(self) -> Metrics:
        return {}


class StallWatch:
    """Clock of one rank's work, which each report restarts."""

    def __init__(self, message: str, timeout_s: float, *, what: str = "") -> None:
        """The message ends with `what` the work waits for."""
        self._message, self._timeout_s = message, timeout_s
        self._begin, self._what = time.monotonic(), what

    def __call__(self, what: str) -> None:
        """Note what the work waits for from now on."""
        self._begin, self._what = time.monotonic(), what

    def stalled(self) -> str | None:
        """Return the message if there was no report for too long, else None."""
        if time.monotonic() - self._begin < self._timeout_s:
            return None
        return self._message + self._what


class CalledRewards(CallWatch):
    """Scores by reward functions in this process, without deadlines."""

    def __init__(self, call: RewardCall) -> None:
        self.call = call
        self._items: Sequence[Item] = ()
        self._rows: Sequence[int] = ()  # last that a function was called for
        self._report: Report = ignore

    def score(self, items: Sequence[Item], report: Report = ignore) -> list[Outcome]:
        """Return the outcomes; logs the response at which the function was interrupted."""
        self._items, self._report = items, report
        try:
            return self.call.run([self.call.arguments(*item) for item in items], self)
        except KeyboardInterrupt:  # a second Ctrl-C, or the function's own
            if self._rows:
                log.error("%s", no_score("the reward function was interrupted", *items[self._rows[0]]))
            raise

    def begin(self, rows: Sequence[int], name: str) -> None:
        self._rows = rows
        first = self._items[rows[0]][0].index
        if len(rows) > 1:
            self._report(f"{len(rows)} responses from prompt {first} on, which the reward function is scoring")
        elif self.call.is_async:
            self._report(f"one of {len(self._items)} responses, which the asynchronous reward function is scoring")
        else:
            self._report(f"prompt {first}, whose response the reward function is scoring")


class UsersAnswers:
    """Answers that responses vote for, by a user's function on every rank."""

    def __init__(self, function: Callable[[str], object], *, setting: str, everyone: Ranks, timeout_s: float) -> None:
        """
        setting: names the function in messages, as "validation.answer_of='a.py:f'".
        everyone: all ranks. They wait for each other's answers however long they take in all.
        timeout_s: a rank that reads one response for so long ends the run.
        """
        self._function = function
        self._setting = setting
        self._everyone = everyone
        self._timeout_s = timeout_s

    def __call__(self, responses: Sequence[str]) -> list[str | None]:
        """Return the answer of each response of this rank, or None; collective over all ranks.

        Raises:
            UserError: on every rank, where the function fails on any, or returns anything but a string or None.
            StalledError: the function does not return.
        """
        watch = StallWatch(
            f"rank {self._everyone.rank}: {self._setting} has not returned for {self._timeout_s:g} s "
            "(trainer.timeout_s)",
            self._timeout_s,
        )
        answers, failure = run_beside_meetings(
            lambda: self._read(responses, watch), self._everyone, stalled=watch.stalled
        )
        raise_together(failure, self._everyone, error=UserError)
        return answers

    def _read(self, responses: Sequence[str], watch: StallWatch) -> tuple[list[str | None], UserError | None]:
        """Return the answers of this rank's responses up to the first failure, and that failure."""
        answers: list[str | None] = []
        for response in responses:
            watch("")
            try:
                with users_code(f"{self._setting}: failed for a response"):
                    answer = self._function(response)
                if not (answer is None or isinstance(answer, str)):
                    raise UserError(
                        f"{self._setting}: returned {type(answer).__name__}; it must return a string, or None for none"
                    )
            except UserError as error:
                return answers, error
            answers.append(answer)
        return answers, None
