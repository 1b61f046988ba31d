"""Columns of a reward: its weighted sum and its named components, which users know as parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import first_names
from mega_rl.protocols import Ranks
from mega_rl.rewards.score import Item, Outcome, RewardFailure, Score, is_finite, shortened
from mega_rl.types import Prompt, RewardParts, Rewards


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
        """Return [1 + K], the reward, then its components; or why these are not those of others.

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
