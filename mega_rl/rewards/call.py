"""One call for reward functions of every kind: sync or async, of one response or several.

`plan` finds the call that fits a function's signature, `load_call` loads functions by name, and `RewardCall.score`
scores a batch. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import HungError, UserError
from mega_rl.rewards.builtin import resolve
from mega_rl.rewards.score import NotAScoreError, Outcome, Response, RewardFailure, as_score, shortened

if TYPE_CHECKING:
    from mega_rl.types import Prompt  # which imports torch

TEXTS = ("prompt", "response", "answer")  # given by position to a function whose parameters have other names
FACTS = ("row", "messages", "prompt_index", "finish", "num_tokens", "turns", "transcript", "token_ids", "prompt_ids")
# Parameters of a function of several responses by those of a function of one. Each gets a list.
PLURALS = {
    "prompt": "prompts", "response": "responses", "answer": "answers", "row": "rows", "prompt_index": "prompt_indices",
    "finish": "finishes", "transcript": "transcripts",
} | {name: name for name in ("messages", "num_tokens", "turns", "token_ids", "prompt_ids")}  # fmt: skip
RESPONSE_TEXTS = frozenset({"response", "turns", "transcript", "token_ids"})
_ONLY_PLURALS = frozenset(plural for singular, plural in PLURALS.items() if plural != singular)
_STRINGS = (
    (str, "str"),
    (list[str], "list[str]", Sequence[str], "Sequence[str]"),
)  # annotations for one response, for several
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TRL = (
    "completions is a parameter of TRL, which gives texts or conversations; take the texts as responses, answers as "
    "answers and other columns from rows: docs/rewards.md, Several responses at a time"
)

Arguments = Mapping[str, object]  # one response's, by parameter


@dataclass(frozen=True)
class PlannedFunction:
    """A reward function, the arguments that it takes, and the columns that these need."""

    function: Callable[..., object]
    parameters: tuple[str, ...]  # given by name, in the singular
    columns: RewardColumns
    positional: bool = False  # whether prompt, response and answer are given by position
    batched: bool = False  # whether it takes lists, by the plurals of `parameters`, and returns one
    name: str = ""  # among several functions: the component that it gives

    @cached_property
    def is_async(self) -> bool:
        """Return whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    def arguments(self, prompt: Prompt, response: Response) -> dict[str, object]:
        """Return the arguments for a response by name; no answer of a row without one."""
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
        taken = (*(TEXTS if self.positional else ()), *self.parameters)
        return {name: values[name] for name in taken if name != "answer" or prompt.answer is not None}

    def __call__(self, batch: Sequence[Arguments]) -> object:
        """Return the function's own result, for one response unless it takes several."""
        if self.batched:
            return self.function(**{PLURALS[name]: [one.get(name) for one in batch] for name in self.parameters})
        (one,) = batch
        texts = [one[name] for name in TEXTS if name in one] if self.positional else []
        return self.function(*texts, **{name: one[name] for name in self.parameters if name in one})


