"""Reward role over texts: the ranks of a replica share its responses, score each once, and exchange the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import all_failures, first_names, raise_together, run_beside_meetings
from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Prompt, RewardParts, Rewards, Rollout
from mega_rl.workers.reward_calls import (
    FailureScore,
    NoScoreError,
    Response,
    Score,
    evaluate,
    is_finite,
    plan_call,
    shortened,
)
from mega_rl.workers.reward_pool.begun import Begun

log = logging.getLogger(__name__)

Report = Callable[[str], None]  # receives what a scorer waits for from now on: "prompt 17"
Scores = list[Score]


class RewardError(RunError):
    """A response has no score: a function raised, or a service or model gave something that is not a finite number."""


class ScoreCounts(NamedTuple):
    """Numbers of responses by what became of them, on this rank."""

    scored: int  # all of them
    timeouts: int
    crashes: int
    max_failed_share: float  # timeouts and crashes of all ranks' responses; more end the run
    examples: tuple[str, ...]  # failed ones in words


class TextScorer(Protocol):
    """Scorer of responses as texts."""

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report) -> Scores:
        """Return the score of each (prompt, response), as `as_score` gives it. Raises RewardError.

        `report` is called at the start of each response or request, and never rarer than those end.
        """
        ...

    def take_counts(self) -> ScoreCounts | None:
        """Return and reset the counts since the last call; None of a scorer that scores all or raises."""
        ...


@dataclass
class PartRule:
    """Names and weights of the parts of a reward; the first response that is scored settles the names."""

    weights: Mapping[str, float] = field(default_factory=dict)  # reward.weights; a part without one has 1
    reader: str = ""  # the setting that reads parts, "algorithm.advantage=gdpo"; empty where a number will do
    names: tuple[str, ...] | None = None  # () of rewards that are numbers; None while no response has been scored

    def settle(self, scores: Sequence[Score], everyone: Ranks) -> None:
        """Settle the names by the first score of the lowest rank that has one; collective while they are not known.

        Raises UserError on all ranks alike where settings do not go with them.
        """
        if self.names is not None:
            return
        own = next((list(_names(score)) for score in scores if not isinstance(score, FailureScore)), None)
        names = first_names(own, everyone)
        if names is None:
            return
        self.names = tuple(names)
        if self.reader and not names:
            raise UserError(
                f"{self.reader} reads named parts of the reward, but the reward is a number; return a mapping, as "
                "{'correct': 1.0, 'format': 0.0}, or take an estimator that reads a number, as algorithm.advantage=grpo"
            )
        unknown = [name for name in self.weights if name not in names]
        if unknown:
            has = f"has the parts {', '.join(names)}" if names else "is a number, without named parts"
            raise UserError(f"reward.weights.{unknown[0]} has no effect: the reward {has}")

    def problem(self, score: Score) -> str:
        """Return why the parts of a score are not those of the others; "" if they are."""
        if isinstance(score, FailureScore):
            return ""
        names, settled = _names(score), self.names or ()
        missing = [name for name in settled if name not in names]
        new = [name for name in names if name not in settled]
        if missing:
            return f"the reward {shortened(score)} has no part {missing[0]!r}, which those of other responses have"
        if new:
            return f"the reward {shortened(score)} has a part {new[0]!r}, which those of other responses have not"
        if not is_finite(self.columns(score)[0]):
            return f"the weighted sum of the parts {shortened(score)} is not finite in float32"
        return ""

    def columns(self, score: Score) -> list[float]:
        """Return the reward, then its parts: [1 + K]."""
        if not self.names:
            assert not isinstance(score, dict), "parts are settled before they are read"
            return [score]
        parts = [score[name] if isinstance(score, dict) else score for name in self.names]
        return [sum(weight * part for weight, part in zip(self._weights(), parts, strict=True)), *parts]

    def rewards(self, columns: Tensor) -> Rewards:
        """Return the rewards of rows from `columns` [B, 1 + K] float32."""
        has_parts = bool(self.names) or (self.names is None and bool(self.reader))
        parts = RewardParts(self.names or (), self._weights(), columns[:, 1:]) if has_parts else None
        return Rewards(columns[:, 0], parts)

    def _weights(self) -> tuple[float, ...]:
        return tuple(self.weights.get(name, 1.0) for name in self.names or ())


def _names(score: Score) -> tuple[str, ...]:
    return tuple(score) if isinstance(score, dict) else ()


class RewardWorker:
    """Reward role of one replica.

    Each rank of the replica scores its share of the rows and all get the sum: a scorer that is slow, random or a
    service sees each response once, and all ranks of a replica train on the same numbers. A share is every size-th row,
    or, where samples are scored as they arrive, what the rank has begun and every size-th of the others.
    """

    def __init__(
        self,
        scorer: TextScorer,
        *,
        decode: Callable[[Sequence[int]], str],
        replica: Ranks,
        everyone: Ranks,
        timeout_s: float,
        early: Callable[[Prompt, Response], None] | None = None,
        parts: PartRule | None = None,
    ) -> None:
        """
        decode: turns response token ids into text.
        everyone: all ranks, which wait for each other's scores however long that takes all in all.
        timeout_s: a rank that has begun no response for so long ends the run.
        early: begins to score a response that the scorer will be asked for; any thread, returns at once. Given on all
            ranks of the replica or on none.
        parts: the run's own, which changes; None: weights of 1.
        """
        self._scorer = scorer
        self._decode = decode
        self._replica = replica
        self._everyone = everyone
        self._timeout_s = timeout_s
        self._early = early
        self._parts = parts or PartRule()
        self._begun: Begun[bool] = Begun()  # by prompt and sampled response
        self._metrics: Metrics = {}
        self._seconds = 0.0  # that the last scoring took on this rank

    def begin(self, prompt: Prompt, token_ids: Sequence[int], finished: bool) -> None:
        """Begin to score a response that has just ended; a `protocols.SampleListener`."""
        assert self._early is not None, "early scores are not expected"
        sampled = SampledResponse(tuple(token_ids), finished)
        self._early(prompt, sampled.read(self._decode))
        self._begun.add((prompt.index, sampled), True)

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop token that ended it (where `finished`). Failed samples are not scored: 0.
        Raises RewardError on every rank of the run, naming prompt, response and cause of the lowest rank's; UserError
        on every rank for settings that do not go with the parts of the reward.
        """
        device = rollout.tokens.device
        rows = self._own_rows(rollout, prompts)
        watch = _Watch(self._timeout_s, rank=self._everyone.rank)

        def work() -> tuple[Scores, RewardError | None]:
            begin = time.perf_counter()
            try:
                return self._scorer.score_texts(texts(rollout, rows, prompts, self._decode), watch), None
            except RewardError as error:
                return [], error
            finally:
                self._seconds = time.perf_counter() - begin

        row_scores, failure = run_beside_meetings(work, self._everyone, stalled=watch.stalled)
        self._parts.settle(row_scores, self._everyone)
        problems = ((row, self._parts.problem(score)) for row, score in zip(rows, row_scores, strict=False))
        unlike = next(((row, problem) for row, problem in problems if problem), None)
        if unlike is not None:
            ((prompt, response),) = texts(rollout, [unlike[0]], prompts, self._decode)
            failure = no_score(unlike[1], prompt, response)
        messages, _ = all_failures(None if failure is None else str(failure), self._everyone, most=1)
        for rank, message in messages.items():
            raise failure if failure is not None and rank == self._everyone.rank else RewardError(message)
        self._settle_counts(len(rows))
        columns = torch.zeros(len(rollout.lengths), 1 + len(self._parts.names or ()), dtype=torch.float32)
        for row, score in zip(rows, row_scores, strict=True):
            columns[row] = torch.tensor(self._parts.columns(score))
        return self._parts.rewards(self._replica.sum(columns.to(device)))

    def metrics(self) -> Metrics:
        """Return and reset the metrics since the last call, equal on all ranks; see `_settle_counts`."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _own_rows(self, rollout: Rollout, prompts: Sequence[Prompt]) -> list[int]:
        """Return the rows that this rank scores; collective over the replica where scores may have been begun."""
        rows, rank, size = answered(rollout), self._replica.rank, self._replica.size
        if self._early is None:
            # Neighbours are samples of one prompt and of like lengths, so a rank does not take them all.
            return rows[rank::size]
        indices, sampled = rollout.prompt_index.tolist(), responses(rollout)
        begun = [row for row in rows if self._begun.take((prompts[indices[row]].index, sampled[row]))]
        self._begun.end_batch()
        owners = torch.zeros(len(rollout.lengths), dtype=torch.int64)
        owners[begun] = rank + 1
        owner_of = self._replica.max(owners).tolist()
        others = [row for row in rows if not owner_of[row]]
        return sorted([row for row in rows if owner_of[row] == rank + 1] + others[rank::size])

    def _settle_counts(self, num_rows: int) -> None:
        """Add latency, and the responses without a score, of all ranks to the metrics; collective.

        num_rows: responses that this rank has just scored.

        Raises RewardError on all ranks if they are too many.
        """
        own = self._scorer.take_counts()
        numbers = [0.0, 0.0, 0.0] if own is None else [float(own.scored), float(own.timeouts), float(own.crashes)]
        numbers += [float(num_rows), self._seconds if num_rows else 0.0]
        pools, scored, timeouts, crashes, responses_scored, seconds = self._everyone.sum(
            torch.tensor([float(own is not None), *numbers], dtype=torch.float64)
        ).tolist()
        if responses_scored:
            self._metrics["time/reward_latency_s"] = seconds / responses_scored
        if not pools:
            return
        for name, count in (("reward/timeouts", timeouts), ("reward/crashes", crashes)):
            self._metrics[name] = self._metrics.get(name, 0.0) + count
        failed = timeouts + crashes
        too_many = None
        if own is not None and own.examples and failed > own.max_failed_share * scored:
            too_many = RewardError(
                f"{failed:.0f} of {scored:.0f} responses have no score: more than "
                f"reward.pool.max_failed_share={own.max_failed_share:g}; the first: {own.examples[0]}"
            )
        raise_together(too_many, self._everyone, error=RewardError)


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
    """Scores by a function, called for one response after the other as `mega_rl.workers.reward_calls` says."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.call = plan_call(function)

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the function reads."""
        return self.call.columns

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report = ignore) -> Scores:
        """Return the scores; stops at the first response that has none."""
        scores = []
        for prompt, response in items:
            report(f"prompt {prompt.index}, whose response the reward function is scoring")
            try:
                scores.append(evaluate(self.call, self.call.arguments(prompt, response)))
            except NoScoreError as error:
                raise no_score(str(error), prompt, response) from error.__cause__
            except KeyboardInterrupt:  # a second Ctrl-C, or the function's own
                log.error("%s", no_score("the reward function was interrupted", prompt, response))
                raise
        return scores

    def begin(self, prompt: Prompt, response: Response) -> None:
        """Do nothing: the function is called in the main thread, when the scores are asked for."""

    def take_counts(self) -> None:
        return None


def answered(rollout: Rollout) -> list[int]:
    """Return the rows that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    return [row for row, without in enumerate(failed) if not without]


