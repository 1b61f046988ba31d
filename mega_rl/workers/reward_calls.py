"""Calls of a reward function: by the names of its parameters, or with three strings; of one response, or of several."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import HungError

if TYPE_CHECKING:
    from mega_rl.types import Prompt  # which imports torch

TEXTS = ("prompt", "response", "answer")
FACTS = (
    "row", "messages", "prompt_index", "finish", "num_tokens", "turns", "transcript", "token_ids", "prompt_ids",
)  # for parameters so named  # fmt: skip
# Parameters of a function of several responses, by those of one; each gets a list with an entry for each response.
PLURALS = {
    "prompt": "prompts", "response": "responses", "answer": "answers", "row": "rows", "prompt_index": "prompt_indices",
    "finish": "finishes", "transcript": "transcripts",
} | {name: name for name in ("messages", "num_tokens", "turns", "token_ids", "prompt_ids")}  # fmt: skip
RESPONSE_TEXTS = frozenset({"response", "turns", "transcript", "token_ids"})
SUBJECT = "the reward function"  # of an error, where a run has one function
SHOWN_CHARACTERS = 200  # of a value in an error
LARGEST = 3.4028234663852886e38  # finite float32
# Names of metrics below reward/ that every run may have, so that no part can have them; docs/metrics.md.
TAKEN = (
    "best_groups_fraction", "crashes", "equal_groups_fraction", "errors", "finished_mean", "greedy_mean",
    "group_std_mean", "masked_fraction", "max", "mean", "min", "overlong", "overlong_punishment_mean",
    "sampled_mean", "std", "timeouts", "truncated_mean", "worst_groups_fraction",
)  # fmt: skip

Score = float | dict[str, float] | None  # of a response: a number, named parts, or None to leave it out


class NoScoreError(Exception):
    """A function's result is not a score, or it raised, which is the cause; the message says what and where."""


class NotAScoreError(ValueError):
    """A value is not a score; the message shows it and says why."""


Batch = Sequence[Mapping[str, object]]  # the arguments of each of several responses
Results = list[Score | NoScoreError]  # of each of them


class FailureScore(float):
    """Score of a response that could not be scored; it stands for every part of the reward."""


@dataclass(frozen=True)
class NoScore:
    """Outcome of a response that could not be scored."""

    kind: Literal["timeout", "crash", "error"]
    what: str  # in words: "the reward function raised ..."


@dataclass(frozen=True)
class Response:
    """A response as rewards read it."""

    text: str  # of the policy, without the stop tokens that ended its turns; of several turns one a line
    num_tokens: int  # that were sampled, the stop token among them
    finish: Literal["stop", "length"]  # complete: ended by a stop token; or cut off, by length or a limit of turns
    turns: tuple[str, ...] = ()  # of the policy, where others, as tools, have written between them
    transcript: str = ""  # with what others have written, where they have
    token_ids: tuple[int, ...] = ()  # after the prompt, without the stop tokens that ended turns; of others, too


