"""Staleness of sampled tokens in weight versions behind the trainer, and its limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Rollout


class StaleSampleError(RunError):
    """A sample of weights that are too old, or that the trainer never had."""


def token_versions(rollout: Rollout) -> Tensor:
    """[B, S] int64, version of the weights that sampled each token; without meaning off the loss mask."""
    if rollout.token_versions is not None:
        return rollout.token_versions
    return rollout.weight_version[:, None].expand_as(rollout.tokens)


@dataclass(frozen=True)
class StalenessGuard:
    """Comparison of every token's weight version with the trainer's.

    `current`: version of the weights that the trainer holds (`WeightSync.weight_version`); `limit`: versions that a
    token may be behind it, the steps that generation runs ahead.
    """

    limit: int
    ranks: Ranks
    current: Callable[[], int]

    def __call__(self, rollout: Rollout) -> Metrics:
        """Return `rollout/staleness_mean` and `rollout/staleness_max`, versions, over the response tokens of all ranks.

        Raises:
            StaleSampleError: on all ranks, naming the first sample beyond the limit.
        """
        staleness = self.current() - token_versions(rollout)
        mask = rollout.loss_mask
        own = torch.tensor([mask.sum(), staleness[mask].sum(), *_worst(rollout, staleness)], dtype=torch.float64)
        packed = torch.zeros(self.ranks.size, len(own), dtype=torch.float64)
        packed[self.ranks.rank] = own
        rows = [row for row in self.ranks.sum(packed).tolist() if row[0]]
        if not rows:
            return {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}
        self._check(rows)
        tokens = sum(row[0] for row in rows)
        return {
            "rollout/staleness_mean": sum(row[1] for row in rows) / tokens,
            "rollout/staleness_max": max(row[2] for row in rows),
        }

    def _check(self, rows: list[list[float]]) -> None:
        """Raise for the stalest and for the newest sample; rows: one per rank with tokens, as packed."""
        current = self.current()
        _, _, oldest, prompt, sample, *_ = min(rows, key=lambda row: (-row[2], row[3], row[4]))
        if oldest > self.limit:
            raise StaleSampleError(
                f"sample {sample:.0f} of prompt {prompt:.0f} of this step has tokens of weight version "
                f"{current - oldest:.0f}, {oldest:.0f} behind the trainer's {current}: more than "
                f"trainer.async_steps={self.limit} allows; the servers missed a weight update"
            )
        *_, newest, prompt, sample = min(rows, key=lambda row: (row[5], row[6], row[7]))
        if newest < 0:
            raise StaleSampleError(
                f"sample {sample:.0f} of prompt {prompt:.0f} of this step has tokens of weight version "
                f"{current - newest:.0f}, newer than the trainer's {current}: the servers hold weights of another run"
            )


def _worst(rollout: Rollout, staleness: Tensor) -> list[int]:
    """Return (staleness, prompt, sample) of the stalest token, then of the newest; zeros without tokens."""
    rows, columns = rollout.loss_mask.nonzero(as_tuple=True)
    if not len(rows):
        return [0] * 6
    values = staleness[rows, columns]
    worst = []
    for place in (int(values.argmax()), int(values.argmin())):
        row = rows[place]
        worst += [int(values[place]), int(rollout.prompt_index[row]), int(rollout.sample_index[row])]
    return worst
