"""Values of outcomes: weighted sums of named components, and scores in place of failures.

Users know the components as parts: the metrics `reward/<part>`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import first_names, raise_together
from mega_rl.protocols import Ranks
from mega_rl.rewards.score import Item, Outcome, RewardError, RewardFailure, Score, is_finite, no_score, shortened
from mega_rl.types import Metrics, Prompt, RewardParts, Rewards

log = logging.getLogger(__name__)

KINDS = {"timeout": "reward/timeouts", "crash": "reward/crashes", "error": "reward/errors"}
_NAMED = 5  # failed responses in the log of one batch


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
            scores = (
                outcome
                for (prompt, _), outcome in zip(items, outcomes, strict=False)  # no outcomes where scoring failed
                if self._source(prompt) == source and outcome is not None and not isinstance(outcome, RewardFailure)
            )
            first = next(scores, None)
            names = first_names(None if first is None else list(_names(first)), everyone)
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

    def checked(self, outcome: Outcome, prompt: Prompt) -> Outcome:
        """Return the outcome itself, or the failure that its components are not those of the others."""
        if outcome is None or isinstance(outcome, RewardFailure):
            return outcome
        names, settled = _names(outcome), self._settled.get(self._source(prompt), ())
        for name in settled:
            if name not in names:
                what = f"the reward {shortened(outcome)} has no part {name!r}, which those of other responses have"
                return RewardFailure("error", what)
        new = [name for name in names if name not in settled]
        if new:
            what = f"the reward {shortened(outcome)} has a part {new[0]!r}, which those of other responses have not"
            return RewardFailure("error", what)
        if not is_finite(self.columns(outcome, prompt)[0]):
            what = f"the weighted sum of the parts {shortened(outcome)} is not finite in float32"
            return RewardFailure("error", what)
        return outcome

    def columns(self, score: Score, prompt: Prompt) -> list[float]:
        """Return [1 + K]: the reward, then its components.

        All are NaN for a response that is left out. A number stands for every component. One that the prompt's source
        does not have is NaN, and in no sum.
        """
        own = self._settled.get(self._source(prompt), ())
        if score is None:
            return [math.nan] * (1 + len(self._names))
        if not own:
            assert not isinstance(score, dict), "components are settled before they are read"
            return [score] + [math.nan] * len(self._names)
        values = score if isinstance(score, dict) else dict.fromkeys(own, score)
        total = sum(self._weights.get(name, 1.0) * values[name] for name in own)
        return [total, *(values.get(name, math.nan) for name in self._names)]

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


def _names(score: float | dict[str, float]) -> tuple[str, ...]:
    return tuple(score) if isinstance(score, dict) else ()


@dataclass(frozen=True)
class OnFailure:
    """Treatment of responses that could not be scored."""

    score: float | None  # theirs, in every component; None: they are left out
    max_share: float  # share of a step's responses; more end the run

    def __str__(self) -> str:
        if self.score is None:
            return "it is left out (reward.source.on_failure=mask)"
        return f"its score is reward.source.failure_score={self.score:g}"


class Failures:
    """Failed responses of one rank since the last `settle`, by kind."""

    def __init__(self, rule: OnFailure | None) -> None:
        """rule: None where the first failure ends the run."""
        self._rule = rule
        self._counts: Counter[str] = Counter()
        self._examples: list[str] = []
        self._lowest = math.inf  # score that the function gave
        self._warned = False

    def replaced(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> list[Score]:
        """Return the outcomes with the rule's score in place of each failure; counts and names these.

        Raises RewardError for the first failure where there is no rule.
        """
        scores: list[Score] = []
        for item, outcome in zip(items, outcomes, strict=True):
            if not isinstance(outcome, RewardFailure):
                self._counts["score"] += 1
                numbers = outcome.values() if isinstance(outcome, dict) else [] if outcome is None else [outcome]
                self._lowest = min([self._lowest, *numbers])
                scores.append(outcome)
                continue
            failure = no_score(outcome.what, *item)
            if self._rule is None:
                raise failure
            self._counts[outcome.kind] += 1
            scores.append(self._rule.score)
            if len(self._examples) < _NAMED:
                self._examples.append(str(failure))
                log.warning("%s; %s", failure, self._rule)
        self._warn_of_prizes()
        return scores

    def settle(self, everyone: Ranks) -> Metrics:
        """Return the number of failures of each kind over all ranks since the last call; collective.

        Raises RewardError on all ranks if they are too many.
        """
        if self._rule is None:
            return {}
        own = [float(self._counts[kind]) for kind in ("score", *KINDS)]
        scored, *failed = everyone.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        total = scored + sum(failed)
        too_many = None
        if self._examples and sum(failed) > self._rule.max_share * total:
            too_many = RewardError(
                f"{sum(failed):.0f} of {total:.0f} responses have no score: more than "
                f"reward.source.max_failed_share={self._rule.max_share:g}; the first: {self._examples[0]}"
            )
        self._counts.clear()
        self._examples.clear()
        raise_together(too_many, everyone, error=RewardError)
        return dict(zip(KINDS.values(), failed, strict=True))

    def _warn_of_prizes(self) -> None:
        """Warn once if a failed response got more than the function gave another."""
        score = None if self._rule is None else self._rule.score
        if self._warned or not any(self._counts[kind] for kind in KINDS) or score is None or self._lowest >= score:
            return
        self._warned = True
        log.warning(
            "reward.source.failure_score=%g is above %g, which the reward function gave a response: hanging or "
            "crashing it is rewarded; set it to the lowest score",
            score,
            self._lowest,
        )
