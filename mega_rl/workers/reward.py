"""The reward role: a function of strings, applied to sampled tokens."""

from __future__ import annotations

import numbers
import traceback
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.parallel.together import raise_together
from mega_rl.protocols import Ranks
from mega_rl.types import Prompt, Rollout

SHOWN_CHARACTERS = 200  # of a prompt or response in an error


class RewardError(RunError):
    """The reward function raised, or returned something that is no finite number."""


class RewardWorker:
    """Scores the rollouts of one replica.

    The function runs on rank 0 of the replica and the scores are broadcast: a function that is slow, random or calls a
    service is called once per response, and all ranks of a replica train on the same numbers.
    """

    def __init__(
        self,
        function: Callable[[str, str, str], object],
        *,
        decode: Callable[[Sequence[int]], str],
        replica: Ranks,
        everyone: Ranks,
    ) -> None:
        """`decode` turns response token ids into text and leaves special tokens out; `everyone` are all ranks."""
        self._function = function
        self._decode = decode
        self._replica = replica
        self._everyone = everyone

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32, the reward of each row, on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop token that ended it (where `finished`). Failed samples are not scored: 0.
        Raises RewardError on every rank of the run, naming prompt, response and cause.
        """
        device = rollout.tokens.device
        scores = torch.zeros(len(rollout.lengths), dtype=torch.float32)
        failure: RewardError | None = None
        if self._replica.rank == 0:
            try:
                scores = self._score_here(rollout, prompts)
            except RewardError as error:
                failure = error
        raise_together(failure, self._everyone, error=RewardError)
        return self._replica.broadcast(scores.to(device))

    def _score_here(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Tensor:
        """Every row's score; raises RewardError at the first row that has none."""
        scores = torch.zeros(len(rollout.lengths), dtype=torch.float32)
        indices = rollout.prompt_index.tolist()
        for row, token_ids in enumerate(responses(rollout)):
            if rollout.failed is None or not rollout.failed[row]:
                scores[row] = self._score_one(prompts[indices[row]], self._decode(token_ids))
        return scores

    def _score_one(self, prompt: Prompt, response: str) -> float:
        try:
            value = self._function(prompt.text, response, prompt.answer)
            number = float(value) if isinstance(value, numbers.Real) else None
        except Exception as error:  # the user's code may raise anything; the cause is kept
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})"
            raise _failure(what, prompt, response) from error
        if number is None:
            raise _failure(f"returned {_cut(value)}, which is no number", prompt, response)
        # The score becomes a float32: 1e300 is finite only before that.
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise _failure(f"returned {value!r}, which is not finite in float32", prompt, response)
        return number


def responses(rollout: Rollout) -> list[list[int]]:
    """The response token ids of each row, without the stop token of those that ended by one."""
    ends = rollout.lengths - rollout.finished.to(torch.int64)
    tokens = rollout.tokens.tolist()
    bounds = zip(rollout.prompt_lengths.tolist(), ends.tolist(), strict=True)
    return [ids[start:end] for ids, (start, end) in zip(tokens, bounds, strict=True)]


def _failure(what: str, prompt: Prompt, response: str) -> RewardError:
    return RewardError(
        f"the reward function {what}; prompt {prompt.index}: {_cut(prompt.text)}, response: {_cut(response)}, "
        f"answer: {_cut(prompt.answer)}"
    )


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"
