"""Named parts of rewards: which there are, their weights, and their columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import first_names
from mega_rl.protocols import Ranks
from mega_rl.types import Prompt, RewardParts, Rewards
from mega_rl.workers.reward_calls import NoScore, Response, Score, is_finite, shortened


@dataclass
class PartRule:
    """Names and weights of the parts of a reward; the first response of a source that is scored settles its names."""

    weights: Mapping[str, float] = field(default_factory=dict)  # reward.weights; a part without one has 1
    reader: str = ""  # the setting that reads parts, "algorithm.advantage=gdpo"; empty where a number will do
    sources: tuple[str, ...] = ()  # of rows, where each has parts of its own; empty: those of all rows are the same
    _settled: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)  # by source; () of numbers

    @property
    def names(self) -> tuple[str, ...] | None:
        """Return the names of all parts in alphabetical order; None while no response has been scored."""
        return tuple(sorted({name for names in self._settled.values() for name in names})) if self._settled else None

    def settle(
        self, items: Sequence[tuple[Prompt, Response]], scores: Sequence[Score | NoScore], everyone: Ranks
    ) -> None:
        """Settle names by the first score of the lowest rank that has one; collective while some are not known.

        Raises UserError on all ranks alike where settings do not go with them.
        """
        sources = self.sources or ("",)
        unknown = [source for source in sources if source not in self._settled]
        for source in unknown:
            names = first_names(self._first(source, items, scores), everyone)
            if names is not None:
                self._settled[source] = tuple(names)
                self._check_reader(names)
        if unknown and len(self._settled) == len(sources):
            self._check_weights()

    def _first(
        self, source: str, items: Sequence[tuple[Prompt, Response]], scores: Sequence[Score | NoScore]
    ) -> list[str] | None:
        """Return the names of the parts of this rank's first score of a source; None without one."""
        for (prompt, _), score in zip(items, scores, strict=False):  # fewer scores where scoring failed
            if self._source(prompt) == source and not isinstance(score, NoScore) and score is not None:
                return list(_names(score))
        return None

    def _check_reader(self, names: Sequence[str]) -> None:
        if self.reader and not names:
            raise UserError(
                f"{self.reader} reads named parts of the reward, but the reward is a number; return a mapping, as "
                "{'correct': 1.0, 'format': 0.0}, or take an estimator that reads a number, as algorithm.advantage=grpo"
            )

    def _check_weights(self) -> None:
        names = self.names or ()
        unknown = [name for name in self.weights if name not in names]
        if unknown:
            has = f"has the parts {', '.join(names)}" if names else "is a number, without named parts"
            raise UserError(f"reward.weights.{unknown[0]} has no effect: the reward {has}")

    def checked(self, outcome: Score | NoScore, prompt: Prompt) -> Score | NoScore:
        """Return the outcome itself, or why it is no score beside the others: its parts are not theirs."""
        problem = "" if isinstance(outcome, NoScore) else self._problem(outcome, prompt)
        return NoScore("error", problem) if problem else outcome

    def _problem(self, score: Score, prompt: Prompt) -> str:
        if score is None:
            return ""
        names, settled = _names(score), self._own(prompt)
        missing = [name for name in settled if name not in names]
        new = [name for name in names if name not in settled]
        if missing:
            return f"the reward {shortened(score)} has no part {missing[0]!r}, which those of other responses have"
        if new:
            return f"the reward {shortened(score)} has a part {new[0]!r}, which those of other responses have not"
        if not is_finite(self.columns(score, prompt)[0]):
            return f"the weighted sum of the parts {shortened(score)} is not finite in float32"
        return ""

    def columns(self, score: Score, prompt: Prompt) -> list[float]:
        """Return the reward, then its parts: [1 + K]; NaN each of a response that is left out.

        A part that the source of the prompt does not have is NaN, and in no sum.
        """
        names, own = self.names or (), self._own(prompt)
        if score is None:
            return [math.nan] * (1 + len(names))
        if not own:
            assert not isinstance(score, dict), "parts are settled before they are read"
            return [score] + [math.nan] * len(names)
        parts = score if isinstance(score, dict) else dict.fromkeys(own, score)
        total = sum(self.weights.get(name, 1.0) * parts[name] for name in own)
        return [total, *(parts.get(name, math.nan) for name in names)]

    def rewards(self, columns: Tensor) -> Rewards:
        """Return the rewards of rows from `columns` [B, 1 + K] float32."""
        names = self.names
        has_parts = bool(names) or (names is None and bool(self.reader))
        weights = tuple(self.weights.get(name, 1.0) for name in names or ())
        parts = RewardParts(names or (), weights, columns[:, 1:]) if has_parts else None
        return Rewards(columns[:, 0], parts)

    def _own(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the names of the parts that responses to a prompt have, as far as they are known."""
        return self._settled.get(self._source(prompt), ())

    def _source(self, prompt: Prompt) -> str:
        return prompt.source if self.sources else ""


def _names(score: Score) -> tuple[str, ...]:
    return tuple(score) if isinstance(score, dict) else ()
