"""Advantage estimators: from rewards (and values) to a number for each response token.

Every [B, S] tensor is aligned to the token that it describes (see mega_rl.types); `mask` is the loss mask, True on
response tokens, in one run per row or in several. Everything off the mask is ignored on input and 0 on output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import SumOverRanks
from mega_rl.types import Experience, RewardParts


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Rows of one prompt, which share a `prompt_index`, are all on this rank."""

    experience: Experience  # whose advantages and returns are blank
    rewards: Tensor  # [B] float32
    kl_penalty: Tensor | None  # [B, S] float32, coefficient times KL, to be taken off token rewards; None: without
    sum_over_ranks: SumOverRanks  # over data parallelism
    # [B] float32, of the greedy response to the row's prompt, NaN where that has failed; None: no estimator needs it
    greedy_rewards: Tensor | None = None
    reward_parts: RewardParts | None = None  # `rewards` is their weighted sum; None: rewards are single numbers


class AdvantageEstimator(Protocol):
    """An estimator of advantages; class variables as of `config.schema.algorithms.AdvantageSettings`."""

    def __call__(self, inputs: AdvantageInputs, /) -> tuple[Tensor, Tensor]:
        """Return (advantages, value targets), [B, S] float32 each, 0 off the loss mask; zeros without a critic."""
        ...


def without_values(advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the advantages of an estimator that needs no critic, with value targets of 0."""
    return advantages, torch.zeros_like(advantages)
