"""Rewards of greedy responses, for estimators that compare samples with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs
from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Rollout


@dataclass(frozen=True)
class WithGreedyRewards:
    """Estimator that gets the reward of the greedy response to each row's prompt, too."""

    estimator: AdvantageEstimator
    rewards: Tensor  # [P] float32, by position of the prompt in the step's batch; see `greedy_rewards`

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        own = self.rewards[inputs.experience.prompt_index]
        return self.estimator(replace(inputs, greedy_rewards=own))


def greedy_rewards(rollout: Rollout, rewards: Tensor, *, num_prompts: int) -> Tensor:
    """[P] float32, the reward of each prompt's greedy response; NaN for failed ones and prompts of other replicas.

    rollout: one greedy row of each of this replica's prompts; rewards: [B], its scores.
    """
    table = torch.full((num_prompts,), torch.nan)
    table[rollout.prompt_index] = torch.where(rollout.loss_mask.any(dim=1), rewards.float(), torch.nan)
    return table


def greedy_metrics(rewards: Tensor, ranks: Ranks) -> Metrics:
    """Return the mean of `greedy_rewards` over all replicas' prompts that have one; [P] float32."""
    known = ~rewards.isnan()
    total, count = ranks.sum(torch.stack([rewards.nan_to_num().double().sum(), known.double().sum()])).tolist()
    return {"reward/greedy_mean": total / max(count, 1.0)}
