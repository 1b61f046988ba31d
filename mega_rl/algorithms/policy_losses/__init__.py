"""Policy losses, each with its settings. A class in a new file of this folder is found; nothing else names it.

Recipes choose by `name`, as `algorithm.loss=gspo`. Config reads these files without torch, so a loss imports it when
it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mega_rl.config.setting import Kind, kinds_below

if TYPE_CHECKING:
    from mega_rl.algorithms.losses import PolicyTokens, TokenLoss


@dataclass(frozen=True)
class LossKind(Kind):
    """A policy loss: a dataclass whose fields are its settings, called with the tokens of a micro-batch.

    The class variables say what it needs of a run.
    """

    needs_response_mean: ClassVar[bool] = False  # has one number for a response: a mean over tokens, then responses
    needs_response_advantages: ClassVar[bool] = False  # reads only the mean of a response's advantages
    needs_updates: ClassVar[bool] = False  # several updates of a batch: in the first one nothing is left of it
    needs_teacher: ClassVar[bool] = False  # divergences from the reference over the whole vocabulary

    def __call__(self, tokens: PolicyTokens, /) -> TokenLoss:
        """Return (loss of each token, to be minimised, before `loss_weights`; token means by name: "actor/...")."""
        raise NotImplementedError


LOSSES = kinds_below(__name__, LossKind)
