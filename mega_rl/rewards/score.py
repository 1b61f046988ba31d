"""Scores of responses, and failures to score one. Imports no torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from mega_rl.errors import RunError

if TYPE_CHECKING:
    from mega_rl.rewards.responses import Response
    from mega_rl.types import Prompt  # which imports torch

SHOWN_CHARACTERS = 200  # longest value in an error
LARGEST = 3.4028234663852886e38  # finite float32
# Metrics below reward/ that every run may have. No component can have such a name. See docs/metrics.md.
TAKEN = (
    "best_groups_fraction", "crashes", "equal_groups_fraction", "errors", "finished_mean", "greedy_mean",
    "group_std_mean", "masked_fraction", "max", "mean", "min", "overlong", "overlong_punishment_mean",
    "sampled_mean", "std", "timeouts", "truncated_mean", "worst_groups_fraction",
)  # fmt: skip

Score: TypeAlias = float | dict[str, float] | None  # a number, named components, or None to leave the response out


@dataclass(frozen=True)
class RewardFailure:
    """Outcome of a response that could not be scored."""

    kind: Literal["timeout", "crash", "error"]
    what: str  # "the reward function raised ..."


Outcome: TypeAlias = Score | RewardFailure
Item: TypeAlias = "tuple[Prompt, Response]"
Report: TypeAlias = Callable[[str], None]  # receives what the source of scores waits for from now on: "prompt 17"


class ScoreSource(Protocol):
    """Source of scores for responses as texts."""

    longest_s: float  # seconds of the longest call or request since a caller set it to 0

    def score(self, items: Sequence[Item], report: Report) -> list[Outcome]:
        """Return the outcome of each response; calls `report` at the start of each call or request.

        Raises RewardError where the source as a whole is at fault.
        """
        ...


class RewardError(RunError):
    """Rewards end the run: a service or model failed, or too many responses have no score."""


class NotAScoreError(ValueError):
    """A value is not a score; the message shows it and says why."""


def ignore(what: str) -> None:
    """Take a report that nobody reads."""


def no_score(what: str, prompt: Prompt, response: Response) -> RewardError:
    """Return the error that a response has no score; what: the cause in words."""
    return RewardError(
        f"{what}; prompt {prompt.index}: {shortened(prompt.text)}, response: {shortened(response.text)}, "
        f"answer: {shortened(prompt.answer)}"
    )


def as_score(value: object) -> Score:
    """Return a number, components in alphabetical order, each finite in float32, or None. Raises NotAScoreError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return _as_number(value, f"{shortened(value)}, which")
    if not value:
        raise NotAScoreError("{}, which has no part")
    for name in value:
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise NotAScoreError(f"{shortened(value)}, whose part {shortened(name)} is not named by letters, digits, _")
        if name in TAKEN:
            raise NotAScoreError(f"{shortened(value)}, whose part {name!r} has the name of another metric; rename it")
    return {name: _as_number(value[name], f"{shortened(value)}, whose part {name!r}") for name in sorted(value)}


def _as_number(value: object, subject: str) -> float:
    if not isinstance(value, numbers.Real):
        fix = "; wrap it in float()" if hasattr(value, "__float__") else ""  # a bool of NumPy, a tensor, a Decimal
        raise NotAScoreError(f"{subject} is not a number{fix}")
    try:
        number = float(value)
    except OverflowError:  # an integer above float64
        number = math.inf
    if not is_finite(number):
        raise NotAScoreError(f"{subject} is not finite in float32")
    return number


def is_finite(number: float) -> bool:
    """Return whether the number is finite as a float32: 1e300 is not."""
    return abs(number) <= LARGEST


def shortened(value: object) -> str:
    """Return its repr, cut to the length that an error shows."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"
