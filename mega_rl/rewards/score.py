"""Responses as texts, their scores, and failures to score one. Imports no torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from mega_rl.errors import RunError

if TYPE_CHECKING:
    from mega_rl.types import Prompt, Rollout  # imports torch


@dataclass(frozen=True)
class Response:
    """A response as rewards read it."""

    text: str  # the policy's turns, one a line, without the stop tokens that ended them
    num_tokens: int  # sampled by the policy, stop tokens included
    finish: Literal["stop", "length"]  # the task is done, or cut off by length or a limit of turns
    turns: tuple[str, ...] = ()  # the policy's, where others such as tools have written between them
    transcript: str = ""  # text with what others have written, where they have
    token_ids: tuple[int, ...] = ()  # after the prompt, others' included, without stop tokens that ended turns


def answered(rollout: Rollout) -> list[int]:
    """Return the first rows of trajectories that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    first = rows_of_trajectories(rollout)
    return [row for row, without in enumerate(failed) if not without and row in first]


def rows_of_trajectories(rollout: Rollout) -> dict[int, list[int]]:
    """Return the rows of each trajectory by its first one."""
    branches = [0] * len(rollout.lengths) if rollout.branch is None else rollout.branch.tolist()
    rows: dict[int, list[int]] = {}
    for row, branch in enumerate(branches):
        rows.setdefault(row - branch, []).append(row)
    return rows


@dataclass(frozen=True)
class ResponseReader:
    """Reader of responses: the same text for rewards, votes and dumps.

    decode: turns token ids into text. stop_ids: tokens that end a turn; those that the policy sampled are in no text.
    """

    decode: Callable[[Sequence[int]], str]
    stop_ids: Collection[int] = ()

    def texts(self, rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt]) -> list[tuple[Prompt, Response]]:
        """Return (prompt, decoded response) of the trajectories with these first rows."""
        indices = rollout.prompt_index.tolist()
        return [(prompts[indices[row]], one) for row, one in zip(rows, self._read(rollout, rows), strict=True)]

    def written(self, rollout: Rollout, row: int) -> tuple[str, str]:
        """Return the text of a row's trajectory for rewards, and with what others wrote."""
        (response,) = self._read(rollout, [row if rollout.branch is None else row - int(rollout.branch[row])])
        return response.text, response.transcript or response.text

    def _read(self, rollout: Rollout, first_rows: Sequence[int]) -> list[Response]:
        of_trajectory = rows_of_trajectories(rollout)
        rows = [row for first in first_rows for row in of_trajectory[first]]
        # One copy from the device for each field: a read of one element waits for the device.
        fields = (rollout.tokens, rollout.loss_mask, rollout.prompt_lengths, rollout.lengths, rollout.finished)
        columns = (field[rows].tolist() for field in fields)
        read = {
            row: self._response(tokens[first:end], own[first:end], finished)
            for row, tokens, own, first, end, finished in zip(rows, *columns, strict=True)
        }
        return [self._joined([read[row] for row in of_trajectory[first]]) for first in first_rows]

    @staticmethod
    def _joined(rows: Sequence[Response]) -> Response:
        """Return the response of a trajectory: the turns of all rows in order."""
        if len(rows) == 1:
            return rows[0]
        turns = tuple(turn for row in rows for turn in row.turns or ((row.text,) if row.text else ()))
        transcript = "\n".join(row.transcript or row.text for row in rows)
        ids = tuple(token for row in rows for token in row.token_ids)
        count = sum(row.num_tokens for row in rows)
        return Response("\n".join(turns), count, rows[-1].finish, turns=turns, transcript=transcript, token_ids=ids)

    def _response(self, ids: list[int], own: list[bool], finished: bool) -> Response:
        """Read a row's tokens after its prompt; own: those that the policy sampled."""
        ends = [sampled and token in self.stop_ids for token, sampled in zip(ids, own, strict=True)]
        kept = tuple(token for token, is_end in zip(ids, ends, strict=True) if not is_end)
        runs = groupby(range(len(ids)), key=lambda place: own[place] and not ends[place])
        turns = [tuple(ids[place] for place in run) for is_turn, run in runs if is_turn]
        text = self.decode(kept)
        finish: Literal["stop", "length"] = "stop" if finished else "length"
        if turns == ([kept] if kept else []):
            return Response(text, sum(own), finish, token_ids=kept)
        texts = tuple(map(self.decode, turns))
        return Response("\n".join(texts), sum(own), finish, turns=texts, transcript=text, token_ids=kept)


SHOWN_CHARACTERS = 200  # longest value in an error
LARGEST = 3.4028234663852886e38  # finite float32
# Metrics below reward/ that every run may have. No component can have such a name. See docs/metrics.md.
TAKEN = (
    "best_groups_fraction", "crashes", "equal_groups_fraction", "errors", "finished_mean", "greedy_mean",
    "group_std_mean", "masked_fraction", "max", "mean", "min", "overlong", "overlong_punishment_mean",
    "sampled_mean", "std", "timeouts", "truncated_mean", "worst_groups_fraction",
)  # fmt: skip

Score: TypeAlias = float | dict[str, float] | None  # a number, named components, or None to leave the response out


class RewardFailure(NamedTuple):
    """Outcome of a response that could not be scored; a list in JSON."""

    kind: Literal["timeout", "crash", "error"]
    what: str  # "the reward function raised ..."

    @staticmethod
    def or_score(value: Any) -> Outcome:
        """Return the outcome that a value from JSON is."""
        return RewardFailure(*value) if isinstance(value, list) else value


Outcome: TypeAlias = Score | RewardFailure
Item: TypeAlias = "tuple[Prompt, Response]"
Report: TypeAlias = Callable[[str], None]  # receives what the source of scores waits for from now on: "prompt 17"


class RewardError(RunError):
    """Rewards end the run: a service or model failed, or too many responses have no score."""


class NotAScoreError(ValueError):
    """A value is not a score; the message shows it and says why."""


def ignore(what: object) -> None:
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
    for name in value:
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()) or name in TAKEN:
            raise NotAScoreError(
                f"{shortened(value)}, whose part {shortened(name)} is not named by letters, digits, _, or has the name "
                "of another metric; rename it"
            )
    if not value:
        raise NotAScoreError("{}, which has no part")
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