def texts(
    rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
) -> list[tuple[Prompt, Response]]:
    """Return (prompt, decoded response) of these rows."""
    indices, sampled = rollout.prompt_index.tolist(), responses(rollout)
    return [(prompts[indices[row]], sampled[row].read(decode)) for row in rows]


class SampledResponse(NamedTuple):
    """Token ids between a prompt and the end of its row."""

    token_ids: tuple[int, ...]  # without the stop token that ended it
    finished: bool  # by a stop token rather than by length
    others: tuple[tuple[int, int], ...] = ()  # (start, stop) of each run of tokens that the policy did not sample

    def read(self, decode: Callable[[Sequence[int]], str]) -> Response:
        """Return the response as rewards read it."""
        text = decode(self.token_ids)
        num_tokens = len(self.token_ids) - sum(stop - start for start, stop in self.others) + self.finished
        finish: Literal["stop", "length"] = "stop" if self.finished else "length"
        if not self.others:
            return Response(text, num_tokens, finish)
        starts, stops = zip(*self.others, strict=True)
        own = zip((0, *stops), (*starts, len(self.token_ids)), strict=True)
        turns = tuple(decode(self.token_ids[start:stop]) for start, stop in own if start < stop)
        return Response("\n".join(turns), num_tokens, finish, turns=turns, transcript=text)


def responses(rollout: Rollout) -> list[SampledResponse]:
    """Return the response of each row."""
    columns = (rollout.tokens, rollout.loss_mask, rollout.prompt_lengths, rollout.lengths, rollout.finished)
    return [
        _response(ids[start:end], own[start:end], finished=finished)
        for ids, own, start, end, finished in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _response(token_ids: list[int], own: list[bool], *, finished: bool) -> SampledResponse:
    """Return the response of one row; own: which tokens the policy sampled, the last one a stop token if finished."""
    places = [place for place, sampled in enumerate(own) if sampled]
    if finished and places:
        del token_ids[places[-1]], own[places[-1]]
    changes = [place for place in range(1, len(own)) if own[place] != own[place - 1]]
    runs = zip((0, *changes), (*changes, len(own)), strict=True)
    others = tuple((start, stop) for start, stop in runs if start < stop and not own[start])
    return SampledResponse(tuple(token_ids), finished, others)


def no_score(what: str, prompt: Prompt, response: Response) -> RewardError:
    """Return the error of a response without a score."""
    return RewardError(
        f"{what}; prompt {prompt.index}: {shortened(prompt.text)}, response: {shortened(response.text)}, "
        f"answer: {shortened(prompt.answer)}"
    )
