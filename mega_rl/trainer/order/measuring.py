"""Measured success of training prompts: which of a step's samples are right, counted over all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.data.sampling.success import SuccessRates
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.unscored import scored_rows
from mega_rl.trainer.validation import judged_values
from mega_rl.types import Draws, Metrics, Prompt, Rewards, Rollout


@dataclass
class MeasuredSuccess:
    """Rollout source and scorer that record the success of each prompt of a rollout that trains, once it is scored.

    A sample is right whose reward, or a named part of it, is above a number; failed and unscored ones do not count.
    With dynamic sampling every generation is recorded, groups that it drops too. Validations and greedy responses pass.
    """

    source: RolloutSource
    scorer: Scorer
    rates: SuccessRates
    ranks: Ranks  # the data-parallel replicas
    right_above: float
    right_part: str  # of the reward; "": the reward itself
    _training: Rollout | None = field(default=None, init=False)  # rollout that is not recorded yet

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the source's rows."""
        rollout = self.source.generate(prompts, step=step, greedy=greedy, draws=draws)
        if not greedy and draws is None:
            self._training = rollout
        return rollout

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the scorer's rewards, and record those of a training rollout; collective."""
        rewards = self.scorer.score(rollout, prompts)
        if rollout is self._training:
            self._training = None
            self._record(rollout, rewards, prompts)
        return rewards

    def metrics(self) -> Metrics:
        """Return the numbers of source and scorer since the last call."""
        return self.source.metrics() | self.scorer.metrics()

    def _record(self, rollout: Rollout, rewards: Rewards, prompts: Sequence[Prompt]) -> None:
        counts = self.ranks.sum(self._counts(rollout, rewards, len(prompts)))
        right, samples = counts.unbind(1)
        self.rates.record(prompts, right=right.tolist(), samples=samples.tolist())

    def _counts(self, rollout: Rollout, rewards: Rewards, num_prompts: int) -> Tensor:
        """Return [num_prompts, 2] float64: this replica's right samples of each prompt, and all that have a score."""
        values = judged_values(rewards, self.right_part, setting="data.curriculum.success.right_part")
        known = scored_rows(rollout, rewards) & ~values.isnan()  # a data source may lack the part
        columns = torch.stack([(values > self.right_above) & known, known], dim=1).double()
        return torch.zeros(num_prompts, 2, dtype=torch.float64).index_add(0, rollout.prompt_index, columns)
