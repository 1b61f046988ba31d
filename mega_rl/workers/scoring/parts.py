"""Named parts of rewards: which there are, their weights, and their columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import first_names
from mega_rl.protocols import Ranks
from mega_rl.types import RewardParts, Rewards
from mega_rl.workers.reward_calls import NoScore, Score, is_finite, shortened


@dataclass
class PartRule:
    """Names and weights of the parts of a reward; the first response that is scored settles the names."""

    weights: Mapping[str, float] = field(default_factory=dict)  # reward.weights; a part without one has 1
    reader: str = ""  # the setting that reads parts, "algorithm.advantage=gdpo"; empty where a number will do
    names: tuple[str, ...] | None = None  # () of rewards that are numbers; None while no response has been scored

    def settle(self, scores: Sequence[Score | NoScore], everyone: Ranks) -> None:
        """Settle the names by the first score of the lowest rank that has one; collective while they are not known.

        Raises UserError on all ranks alike where settings do not go with them.
        """
        if self.names is not None:
            return
        own = next(
            (list(_names(score)) for score in scores if not isinstance(score, NoScore) and score is not None), None
        )
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

    def checked(self, outcome: Score | NoScore) -> Score | NoScore:
        """Return the outcome itself, or why it is no score beside the others: its parts are not theirs."""
        problem = "" if isinstance(outcome, NoScore) else self._problem(outcome)
        return NoScore("error", problem) if problem else outcome

    def _problem(self, score: Score) -> str:
        if score is None:
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
        """Return the reward, then its parts: [1 + K]; NaN each of a response that is left out."""
        if score is None:
            return [math.nan] * (1 + len(self.names or ()))
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
