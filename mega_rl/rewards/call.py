"""Reward functions of every kind behind one form: responses in, an outcome for each out.

`load_functions` finds them by name, and how each is called: with one response or several, sync or async. No torch.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import HungError, UserError
from mega_rl.rewards.builtin import resolve
from mega_rl.rewards.score import (
    NotAScoreError,
    Outcome,
    Response,
    RewardError,
    RewardFailure,
    as_score,
    ignore,
    shortened,
)

if TYPE_CHECKING:
    from mega_rl.types import Prompt  # imports torch

# Parameters of a function of several responses by those of a function of one. Each gets a list.
PLURALS = {
    "prompt": "prompts", "response": "responses", "answer": "answers", "row": "rows", "prompt_index": "prompt_indices",
    "finish": "finishes", "transcript": "transcripts",
} | {name: name for name in ("messages", "num_tokens", "turns", "token_ids", "prompt_ids")}  # fmt: skip
RESPONSE_TEXTS = frozenset({"response", "turns", "transcript", "token_ids"})
# Annotations of an answer that is text, of one response and of several.
_STRINGS = ((str, "str"), (list[str], "list[str]", Sequence[str], "Sequence[str]"))

Arguments: TypeAlias = Mapping[str, object]  # one response's, by parameter
Begin: TypeAlias = Callable[[Sequence[Arguments]], None]  # told of the responses of each call


@dataclass(eq=False)
class PlannedFunction:
    """A reward function, how it is called, and the columns that it needs."""

    function: Callable[..., object]
    parameters: tuple[str, ...]  # given by name, in the singular
    columns: RewardColumns
    batched: bool = False  # whether it takes lists, by the plurals of `parameters`, and returns one
    name: str = ""  # among several functions: the component that it gives
    concurrency: int = 64  # calls of an asynchronous function at a time
    batch_size: int = 64  # most responses of one call, for a function that takes several
    timeout_s: float | None = None  # deadline of an asynchronous call, after which it is cancelled

    @cached_property
    def is_async(self) -> bool:
        """Return whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def per_call(self) -> int:
        """Return how many responses one call takes at most."""
        return self.batch_size if self.batched else 1

    def arguments(self, prompt: Prompt, response: Response) -> dict[str, object]:
        """Return a response's arguments, and its prompt's number; no answer of a row without one."""
        values = {
            "prompt": prompt.text,
            "response": response.text,
            "answer": prompt.answer,
            "row": None if prompt.row is None else dict(prompt.row),
            "messages": [{"role": role, "content": content} for role, content in prompt.messages],
            "prompt_index": prompt.index,
            "finish": response.finish,
            "num_tokens": response.num_tokens,
            "turns": list(response.turns) or [response.text],
            "transcript": response.transcript or response.text,
            "token_ids": list(response.token_ids),
            "prompt_ids": list(prompt.token_ids),
        }
        return {
            name: values[name]
            for name in {*self.parameters, "prompt_index"}
            if name != "answer" or prompt.answer is not None
        }

    def run(
        self,
        batch: Sequence[Arguments],
        begin: Begin = ignore,
        runner: Callable[..., list[Outcome]] = asyncio.run,
    ) -> list[Outcome]:
        """Return the outcome of each response; begin: told of each call. runner: runs a coroutine."""
        scoring = self._score(batch, self.per_call, asyncio.Semaphore(self.concurrency), begin)
        if self.is_async:
            return runner(scoring)
        # Without a loop in this thread a synchronous function may run its own.
        try:
            scoring.send(None)
        except StopIteration as end:
            outcomes: list[Outcome] = end.value
            return outcomes
        raise AssertionError("synchronous functions wait for nothing")

    async def _score(
        self, batch: Sequence[Arguments], size: int, free: asyncio.Semaphore, begin: Begin
    ) -> list[Outcome]:
        chunks = (batch[first : first + size] for first in range(0, len(batch), size))
        calls = (self._call(chunk, free, begin) for chunk in chunks)
        results = await asyncio.gather(*calls) if self.is_async else [await call for call in calls]
        return [outcome for result in results for outcome in result]

    async def _call(self, chunk: Sequence[Arguments], free: asyncio.Semaphore, begin: Begin) -> list[Outcome]:
        """Return the outcomes of one call; if it fails for several responses, call for each."""
        async with free:
            begin(chunk)
            result = await self._results(chunk)
        if isinstance(result, list):
            return result
        if len(chunk) == 1:
            return [result]
        return await self._score(chunk, 1, free, begin)

    async def _results(self, chunk: Sequence[Arguments]) -> list[Outcome] | RewardFailure:
        """Return the outcome of each response, or why the call gave none."""
        limit = asyncio.timeout(self.timeout_s) if self.is_async else None
        try:
            if limit is None:
                value = self(chunk)
            else:
                async with limit:
                    value = await cast(Awaitable[object], self(chunk))
            return [self._outcome(one) for one in (_several(value, len(chunk)) if self.batched else [value])]
        except NotAScoreError as error:
            return RewardFailure("error", f"{self} returned {error}")
        except (HungError, RewardError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - users' code may raise anything
            if limit is not None and limit.expired():
                return self.timed_out(self.timeout_s)
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = traceback.TracebackException(type(error), error, None)  # also for an exception whose text raises
            what = f"raised {type(error).__name__}: {text} (at {place.filename}:{place.lineno})"
            return RewardFailure("error", f"{self} {what}")

    def __call__(self, batch: Sequence[Arguments]) -> object:
        """Return the function's own result, for one response unless it takes several."""
        if self.batched:
            return self.function(**{PLURALS[name]: [one.get(name) for one in batch] for name in self.parameters})
        (one,) = batch
        return self.function(**{name: one[name] for name in self.parameters if name in one})

    def _outcome(self, result: object) -> Outcome:
        try:
            return as_score(result)
        except NotAScoreError as error:
            return RewardFailure("error", f"{self} returned {error}")

    def timed_out(self, timeout_s: float | None) -> RewardFailure:
        """Return the outcome of a call that took too long."""
        return RewardFailure("timeout", f"{self} took longer than reward.source.timeout_s={timeout_s:g}")

    def __str__(self) -> str:
        return f"the reward function {self.name!r}" if self.name else "the reward function"


def _several(value: object, size: int) -> list[object]:
    """Return the results of a function of several responses. Raises NotAScoreError."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise NotAScoreError(f"{shortened(value)}, which is not a list with a score for each response")
    results = list(value)
    if len(results) != size:
        raise NotAScoreError(f"{len(results)} scores for {size} response{'s' if size > 1 else ''}")
    return results


def plan(function: Callable[..., object], **settings: Any) -> PlannedFunction:
    """Return how to call a reward function; settings: fields of `PlannedFunction`, as name and batch_size.

    It is called by the names of its parameters, those of `PLURALS`, and need not take all of them. With a parameter
    that is a plural it takes several responses. It must take one of `RESPONSE_TEXTS`. Raises TypeError for any other.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C need not have one
        raise TypeError("has no signature; wrap it in a function with the parameter response") from None
    everything = signature.parameters.values()
    named = {one.name: one for one in everything if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    batched = any(name in named for single, name in PLURALS.items() if name != single)
    known = PLURALS if batched else {name: name for name in PLURALS}
    taken = tuple(single for single, name in known.items() if name in named)
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {one.name for one in everything if one.default is one.empty and one.kind not in rest}
    mixed = batched and any(name in named for name in PLURALS if name not in PLURALS.values())
    if mixed or RESPONSE_TEXTS.isdisjoint(taken) or not required <= {known[name] for name in taken}:
        raise TypeError(
            f"has the signature {signature}; it takes one response, by the names {', '.join(PLURALS)}, or lists of "
            f"several, by {', '.join(PLURALS.values())}; response, transcript, turns or token_ids among them"
        )
    answer = named.get(known["answer"])
    columns = RewardColumns(
        answer=answer is not None and answer.default is answer.empty,
        structured=answer is None or answer.annotation not in _STRINGS[batched],
        every="row" in taken,
    )
    return PlannedFunction(function, taken, columns, batched=batched, **settings)


def load_functions(
    functions: str | Mapping[str, str], *, given: Callable[..., object] | None = None, **settings: float | None
) -> list[PlannedFunction]:
    """Return the function that a name stands for, or several by name; settings: fields of `PlannedFunction`.

    given: the function itself, from a Python program; `functions` is then its name in messages. Raises UserError.
    """
    named = {"": functions} if isinstance(functions, str) else functions
    loaded = []
    for name, spec in named.items():
        key = f"reward.functions.{name}" if name else "reward.function"
        function = resolve(spec, key=key) if given is None else given
        if not callable(function):
            raise UserError(f"{key}={spec!r}: is of type {type(function).__name__}, not a function")
        try:
            loaded.append(plan(function, name=name, **settings))
        except TypeError as error:
            raise UserError(f"{key}={spec!r}: {error}") from error
    return loaded
