"""Updates of the policy without the responses that give it no gradient.

Where all rewards of a prompt are equal, a group's advantages are exactly 0, and so is the gradient of every loss that
is a multiple of the advantage: the gradient of a mini-batch is the same without these rows, to rounding. Loss weights
keep the counts of the whole mini-batch, so that the others weigh as much as before. Dynamic sampling, which draws other
prompts in their place, is another choice with another gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega_rl.data.minibatches import assign_rows
from mega_rl.protocols import Inspect, Learner, Ranks
from mega_rl.trainer.experience import gather_column, moved_rows, own_rows
from mega_rl.types import Experience, Metrics, Rollout, TokenOutputs

LEFT_OUT = "actor/zero_advantage_fraction"


@dataclass(frozen=True)
class WithoutZeroAdvantages:
    """The policy, whose optimizer steps see the rows of a mini-batch that have an advantage other than 0.

    Rows are balanced anew over the data-parallel `ranks`. Metrics that are means over tokens are of the rows that are
    left. `actor/zero_advantage_fraction` is the share of rows that were left out.
    """

    model: Learner
    ranks: Ranks

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        return self.model.evaluate(batch)

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        left, fraction = self.rows_with_advantages(minibatch)
        metrics = self.model.update(left, step=step, inspect=inspect)
        return metrics | {LEFT_OUT: fraction} if metrics else metrics

    def rows_with_advantages(self, minibatch: Experience) -> tuple[Experience, float]:
        """Return this rank's part of the rows that are left, and the share of rows that are not; collective.

        Of a mini-batch without any advantage the shortest row with a token that trains is left: the optimizer step has
        a gradient of 0 then, as it would have with all of them.
        """
        own = ((minibatch.advantages != 0) & minibatch.loss_mask).any(dim=1)
        trains = minibatch.loss_mask.any(dim=1)
        columns = (own.long(), trains.long(), minibatch.lengths)
        chosen, trains, lengths = (gather_column(column, self.ranks) for column in columns)
        total = len(chosen)
        if not chosen.any():
            chosen[torch.where(trains > 0, lengths, lengths.max() + 1).argmin()] = 1
        destinations = assign_rows(chosen, lengths, block=[1], dp_size=self.ranks.size)
        left = moved_rows(minibatch, destinations[slice(*own_rows(len(own), self.ranks))], self.ranks)
        share = float(self.ranks.sum(left.token_weights.double().sum()))
        if share > 0.0:  # a mini-batch may have no token that trains
            left.token_weights = (left.token_weights / share).float()
        return left, 1.0 - int(chosen.sum()) / total