@dataclass(frozen=True)
class RewardCall:
    """A reward function and the arguments that it takes."""

    function: Callable[..., object]
    positional: bool  # whether prompt, response and answer are given by position
    names: tuple[str, ...]  # given by name
    columns: RewardColumns  # of the data's rows, that the arguments need
    batched: bool = False  # whether it takes several responses, by the plural of `names`, and gives a list

    def arguments(self, prompt: Prompt, response: Response) -> dict[str, object]:
        """Return by name what the function gets for a response to a prompt, and nothing else."""
        values = _arguments(prompt, response)
        if prompt.answer is None:  # only where the function does without
            del values["answer"]
        taken = (*(TEXTS if self.positional else ()), *self.names)
        return {name: values[name] for name in taken if name in values}

    def __call__(self, arguments: Mapping[str, object]) -> object:
        """Return what the function returns for one response, also where it takes several."""
        if self.batched:
            return self.together([arguments])
        texts = [arguments[name] for name in TEXTS if name in arguments] if self.positional else []
        return self.function(*texts, **{name: arguments[name] for name in self.names if name in arguments})

    def together(self, batch: Batch) -> object:
        """Return what a function of several responses returns for them."""
        return self.function(**{PLURALS[name]: [one.get(name) for one in batch] for name in self.names})

    def evaluate(self, arguments: Mapping[str, object]) -> Score:
        """Return the score of one response. Raises NoScoreError: the function raised, or returned something else."""
        return evaluate(self, arguments)

    def evaluate_batch(self, batch: Batch) -> Results:
        """Return what the function `evaluate_batch` does."""
        return evaluate_batch(self, batch)

    async def evaluate_batch_later(self, batch: Batch) -> Results:
        """Return what `evaluate_batch` does of an asynchronous function of several responses. Raises NoScoreError."""
        with named_errors(SUBJECT):
            value = self.together(batch)
            results = results_of(await value if inspect.isawaitable(value) else value, len(batch))
        return [_result(result, SUBJECT) for result in results]

    @property
    def is_async(self) -> bool:
        """Return whether the function is a coroutine function, which `evaluate_later` alone can call."""
        return inspect.iscoroutinefunction(self.function)

    async def evaluate_later(self, arguments: Mapping[str, object]) -> Score:
        """Return the score of one response by a function that may be asynchronous. Raises NoScoreError."""
        return await evaluate_later(self, arguments)


def evaluate(call: RewardCall, arguments: Mapping[str, object], *, subject: str = SUBJECT) -> Score:
    """Return the score of one response; subject: the function's name in errors.

    Raises:
        NoScoreError: the function raised, or returned something else.
    """
    with named_errors(subject):
        return as_score(_own(call, call(arguments)))


async def evaluate_later(call: RewardCall, arguments: Mapping[str, object], *, subject: str = SUBJECT) -> Score:
    """Return what `evaluate` does of a function that may be asynchronous. Raises NoScoreError."""
    with named_errors(subject):
        value = call(arguments)
        return as_score(_own(call, await value if inspect.isawaitable(value) else value))


def evaluate_batch(call: RewardCall, batch: Batch, *, subject: str = SUBJECT) -> Results:
    """Return the score of each response, or why it has none.

    Raises:
        NoScoreError: a function of several responses raised, or gave no result for each. Which of them is to blame is
            not known: call it again for one after the other.
    """
    if not call.batched:
        return [_alone(call, arguments, subject) for arguments in batch]
    with named_errors(subject):
        results = results_of(call.together(batch), len(batch))
    return [_result(result, subject) for result in results]


def _alone(call: RewardCall, arguments: Mapping[str, object], subject: str) -> Score | NoScoreError:
    try:
        return evaluate(call, arguments, subject=subject)
    except NoScoreError as error:
        return error


def _result(result: object, subject: str) -> Score | NoScoreError:
    try:
        return as_score(result)
    except NotAScoreError as error:
        return NoScoreError(f"{subject} returned {error}")


def _own(call: RewardCall, value: object) -> object:
    """Return the result of the one response that a function was called with. Raises NotAScoreError."""
    return results_of(value, 1)[0] if call.batched else value


def results_of(value: object, size: int) -> list[object]:
    """Return the results that a function of several responses gave for `size` of them. Raises NotAScoreError."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise NotAScoreError(f"{shortened(value)}, which is not a list with a score for each response")
    results = list(value)
    if len(results) != size:
        raise NotAScoreError(f"{len(results)} scores for {size} response{'s' if size > 1 else ''}")
    return results


@contextmanager
def named_errors(subject: str) -> Iterator[None]:
    """Turn what a user's function raises, or that it returned no score, into a NoScoreError."""
    try:
        yield
    except NotAScoreError as error:
        raise NoScoreError(f"{subject} returned {error}") from None
    except HungError:  # of the interrupt of a function that does not return
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything; the cause is kept
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = traceback.TracebackException(type(error), error, None)  # of any exception, also one without a text
        what = f"raised {type(error).__name__}: {text} (at {place.filename}:{place.lineno})"
        raise NoScoreError(f"{subject} {what}") from error


def as_score(value: object) -> Score:
    """Return a number, named parts in alphabetical order, each finite in float32, or None. Raises NotAScoreError."""
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
    except OverflowError:  # of an integer
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


