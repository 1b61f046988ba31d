"""Reward role over texts: the ranks of a replica share its responses, score each once, and exchange the scores."""

from __future__ import annotations

import numbers
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import all_failures
from mega_rl.protocols import Ranks
from mega_rl.types import Prompt, Rollout
from mega_rl.workers.reward_calls import plan_call

SHOWN_CHARACTERS = 200  # of a prompt or response in an error


class RewardError(RunError):
    """A response has no score: a function raised, or a service or model gave something that is not a finite number."""


class TextScorer(Protocol):
    """Scorer of responses as texts."""

    def score_texts(self, items: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Return the score of each (prompt, response), finite in float32. Raises RewardError."""
        ...


class RewardWorker:
    """Reward role of one replica.

    Each rank of the replica scores its share of the rows, every size-th one, and all get the sum: a scorer that is
    slow, random or a service sees each response once, and all ranks of a replica train on the same numbers.
    """

    def __init__(
        self,
        scorer: TextScorer,
        *,
        decode: Callable[[Sequence[int]], str],
        replica: Ranks,
        everyone: Ranks,
    ) -> None:
        """`decode` turns response token ids into text and leaves special tokens out; `everyone` are all ranks."""
        self._scorer = scorer
        self._decode = decode
        self._replica = replica
        self._everyone = everyone

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Tensor:
        """Return the reward of each row, [B] float32 on the device of the rollout; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. The text that is scored is the
        response without the stop token that ended it (where `finished`). Failed samples are not scored: 0.
        Raises RewardError on every rank of the run, naming prompt, response and cause of the lowest rank's.
        """
        device = rollout.tokens.device
        scores = torch.zeros(len(rollout.lengths), dtype=torch.float32)
        failure: RewardError | None = None
        # Neighbours are samples of one prompt and of like lengths, so a rank does not take them all.
        rows = answered(rollout)[self._replica.rank :: self._replica.size]
        try:
            row_scores = self._scorer.score_texts(texts(rollout, rows, prompts, self._decode))
        except RewardError as error:
            failure = error
        else:
            scores[rows] = torch.tensor(row_scores, dtype=torch.float32)
        messages, _ = all_failures(None if failure is None else str(failure), self._everyone, most=1)
        for rank, message in messages.items():
            raise failure if failure is not None and rank == self._everyone.rank else RewardError(message)
        return self._replica.sum(scores.to(device))


class FunctionRewards:
    """Scores by a function, called for one response after the other as `mega_rl.workers.reward_calls` says."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._call = plan_call(function)

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the function reads."""
        return self._call.columns

    def score_texts(self, items: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Return the scores; stops at the first response that has none."""
        return [self._score_one(prompt, response) for prompt, response in items]

    def _score_one(self, prompt: Prompt, response: str) -> float:
        try:
            value = self._call(prompt, response)
            number = float(value) if isinstance(value, numbers.Real) else None
        except Exception as error:  # the user's code may raise anything; the cause is kept
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})"
            raise no_score(f"the reward function {what}", prompt, response) from error
        if number is None:
            raise no_score(f"the reward function returned {shortened(value)}, which is not a number", prompt, response)
        if not is_finite(number):
            what = f"the reward function returned {value!r}, which is not finite in float32"
            raise no_score(what, prompt, response)
        return number


def answered(rollout: Rollout) -> list[int]:
    """Return the rows that have an answer to score, in order."""
    failed = [False] * len(rollout.lengths) if rollout.failed is None else rollout.failed.tolist()
    return [row for row, without in enumerate(failed) if not without]


def texts(
    rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
) -> list[tuple[Prompt, str]]:
    """Return (prompt, decoded response) of these rows."""
    indices, token_ids = rollout.prompt_index.tolist(), responses(rollout)
    return [(prompts[indices[row]], decode(token_ids[row])) for row in rows]


def responses(rollout: Rollout) -> list[list[int]]:
    """Return the response token ids of each row, without the stop token of those that ended by one."""
    ends = rollout.lengths - rollout.finished.to(torch.int64)
    tokens = rollout.tokens.tolist()
    bounds = zip(rollout.prompt_lengths.tolist(), ends.tolist(), strict=True)
    return [ids[start:end] for ids, (start, end) in zip(tokens, bounds, strict=True)]


def is_finite(number: float) -> bool:
    """Return whether the number is finite as a float32: 1e300 is not."""
    return abs(number) <= torch.finfo(torch.float32).max


def no_score(what: str, prompt: Prompt, response: str) -> RewardError:
    """Return the error of a response without a score."""
    return RewardError(
        f"{what}; prompt {prompt.index}: {shortened(prompt.text)}, response: {shortened(response)}, "
        f"answer: {shortened(prompt.answer)}"
    )


def shortened(value: object) -> str:
    """Return its repr, cut to the length that an error shows."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"
