"""Phases of an update in the order in which each follows from those before, and how far off each may be.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.verify.tolerances import read_changes

UPDATES = "updates"
REWARDS = "rewards"
SAMPLING = "sampling"
SAMPLES = "samples"
EXACT = (UPDATES, REWARDS, SAMPLING)  # which have no other tolerance
# Of float32 sums of some hundred terms in another order; what is wrong somewhere is off by 1e-3 and more.
TOLERANCES: Mapping[str, float] = {
    UPDATES: 0.0,  # the same ones were made
    REWARDS: 0.0,  # of every sample, as float32: one function of the same text, rounded once
    SAMPLING: 0.0,  # of dynamic sampling: groups of the step that are not those to train on
    "log-probs": 1e-4,  # nats; of a critic values; largest of any token
    SAMPLES: 4.5,  # deviations of the largest of four sums, which one right run in 37,000 exceeds
    "advantages": 1e-4,  # and returns; largest of any token
    "loss": 1e-5,  # relative to the sum of the tokens' |losses|, which may cancel
    "gradient norm": 1e-5,  # relative
    "gradient": 1e-5,  # relative, of the tensor that is furthest off, in the Frobenius norm
    "weights": 1e-4,  # distance, relative to that travelled since the start
}


def read_tolerances(given: str) -> dict[str, float]:
    """Return the tolerances, changed by `given`, as "gradient=1e-4,log-probs=1e-3". Raises UserError."""
    return {**TOLERANCES, **read_changes(given, [name for name in TOLERANCES if name not in EXACT], what="phase")}


@dataclass(frozen=True)
class UpdateErrors:
    """Distance of one optimizer step of the real trainer from the independent trainer's."""

    role: str  # actor, critic
    step: int  # from 0
    update: int  # number of the mini-batch in its step, from 0
    errors: Mapping[str, float]  # by phase, in the order of `TOLERANCES`, of the phases that the run has
    worst: str  # name of the tensor whose gradient is furthest off

    @property
    def title(self) -> str:
        """Return the update in words."""
        return f"step {self.step + 1}, {self.role} update {self.update + 1}"