def plan(function: Callable[..., object], name: str = "") -> PlannedFunction:
    """Return how to call a reward function; name: the component that it gives.

    If one of its parameters is named as one of `RESPONSE_TEXTS`, and each one without a default as one of `TEXTS` or
    `FACTS`, it is called by these names and need not take all of them. Any other is called as (prompt, response,
    answer), with `FACTS` by name where it has such parameters. One with a parameter that is the plural of one of these
    takes several responses, only by such names.

    Raises:
        TypeError: it can be called in none of these ways.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C need not have one
        return PlannedFunction(function, (), RewardColumns(structured=True), positional=True, name=name)
    parameters = signature.parameters
    if any(one in _ONLY_PLURALS and _by_name(parameter) for one, parameter in parameters.items()):
        taken = _plan_several(signature)
        columns = _columns(taken, parameters.get("answers"), batched=True)
        return PlannedFunction(function, taken, columns, batched=True, name=name)
    named = tuple(one for one, p in parameters.items() if one in (*TEXTS, *FACTS) and _by_name(p))
    by_name = not RESPONSE_TEXTS.isdisjoint(named) and all(
        p.default is not p.empty or p.kind in _REST or one in named for one, p in parameters.items()
    )
    taken = named if by_name else tuple(one for one in named if one in FACTS)
    try:
        signature.bind(*(() if by_name else TEXTS), **dict.fromkeys(taken))
    except TypeError as error:
        if "completions" in parameters:
            raise TypeError(f"has the signature {signature}: {_TRL}") from None
        raise TypeError(
            f"has the signature {signature}, but is called as (prompt, response, answer), with {', '.join(FACTS)} for "
            f"parameters of these names: {error}"
        ) from None
    if by_name:
        return PlannedFunction(function, taken, _columns(taken, parameters.get("answer")), name=name)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    third = [p for p in parameters.values() if p.kind in kinds][2:3]  # none where *args takes the answer
    columns = _columns(taken, third[0] if third else None, positional=True)
    return PlannedFunction(function, taken, columns, positional=True, name=name)


def _plan_several(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the parameters, in the singular, of a function of several responses. Raises TypeError."""
    parameters = signature.parameters
    taken = {singular: plural for singular, plural in PLURALS.items() if plural in parameters}
    has = f"has the signature {signature}, which takes several responses at a time by {', '.join(taken.values())}"
    if "completions" in parameters:
        raise TypeError(f"{has}, but {_TRL}")
    for name, parameter in parameters.items():
        if name in (*TEXTS, *FACTS) and name not in PLURALS.values():
            raise TypeError(f"{has}, and {name} of one; name it {PLURALS[name]}")
        required = parameter.default is parameter.empty and parameter.kind not in _REST
        if required and not (name in taken.values() and _by_name(parameter)):
            raise TypeError(f"{has}, but {name} has no meaning; legal: {', '.join(PLURALS.values())}")
    if RESPONSE_TEXTS.isdisjoint(taken):
        raise TypeError(f"{has}, but none of them is the responses; name a parameter responses")
    return tuple(taken)


def _columns(
    taken: Sequence[str], answer: inspect.Parameter | None, *, positional: bool = False, batched: bool = False
) -> RewardColumns:
    """Return the columns that a function needs. answer: its parameter for the answer."""
    return RewardColumns(
        answer=positional if answer is None else answer.default is answer.empty,
        structured=answer is None or answer.annotation not in _STRINGS[batched],
        every="row" in taken,
    )


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


NAMES = "functions"  # key of a response's arguments: the names of the functions that score it

T = TypeVar("T")


def subject(name: str) -> str:
    """Return how errors name a function."""
    return f"the reward function {name!r}" if name else "the reward function"


