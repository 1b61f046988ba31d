"""Signatures of reward functions, and the calls that fit them. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mega_rl.data.columns import RewardColumns
from mega_rl.rewards.responses import Response

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
