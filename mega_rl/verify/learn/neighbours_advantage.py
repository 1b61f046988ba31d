"""A wrong estimator, for an ablation: every row gets the advantage of the row after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.groups import grpo


@dataclass(frozen=True)
class NeighboursAdvantage:
    """Group-relative advantages, moved by one row: right in scale, wrong about every response."""

    needs_groups: ClassVar[bool] = True

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return (advantages, zeros), [B, S] float32 each."""
        experience = inputs.experience
        advantages = grpo(inputs.rewards.roll(-1), experience.prompt_index.roll(-1), experience.loss_mask)
        return advantages, 0.0 * advantages
