"""Responses of a rollout as texts, for rewards, votes and dumps. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mega_rl.types import Prompt, Rollout  # which imports torch


@dataclass(frozen=True)
class Response:
    """A response as rewards read it."""

    text: str  # the policy's turns, one a line, without the stop tokens that ended them
    num_tokens: int  # sampled by the policy, stop tokens included
    finish: Literal["stop", "length"]  # complete, or cut off by length or a limit of turns
    turns: tuple[str, ...] = ()  # the policy's, where others such as tools have written between them
    transcript: str = ""  # text with what others have written, where they have
    token_ids: tuple[int, ...] = ()  # after the prompt, others' included, without stop tokens that ended turns


def answered(rollout: Rollout) -> list[int]:
    """Return the rows that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    return [row for row, without in enumerate(failed) if not without]


@dataclass(frozen=True)
class ResponseReader:
    """Reader of responses: the same text for rewards, votes and dumps.

    decode: turns token ids into text. stop_ids: tokens that end a turn; those that the policy sampled are in no text.
    """

    decode: Callable[[Sequence[int]], str]
    stop_ids: Collection[int] = ()

    def texts(self, rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt]) -> list[tuple[Prompt, Response]]:
        """Return (prompt, decoded response) of these rows."""
        indices = rollout.prompt_index.tolist()
        return [(prompts[indices[row]], one) for row, one in zip(rows, self._read(rollout, rows), strict=True)]

    def written(self, rollout: Rollout, row: int) -> tuple[str, str]:
        """Return a row's text as rewards read it, and the text with what others wrote."""
        (response,) = self._read(rollout, [row])
        return response.text, response.transcript or response.text

    def _read(self, rollout: Rollout, rows: Sequence[int]) -> list[Response]:
        # One copy from the device for each field: a read of one element waits for the device.
        fields = (rollout.tokens, rollout.loss_mask, rollout.prompt_lengths, rollout.lengths, rollout.finished)
        columns = (field[list(rows)].tolist() for field in fields)
        return [
            self._response(tokens[first:end], own[first:end], finished)
            for tokens, own, first, end, finished in zip(*columns, strict=True)
        ]

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
