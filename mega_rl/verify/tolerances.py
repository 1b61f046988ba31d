"""Tolerances of layouts against one rank, and of runs against the independent trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mega_rl.errors import UserError

# The largest errors of a layout that pass: logprob in nats, of any token; loss and grad_norm relative; gradient of any
# tensor in the Frobenius norm, relative to one rank's; weight of any tensor after a step, relative to that step.
# In float32, sums in another order differ by 1e-6 to 1e-5 of their size; a wrong layout is off by 1e-2 in some tensor.
FP32: Mapping[str, float] = {"logprob": 1e-4, "loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-4, "weight": 1e-4}
# bf16 keeps 8 bits: activations differ by some 2^-8 of their size at every layer, gradients by a few hundredths.
BF16: Mapping[str, float] = {"logprob": 0.15, "loss": 0.05, "grad_norm": 0.05, "gradient": 0.2, "weight": 0.2}
# If two experts are close, rounding sends a token to another one, which moves both experts' gradients.
BF16_EXPERTS: Mapping[str, float] = {**BF16, "logprob": 0.6, "gradient": 0.75, "weight": 0.75}

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


def tolerances(dtype: str, given: str, *, experts: bool = False) -> dict[str, float]:
    """Return a layout's tolerances in a dtype, changed by `given`, as "logprob=1e-3,loss=1e-3". Raises UserError."""
    return read_changes(given, FP32 if dtype == "fp32" else BF16_EXPERTS if experts else BF16, kind="name")


def read_changes(given: str, usual: Mapping[str, float], *, kind: str = "phase") -> dict[str, float]:
    """Return the tolerances, changed by `given`, as "gradient=1e-4"; kind: the word for a name. Raises UserError."""
    names, allowed = [name for name in usual if name not in EXACT], dict(usual)
    for entry in filter(None, (part.strip() for part in given.split(","))):
        name, _, text = entry.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in names or not 0 <= value < float("inf"):
            raise UserError(
                f"--tolerance={entry}: must be {kind.upper()}=NUMBER with a {kind} of {', '.join(names)} and a number "
                "of at least 0"
            )
        allowed[name] = value
    return allowed


def finite(error: float) -> float:
    """Return the error, infinite if it is not a number, so that it exceeds any tolerance."""
    return error if math.isfinite(error) else math.inf