class CallWatch:
    """Observer of the calls for one batch. Rows are positions in the batch."""

    longest_s = 0.0  # seconds of the longest call

    def begin(self, rows: Sequence[int], name: str) -> None:
        """Note that a function is called for some rows."""

    def end(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note the outcomes of some rows after all their functions."""


@dataclass(frozen=True)
class RewardCall:
    """Reward functions of a run, behind one call for a batch of responses."""

    functions: tuple[PlannedFunction, ...]
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of functions; empty: all for every row
    concurrency: int = 64  # calls of an asynchronous function at a time
    batch_size: int = 64  # most responses of one call, for a function that takes several
    timeout_s: float | None = None  # deadline of an asynchronous call, after which it is cancelled
    fatal: tuple[type[BaseException], ...] = (HungError,)  # exceptions of a function that are not its failure

    @cached_property
    def is_async(self) -> bool:
        """Return whether a function is asynchronous, so that `score` needs an event loop."""
        return any(function.is_async for function in self.functions)

    @cached_property
    def batched(self) -> bool:
        """Return whether a function takes several responses at a time."""
        return any(function.batched for function in self.functions)

    @property
    def columns(self) -> RewardColumns:
        """Return the columns that the functions read; an answer where every data source needs one."""
        columns = [function.columns for function in self.functions]
        return RewardColumns(
            answer=all(self.takes_answer(source) for source in self.sources or ("",)),
            structured=all(one.structured for one in columns),
            every=any(one.every for one in columns),
        )

    def takes_answer(self, source: str) -> bool:
        """Return whether a function that scores rows of a data source needs their answers."""
        return any(function.columns.answer for function in self._functions_of(source))

    def arguments(self, prompt: Prompt, response: Response) -> dict[str, object]:
        """Return the functions' arguments for a response, and the names of the functions."""
        functions = self._functions_of(prompt.source)
        values: dict[str, object] = {NAMES: [function.name for function in functions]}
        for function in functions:
            values |= function.arguments(prompt, response)
        return values

    def run(
        self, batch: Sequence[Arguments], watch: CallWatch, runner: Callable[..., list[Outcome]] = asyncio.run
    ) -> list[Outcome]:
        """Run `score` and return its outcomes; runner: runs a coroutine on an event loop."""
        scoring = self.score(batch, watch)
        if self.is_async:
            return runner(scoring)
        # Without a loop in this thread a synchronous function may run its own.
        try:
            scoring.send(None)
        except StopIteration as end:
            outcomes: list[Outcome] = end.value
            return outcomes
        raise AssertionError("synchronous functions wait for nothing")

    async def score(self, batch: Sequence[Arguments], watch: CallWatch) -> list[Outcome]:
        """Return the outcome of each response.

        A response's functions run one after the other. After None or a failure the others are not called.
        """
        free = asyncio.Semaphore(self.concurrency)
        size = len(batch) if self.batched else 1
        parts = [range(first, min(first + size, len(batch))) for first in range(0, len(batch), max(size, 1))]
        outcomes = await _all((self._score_part(batch, rows, free, watch) for rows in parts), at_once=self.is_async)
        return [outcome for part in outcomes for outcome in part]

    async def _score_part(
        self, batch: Sequence[Arguments], rows: Sequence[int], free: asyncio.Semaphore, watch: CallWatch
    ) -> list[Outcome]:
        """Return the outcomes of rows that each function scores before the next."""
        components: dict[int, dict[str, float]] = {row: {} for row in rows}
        final: dict[int, Outcome] = {}
        for function in self.functions:
            names = {row: batch[row][NAMES] for row in rows if row not in final}
            asked = [row for row, own in names.items() if isinstance(own, list) and function.name in own]
            size = self.batch_size if function.batched else 1
            chunks = [asked[first : first + size] for first in range(0, len(asked), size)]
            results = await _all(
                (self._score_chunk(function, batch, chunk, free, watch) for chunk in chunks), at_once=self.is_async
            )
            for row, outcome in zip(asked, (one for result in results for one in result), strict=True):
                if not function.name or outcome is None or isinstance(outcome, RewardFailure):
                    final[row] = outcome
                elif failure := _add(components[row], function.name, outcome):
                    final[row] = failure
        outcomes = [final[row] if row in final else _checked(components[row]) for row in rows]
        watch.end(rows, outcomes)
        return outcomes

    async def _score_chunk(
        self,
        function: PlannedFunction,
        batch: Sequence[Arguments],
        rows: Sequence[int],
        free: asyncio.Semaphore,
        watch: CallWatch,
    ) -> list[Outcome]:
        """Return the outcomes of one call; if it fails for several responses, call for each."""
        async with free:
            watch.begin(rows, function.name)
            begin = time.perf_counter()
            result = await self._call(function, [batch[row] for row in rows])
            watch.longest_s = max(watch.longest_s, time.perf_counter() - begin)
        if not isinstance(result, RewardFailure):
            return result
        if len(rows) == 1:
            return [result]
        alone = await _all(
            (self._score_chunk(function, batch, [row], free, watch) for row in rows), at_once=self.is_async
        )
        return [outcome for part in alone for outcome in part]

    async def _call(self, function: PlannedFunction, batch: Sequence[Arguments]) -> list[Outcome] | RewardFailure:
        """Return the outcome of each response, or why the call gave none."""
        limit: AbstractAsyncContextManager[object] = nullcontext()
        if function.is_async:
            limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await self._results(function, batch)
        except TimeoutError:  # none of the function's own, which is its failure
            return timed_out(function.name, self.timeout_s)

    async def _results(self, function: PlannedFunction, batch: Sequence[Arguments]) -> list[Outcome] | RewardFailure:
        try:
            value = function(batch)
            if function.is_async and inspect.isawaitable(value):
                value = await value
            results = _several(value, len(batch)) if function.batched else [value]
            return [_outcome(result, function.name) for result in results]
        except NotAScoreError as error:
            return RewardFailure("error", f"{subject(function.name)} returned {error}")
        except self.fatal:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - users' code may raise anything
            return RewardFailure("error", f"{subject(function.name)} {_raised(error)}")

    def _functions_of(self, source: str) -> list[PlannedFunction]:
        """Return the functions that score rows of a data source, in the order of reward.functions."""
        return [one for one in self.functions if not self.sources or one.name in self.sources[source]]


async def _all(calls: Iterable[Awaitable[T]], *, at_once: bool) -> list[T]:
    """Return the results of calls, made at the same time or one after the other."""
    return await asyncio.gather(*calls) if at_once else [await call for call in calls]


def timed_out(name: str, timeout_s: float | None) -> RewardFailure:
    """Return the outcome of a call that took too long."""
    return RewardFailure("timeout", f"{subject(name)} took longer than reward.source.timeout_s={timeout_s:g}")


def _raised(error: BaseException) -> str:
    """Return the exception of a user's code in words, with its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = traceback.TracebackException(type(error), error, None)  # also for an exception whose text raises
    return f"raised {type(error).__name__}: {text} (at {place.filename}:{place.lineno})"


def _several(value: object, size: int) -> list[object]:
    """Return the results of a function of several responses. Raises NotAScoreError."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise NotAScoreError(f"{shortened(value)}, which is not a list with a score for each response")
    results = list(value)
    if len(results) != size:
        raise NotAScoreError(f"{len(results)} scores for {size} response{'s' if size > 1 else ''}")
    return results


def _outcome(result: object, name: str) -> Outcome:
    try:
        return as_score(result)
    except NotAScoreError as error:
        return RewardFailure("error", f"{subject(name)} returned {error}")


def _add(components: dict[str, float], name: str, score: float | dict[str, float]) -> RewardFailure | None:
    """Add a function's components; return the failure if another has given one of them."""
    own = {f"{name}_{part}": value for part, value in score.items()} if isinstance(score, dict) else {name: score}
    if twice := sorted(components.keys() & own.keys()):
        return RewardFailure("error", f"{subject(name)} gives a part {twice[0]!r}, which another gives too")
    components |= own
    return None


def _checked(components: Mapping[str, float]) -> Outcome:
    """Return the components in alphabetical order, or why they are no score."""
    try:
        return as_score(components)
    except NotAScoreError as error:
        return RewardFailure("error", f"the reward functions returned {error}")


def load_call(
    functions: str | Mapping[str, str],
    sources: Mapping[str, Sequence[str]] | None = None,
    *,
    given: Callable[..., object] | None = None,
    concurrency: int = 64,
    batch_size: int = 64,
) -> RewardCall:
    """Return the call of the function that a name stands for, or of several by name.

    given: the function itself, from a Python program; `functions` is then its name in messages.

    Raises:
        UserError: an unknown name, a file that fails to import, or a function that cannot be called.
    """
    if isinstance(functions, str):
        planned = [_load(functions, "reward.function", given)]
    else:
        planned = [_load(spec, f"reward.functions.{name}", name=name) for name, spec in functions.items()]
    return RewardCall(tuple(planned), sources or {}, concurrency, batch_size)


def _load(spec: str, key: str, given: Callable[..., object] | None = None, name: str = "") -> PlannedFunction:
    function = resolve(spec, key=key) if given is None else given
    if not callable(function):
        raise UserError(f"{key}={spec!r}: is of type {type(function).__name__}, not a function")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"{key}={spec!r}: is a generator; it must return a number itself")
    try:
        return plan(function, name)
    except TypeError as error:
        raise UserError(f"{key}={spec!r}: {error}") from error
