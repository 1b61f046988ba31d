"""Table of an evaluation's samples, filled part by part, and the numbers of all of them.

Every replica gets the numbers of all samples, in the order of prompt and sample, and computes the same from them: no
number depends on the layout or on the parts, not in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.protocols import Ranks
from mega_rl.trainer.experience import gather_column
from mega_rl.types import Metrics, Rewards, Rollout

_COLUMNS = 4  # before the parts: prompt, sample, reward, response tokens


@dataclass
class AnswerTable:
    """Samples of one set that have an answer: reward, length and parts of each, and what it votes for."""

    ranks: Ranks  # the data-parallel replicas
    scored: bool = True  # the run has a reward
    _tables: list[Tensor] = field(default_factory=list, init=False)  # each [n, 4 + K] float64
    _parts: list[tuple[str, ...]] = field(default_factory=list, init=False)  # names of the K parts of each table
    _votes: list[tuple[int, int, bool, str | None]] = field(default_factory=list, init=False)

    def add(self, rows: Rollout, rewards: Rewards, *, first: int) -> None:
        """Add the samples of all replicas' rows; collective. first: position in the set of prompt 0 of the rows."""
        answered = torch.ones_like(rows.finished) if rows.failed is None else ~rows.failed
        tokens = rows.loss_mask.sum(dim=1)
        columns = [rows.prompt_index + first, rows.sample_index, rewards.totals, tokens]
        parts = rewards.parts
        known: Sequence[Tensor] = () if parts is None else parts.values.unbind(dim=1)
        own = torch.stack([column.cpu().double() for column in (*columns, *known)], dim=1)[answered.cpu()]
        self._tables.append(gather_column(own, self.ranks))
        self._parts.append(() if parts is None else parts.names)
        self.scored = self.scored and rewards.scored

    def add_votes(self, votes: Sequence[tuple[int, int, bool, str | None]]) -> None:
        """Add (prompt, sample, right, vote) of this replica's judged samples; collective."""
        gathered = self.ranks.gather_json([list(vote) for vote in votes])
        self._votes += [(prompt, sample, right, vote) for part in gathered for prompt, sample, right, vote in part]

    def votes(self) -> list[tuple[int, bool, str | None]]:
        """Return (prompt, right, vote) of each judged sample, by prompt and sample."""
        return [(prompt, right, vote) for prompt, _, right, vote in sorted(self._votes, key=lambda vote: vote[:2])]

    def metrics(self) -> Metrics:
        """Return the means of rewards, of their parts and of lengths, as "val/reward_mean"; each where it exists."""
        names = sorted({name for parts in self._parts for name in parts})
        tables = [_with_parts(table, own, names) for table, own in zip(self._tables, self._parts, strict=True)]
        table = torch.cat(tables) if tables else torch.zeros(0, _COLUMNS)
        samples = 1.0 + (table[:, 1].max() if len(table) else 0.0)
        table = table[(table[:, 0] * samples + table[:, 1]).argsort(stable=True)]
        _, _, reward, tokens, *parts = table.unbind(dim=1)
        has_reward = ~reward.isnan()
        metrics = _mean("val/reward_mean", reward[has_reward]) if self.scored else {}
        if self.scored and not has_reward.all():
            metrics["val/reward_masked_fraction"] = 1.0 - float(has_reward.sum()) / len(table)
        metrics |= _mean("val/response_tokens_mean", tokens)
        for name, values in zip(names, parts, strict=True):
            metrics |= _mean(f"val/reward_{name}", values[~values.isnan()])
        return metrics


def _with_parts(table: Tensor, own: Sequence[str], names: Sequence[str]) -> Tensor:
    """Return [n, 4 + K] with the columns of `names`; NaN of a part that the table lacks."""
    more = table.new_full((len(table), len(names)), torch.nan)
    for place, name in enumerate(names):
        if name in own:
            more[:, place] = table[:, _COLUMNS + own.index(name)]
    return torch.cat([table[:, :_COLUMNS], more], dim=1)


def _mean(name: str, values: Tensor) -> Metrics:
    """Return the mean of [n] float64 by its name; nothing of nothing."""
    return {name: float(values.sum()) / len(values)} if len(values) else {}
