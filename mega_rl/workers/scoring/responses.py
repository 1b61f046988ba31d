"""Responses of a rollout as rewards read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from mega_rl.types import Prompt, Rollout
from mega_rl.workers.reward_calls import Response


def answered(rollout: Rollout) -> list[int]:
    """Return the rows that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    return [row for row, without in enumerate(failed) if not without]


def texts(
    rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
) -> list[tuple[Prompt, Response]]:
    """Return (prompt, decoded response) of these rows."""
    indices, sampled = rollout.prompt_index.tolist(), responses(rollout)
    return [(prompts[indices[row]], sampled[row].read(decode)) for row in rows]


class SampledResponse(NamedTuple):
    """Token ids between a prompt and the end of its row."""

    token_ids: tuple[int, ...]  # without the stop token that ended it
    finished: bool  # by a stop token rather than by length
    others: tuple[tuple[int, int], ...] = ()  # (start, stop) of each run of tokens that the policy did not sample

    def read(self, decode: Callable[[Sequence[int]], str]) -> Response:
        """Return the response as rewards read it."""
        text = decode(self.token_ids)
        num_tokens = len(self.token_ids) - sum(stop - start for start, stop in self.others) + self.finished
        finish: Literal["stop", "length"] = "stop" if self.finished else "length"
        if not self.others:
            return Response(text, num_tokens, finish, token_ids=self.token_ids)
        starts, stops = zip(*self.others, strict=True)
        own = zip((0, *stops), (*starts, len(self.token_ids)), strict=True)
        turns = tuple(decode(self.token_ids[start:stop]) for start, stop in own if start < stop)
        return Response("\n".join(turns), num_tokens, finish, turns=turns, transcript=text, token_ids=self.token_ids)


def responses(rollout: Rollout) -> list[SampledResponse]:
    """Return the response of each row."""
    columns = (rollout.tokens, rollout.loss_mask, rollout.prompt_lengths, rollout.lengths, rollout.finished)
    return [
        _response(ids[start:end], own[start:end], finished=finished)
        for ids, own, start, end, finished in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _response(token_ids: list[int], own: list[bool], *, finished: bool) -> SampledResponse:
    """Return the response of one row; own: which tokens the policy sampled, the last one a stop token if finished."""
    places = [place for place, sampled in enumerate(own) if sampled]
    if finished and places:
        del token_ids[places[-1]], own[places[-1]]
    changes = [place for place in range(1, len(own)) if own[place] != own[place - 1]]
    runs = zip((0, *changes), (*changes, len(own)), strict=True)
    others = tuple((start, stop) for start, stop in runs if start < stop and not own[start])
    return SampledResponse(tuple(token_ids), finished, others)
