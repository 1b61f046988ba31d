"""Responses that have no score: what they get instead, how they are counted, and when they end the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Prompt
from mega_rl.workers.reward_calls import FailureScore, NoScore, Response, Score, shortened

log = logging.getLogger(__name__)

KINDS = {"timeout": "reward/timeouts", "crash": "reward/crashes", "error": "reward/errors"}
_NAMED = 5  # responses without a score in the log of one batch


class RewardError(RunError):
    """A response has no score: a function raised, or a service or model gave something that is not a finite number."""


@dataclass(frozen=True)
class FailureRule:
    """Treatment of responses whose scoring took too long, crashed a worker, raised or gave no score."""

    score: float | None  # that they get, in every part where a reward has parts; None: they are left out
    max_share: float  # of a step's responses; more end the run

    def replacement(self) -> Score:
        """Return the score of such a response."""
        return None if self.score is None else FailureScore(self.score)

    def __str__(self) -> str:
        if self.score is None:
            return "it is left out (reward.pool.on_failure=mask)"
        return f"its score is reward.pool.failure_score={self.score:g}"


class Failures:
    """Failed responses of one rank since the last `settle`, by kind."""

    def __init__(self, rule: FailureRule) -> None:
        self._rule = rule
        self._counts: Counter[str] = Counter()
        self._examples: list[str] = []
        self._lowest: float | None = None  # score that the function gave
        self._warned = False

    def replaced(self, items: Sequence[tuple[Prompt, Response]], outcomes: Sequence[Score | NoScore]) -> list[Score]:
        """Return the outcomes with the rule's score in place of each failure; counts and names these."""
        scores: list[Score] = []
        for (prompt, response), outcome in zip(items, outcomes, strict=True):
            if not isinstance(outcome, NoScore):
                self._counts["score"] += 1
                self._note_lowest(outcome)
                scores.append(outcome)
                continue
            self._counts[outcome.kind] += 1
            scores.append(self._rule.replacement())
            if len(self._examples) < _NAMED:
                example = str(no_score(outcome.what, prompt, response))
                self._examples.append(example)
                log.warning("%s; %s", example, self._rule)
        self._warn_of_prizes()
        return scores

    def settle(self, everyone: Ranks) -> Metrics:
        """Return the number of failures of each kind over all ranks since the last call; collective.

        Raises RewardError on all ranks if they are too many.
        """
        own = [float(self._counts[kind]) for kind in ("score", *KINDS)]
        scored, *failed = everyone.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        total = scored + sum(failed)
        too_many = None
        if self._examples and sum(failed) > self._rule.max_share * total:
            too_many = RewardError(
                f"{sum(failed):.0f} of {total:.0f} responses have no score: more than "
                f"reward.pool.max_failed_share={self._rule.max_share:g}; the first: {self._examples[0]}"
            )
        self._counts.clear()
        self._examples.clear()
        raise_together(too_many, everyone, error=RewardError)
        return dict(zip(KINDS.values(), failed, strict=True))

    def _note_lowest(self, score: Score) -> None:
        if score is None:
            return
        numbers = score.values() if isinstance(score, dict) else [score]
        self._lowest = min(numbers if self._lowest is None else [self._lowest, *numbers])

    def _warn_of_prizes(self) -> None:
        """Warn once if a failed response got more than the function gave another."""
        score, lowest = self._rule.score, self._lowest
        failed = sum(self._counts[kind] for kind in KINDS)
        if self._warned or not failed or score is None or lowest is None or lowest >= score:
            return
        self._warned = True
        log.warning(
            "reward.pool.failure_score=%g is above %g, which the reward function gave a response: hanging or crashing "
            "it is rewarded; set it to the lowest score",
            score,
            lowest,
        )


def no_score(what: str, prompt: Prompt, response: Response) -> RewardError:
    """Return the error of a response without a score."""
    return RewardError(
        f"{what}; prompt {prompt.index}: {shortened(prompt.text)}, response: {shortened(response.text)}, "
        f"answer: {shortened(prompt.answer)}"
    )
