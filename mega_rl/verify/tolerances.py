"""Tolerances for a layout against one rank, and for a run against the independent trainer, with their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from mega_rl.errors import UserError


@dataclass(frozen=True)
class Tolerances:
    """The largest errors that pass."""

    logprob: float  # nats, of any token
    loss: float  # relative
    grad_norm: float  # relative
    gradient: float  # largest of any tensor in the Frobenius norm, relative to one rank's
    weight: float  # largest of any tensor after an optimizer step, relative to the distance of one rank's step


# Sums of some thousand float32 terms in another order differ by 1e-6 of their size, and through a deep model by ten
# times that. A layout that is wrong somewhere is off by 1e-2 and more in some tensor.
FP32 = Tolerances(logprob=1e-4, loss=1e-5, grad_norm=1e-5, gradient=1e-4, weight=1e-4)
# bf16 keeps 8 bits. Each layout rounds partial sums in other places, so activations differ by some 2^-8 of their size
# at every layer, gradients by a few hundredths, those of small tensors by more.
BF16 = Tolerances(logprob=0.15, loss=0.05, grad_norm=0.05, gradient=0.2, weight=0.2)
# Where two experts are close, rounding sends a token to another one: its log-prob moves, and the gradients of both
# experts by a token's share. Half of a small expert's gradient is measured; the norm over all hardly moves.
BF16_EXPERTS = replace(BF16, logprob=0.6, gradient=0.75, weight=0.75)

# Phases of an update of `mega-rl verify rl`.
UPDATES = "updates"
REWARDS = "rewards"
SAMPLING = "sampling"
SAMPLES = "samples"
EXACT = (UPDATES, REWARDS, SAMPLING)  # phases whose tolerance cannot be changed
# Float32 sums of some hundred terms in another order; a fault anywhere is off by 1e-3 and more. By phase, each of which
# follows from those before it.
TOLERANCES: Mapping[str, float] = {
    UPDATES: 0.0,  # both trainers made the same updates
    REWARDS: 0.0,  # every sample, as float32: one function of the same text, rounded once
    SAMPLING: 0.0,  # dynamic sampling: groups of the step that should not train
    "log-probs": 1e-4,  # nats, for a critic values; the largest of any token
    SAMPLES: 4.5,  # deviations of the largest of four sums, which one right run in 37,000 exceeds
    "advantages": 1e-4,  # also returns; the largest of any token
    "loss": 1e-5,  # relative to the sum of the tokens' |losses|, which may cancel
    "gradient norm": 1e-5,  # relative
    "gradient": 1e-5,  # relative, the largest of any tensor in the Frobenius norm
    "weights": 1e-4,  # distance, relative to the distance travelled since the start
}


def tolerances(dtype: str, given: str, *, experts: bool = False) -> Tolerances:
    """Return the tolerances of a dtype, changed by `given`, as "logprob=1e-3,gradient=1e-3". Raises UserError."""
    usual = FP32 if dtype == "fp32" else BF16_EXPERTS if experts else BF16
    return replace(usual, **read_changes(given, [field.name for field in fields(Tolerances)], what="name"))


def read_changes(given: str, names: Sequence[str], *, what: str) -> dict[str, float]:
    """Return the tolerances in a text, as "logprob=1e-3,gradient=1e-3"; what: such a name is. Raises UserError."""
    changes = {}
    for entry in filter(None, (part.strip() for part in given.split(","))):
        name, _, text = entry.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in names or not 0 <= value < float("inf"):
            raise UserError(
                f"--tolerance={entry}: must be {what.upper()}=NUMBER with a {what} of {', '.join(names)} and a number "
                "of at least 0"
            )
        changes[name] = value
    return changes


def read_tolerances(given: str) -> dict[str, float]:
    """Return the tolerances, changed by `given`, as "gradient=1e-4,log-probs=1e-3". Raises UserError."""
    return {**TOLERANCES, **read_changes(given, [name for name in TOLERANCES if name not in EXACT], what="phase")}


@dataclass(frozen=True)
class UpdateErrors:
    """Distance of one optimizer step of the real trainer from the independent trainer's."""

    role: str  # actor, critic
    step: int  # counts from 0
    update: int  # number of the mini-batch in its step, from 0
    errors: Mapping[str, float]  # error by phase of the run, in the order of `TOLERANCES`
    worst: str  # name of the tensor whose gradient is furthest off

    @property
    def title(self) -> str:
        """Return the update in words."""
        return f"step {self.step + 1}, {self.role} update {self.update + 1}"
