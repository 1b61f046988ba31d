"""Inputs of advantage estimators from plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mega_rl.algorithms.inputs import AdvantageEstimator, AdvantageInputs
from mega_rl.algorithms.statistics import SumOverRanks, identity
from mega_rl.types import Experience, RewardParts


def inputs_of(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    kl_penalty: Tensor | None = None,
    sum_over_ranks: SumOverRanks = identity,
    greedy: Tensor | None = None,
    parts: RewardParts | None = None,
    **fields: Any,
) -> AdvantageInputs:
    """The inputs of rows with these rewards [B], prompts [B] and loss mask [B, S]; `fields` are of the experience."""
    rows = torch.zeros(mask.shape, dtype=torch.int64)
    lengths = torch.full((len(rows),), rows.shape[1])
    experience = Experience.from_rows(
        rows, prompt_lengths=lengths, lengths=lengths, loss_mask=mask, prompt_index=group_ids, **fields
    )
    return AdvantageInputs(experience, rewards, kl_penalty, sum_over_ranks, greedy, parts)


def advantages_of(
    estimator: AdvantageEstimator, rewards: Tensor, group_ids: Tensor, mask: Tensor, **more: Any
) -> Tensor:
    """The advantages, [B, S], of an estimator that needs no critic."""
    advantages, returns = estimator(inputs_of(rewards, group_ids, mask, **more))
    assert not returns.any()
    assert advantages.dtype == returns.dtype == torch.float32
    return advantages
