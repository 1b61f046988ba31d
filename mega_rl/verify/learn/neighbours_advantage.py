"""A wrong estimator, for an ablation: every row gets the advantage of the row after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mega_rl.algorithms.inputs import AdvantageInputs, PromptGroups


@dataclass(frozen=True)
class NeighboursAdvantage:
    """Group-relative advantages, moved by one row: right in scale, wrong about every response."""

    needs_groups: ClassVar[bool] = True

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return (advantages, zeros), [B, S] float32 each."""
        groups = PromptGroups.of(inputs.experience.prompt_index.roll(-1), inputs.mask)
        centred = groups.centred(inputs.rewards.roll(-1))
        deviation = (groups.sum(centred.square()) / (groups.counts - 1).clamp(min=1)).sqrt()
        return inputs.on_responses(centred / (deviation + 1e-6))
