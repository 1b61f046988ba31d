"""What engines have in common around a step: what is kept of a micro-batch, and the state that goes with weights."""

from __future__ import annotations

from collections.abc import Mapping

from mega_rl.errors import RunError, UserError
from mega_rl.protocols import LossOutput
from mega_rl.types import TokenOutputs

STEPS = "optimizer_steps"  # the number of an engine's state


class NonFiniteGradientError(RunError):
    """A loss or gradient is NaN or infinite; the weights and moments are unchanged."""


def detached(outputs: TokenOutputs, loss: LossOutput) -> tuple[TokenOutputs, LossOutput]:
    """Return outputs and loss detached from autograd."""
    seen = {name: value.detach() for name, value in vars(outputs).items() if value is not None}
    kept = LossOutput(
        loss=loss.loss.detach(),
        sums={name: value.detach() for name, value in loss.sums.items()},
        maxima={name: value.detach() for name, value in loss.maxima.items()},
    )
    return TokenOutputs(**seen), kept


def check_numbers(name: str, numbers: Mapping[str, int | float], *, trains: bool) -> int:
    """The optimizer's steps of a checkpoint's numbers, 0 for a model that does not train.

    Raises:
        UserError: the numbers are not those of an engine; `name` is its role.
    """
    expected = [STEPS] if trains else []
    if sorted(numbers) != expected:
        raise UserError(
            f"{name}: the checkpoint's numbers of this model are {sorted(numbers)}, must be {expected}: it is "
            "of another kind of model; set checkpoint.resume=never (what is there is kept, in previous/) or to another "
            "checkpoint"
        )
    steps = numbers[STEPS] if trains else 0
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise UserError(f"{name}: {STEPS}={steps!r} of the checkpoint must be a whole number from 0")
    return steps
