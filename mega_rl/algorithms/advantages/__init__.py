"""Advantage estimators, each with its settings. A class in a file of this folder is found; nothing else names it.

Recipes choose by `name`, as `algorithm.advantage=gae`. Config reads these files without torch, so an estimator imports
it when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mega_rl.config.setting import Kind, kinds_below

if TYPE_CHECKING:
    from mega_rl.algorithms.inputs import AdvantageInputs, Advantages


@dataclass(frozen=True)
class AdvantageKind(Kind):
    """An estimator: a dataclass whose fields are its settings. The class variables say what it needs of a run."""

    needs_critic: ClassVar[bool] = False  # values of a critic, which then trains
    needs_groups: ClassVar[bool] = False  # several samples of each prompt
    needs_reference: ClassVar[bool] = False  # log-probs of the reference, which is built even without a KL to it
    needs_greedy: ClassVar[bool] = False  # the reward of a greedy response to each prompt
    needs_parts: ClassVar[bool] = False  # named parts of the rewards
    takes_kl: ClassVar[bool] = False  # has rewards of single tokens, which a KL penalty may enter
    needs_no_rewards: ClassVar[bool] = False  # may learn without them: reward.source=none

    def __call__(self, inputs: AdvantageInputs, /) -> Advantages:
        """Return (advantages, value targets), [B, S] float32 each, 0 off the loss mask; zeros without a critic."""
        raise NotImplementedError


ESTIMATORS = kinds_below(__name__, AdvantageKind)
