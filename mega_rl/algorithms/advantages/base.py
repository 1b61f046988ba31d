"""Advantage estimators: from rewards (and values) to a number for each response token.

Every [B, S] tensor is aligned to the token that it describes (see mega_rl.types); `mask` is the loss mask, True on
response tokens, in one run per row or in several. Everything off the mask is ignored on input and 0 on output.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mega_rl.algorithms.statistics import SumOverRanks
from mega_rl.types import Experience

# (experience whose advantages and returns are blank, rewards [B] float32, sum over data-parallel ranks)
# -> (advantages, returns), [B, S] float32 each, 0 off the mask
AdvantageEstimator = Callable[[Experience, Tensor, SumOverRanks], tuple[Tensor, Tensor]]
