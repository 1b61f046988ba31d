"""Responses of a rollout as rewards, votes and dumps read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from mega_rl.types import Prompt, Rollout
from mega_rl.workers.reward_calls import Response


def answered(rollout: Rollout) -> list[int]:
    """Return the rows that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    return [row for row, without in enumerate(failed) if not without]


class SampledResponse(NamedTuple):
    """Token ids between a prompt and the end of its row, without the stop tokens that ended the policy's turns."""

    token_ids: tuple[int, ...]  # the policy's and those of others, such as tools
    turns: tuple[tuple[int, ...], ...]  # the policy's turns, without empty ones
    num_tokens: int  # sampled by the policy, stop tokens included
    finished: bool


@dataclass(frozen=True)
class ResponseReader:
    """Reader of responses: the same text for rewards, votes and dumps.

    decode: turns token ids into text. stop_ids: tokens that end a turn; those that the policy sampled are in no text.
    """

    decode: Callable[[Sequence[int]], str]
    stop_ids: Collection[int] = ()

    def responses(self, rollout: Rollout) -> list[SampledResponse]:
        """Return the response of each row."""
        return [self._sampled(rollout, row) for row in range(len(rollout.lengths))]

    def texts(self, rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt]) -> list[tuple[Prompt, Response]]:
        """Return (prompt, decoded response) of these rows."""
        indices = rollout.prompt_index.tolist()
        return [(prompts[indices[row]], self.read(self._sampled(rollout, row))) for row in rows]

    def written(self, rollout: Rollout, row: int) -> tuple[str, str]:
        """Return a row's text as rewards read it, and the text with what others wrote."""
        response = self.read(self._sampled(rollout, row))
        return response.text, response.transcript or response.text

    def read(self, sampled: SampledResponse) -> Response:
        """Return the response as rewards read it."""
        text, ids = self.decode(sampled.token_ids), sampled.token_ids
        finish: Literal["stop", "length"] = "stop" if sampled.finished else "length"
        if sampled.turns == ((ids,) if ids else ()):
            return Response(text, sampled.num_tokens, finish, token_ids=ids)
        turns = tuple(self.decode(turn) for turn in sampled.turns)
        return Response("\n".join(turns), sampled.num_tokens, finish, turns=turns, transcript=text, token_ids=ids)

    def _sampled(self, rollout: Rollout, row: int) -> SampledResponse:
        first, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        ids, own = rollout.tokens[row, first:end].tolist(), rollout.loss_mask[row, first:end].tolist()
        kept = tuple(token for token, sampled in zip(ids, own, strict=True) if not self._ends(token, sampled))
        turns = tuple(tuple(turn) for turn in self._turns(ids, own))
        return SampledResponse(kept, turns, sum(own), bool(rollout.finished[row]))

    def _turns(self, ids: Sequence[int], own: Sequence[bool]) -> Iterator[list[int]]:
        """Yield the tokens that the policy sampled between stop tokens and tokens of others."""
        runs = groupby(zip(ids, own, strict=True), key=lambda each: each[1] and not self._ends(*each))
        yield from ([token for token, _ in run] for is_turn, run in runs if is_turn)

    def _ends(self, token: int, sampled: bool) -> bool:
        return sampled and token in self.stop_ids