def plan_call(function: Callable[..., object]) -> RewardCall:
    """Return how to call a reward function.

    If one of its parameters is named as one of `RESPONSE_TEXTS`, and each one without a default as one of `TEXTS` or
    `FACTS`, it is called by these names and need not take all of them. Any other is called as (prompt, response,
    answer), with `FACTS` by name where it has such parameters. One with a parameter that is the plural of one of these
    takes several responses, by such names alone.

    Raises:
        TypeError: it can be called in none of these ways.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C need not have one
        return RewardCall(function, positional=True, names=(), columns=RewardColumns(structured=True))
    parameters = signature.parameters
    if any(name in _OF_SEVERAL and _by_name(parameter) for name, parameter in parameters.items()):
        return _plan_batches(function, signature)
    named = {name: p for name, p in parameters.items() if name in (*TEXTS, *FACTS) and _by_name(p)}
    by_name = not RESPONSE_TEXTS.isdisjoint(named) and all(
        p.default is not p.empty or p.kind in _REST or name in named for name, p in parameters.items()
    )
    names = tuple(named) if by_name else tuple(name for name in named if name in FACTS)
    try:
        signature.bind(*(() if by_name else TEXTS), **dict.fromkeys(names))
    except TypeError as error:
        if "completions" in parameters:
            raise TypeError(f"has the signature {signature}: {_TRL}") from None
        raise TypeError(
            f"has the signature {signature}, but is called as (prompt, response, answer), with {', '.join(FACTS)} for "
            f"parameters of these names: {error}"
        ) from None
    answer = named.get("answer") if by_name else _third(parameters)
    return RewardCall(
        function,
        positional=not by_name,
        names=names,
        columns=RewardColumns(
            answer=(not by_name or answer is not None) and (answer is None or answer.default is answer.empty),
            structured=answer is None or answer.annotation not in (str, "str"),
            every="row" in names,
        ),
    )


def _plan_batches(function: Callable[..., object], signature: inspect.Signature) -> RewardCall:
    """Return how to call a function of several responses. Raises TypeError."""
    parameters = signature.parameters
    taken = {singular: plural for singular, plural in PLURALS.items() if plural in parameters}
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in _REST]
    subject = f"has the signature {signature}, which takes several responses at a time by {', '.join(taken.values())}"
    if "completions" in parameters:
        raise TypeError(f"{subject}, but {_TRL}")
    for name in parameters:
        if name in (*TEXTS, *FACTS) and name not in PLURALS.values():
            raise TypeError(f"{subject}, and {name} of one; name it {PLURALS[name]}")
    for name in required:
        if name not in taken.values() or not _by_name(parameters[name]):
            raise TypeError(f"{subject}, but {name} has no meaning; legal: {', '.join(PLURALS.values())}")
    if RESPONSE_TEXTS.isdisjoint(taken):
        raise TypeError(f"{subject}, but none of them is the responses; name a parameter responses")
    answer = parameters.get("answers")
    return RewardCall(
        function,
        positional=False,
        names=tuple(taken),
        columns=RewardColumns(
            answer=answer is not None and answer.default is answer.empty,
            structured=answer is None or answer.annotation not in _STRINGS,
            every="row" in taken,
        ),
        batched=True,
    )


_OF_SEVERAL = frozenset(plural for singular, plural in PLURALS.items() if plural != singular)
_STRINGS = (list[str], "list[str]", Sequence[str], "Sequence[str]")
_TRL = (
    "completions is a parameter of TRL, which gives texts or conversations; take the texts as responses, answers as "
    "answers and other columns from rows: docs/rewards.md, Several responses at a time"
)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _third(parameters: Mapping[str, inspect.Parameter]) -> inspect.Parameter | None:
    """Return the parameter that takes the answer where it is given by position; None where it is one of *args."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [parameter for parameter in parameters.values() if parameter.kind in kinds]
    return places[2] if len(places) > 2 else None


def _arguments(prompt: Prompt, response: Response) -> dict[str, object]:
    """Return everything that a reward function may take, by name."""
    return {
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
