"""Columns of a data row: prompt, answer, template variables, and those of the reward. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOLS, VARIABLES = "tools", "chat_template_kwargs"  # columns of a row for its chat template
# Columns of rows with given answers, next to data.prompt_key and data.answer_key.
GIVEN = ("messages", "completion", "text", "chosen", "rejected", "margin", "label")
_SYSTEM, _TOOL = ("system", "developer"), ("tool", "function", "ipython")
_ROLES = (*_SYSTEM, "user", "assistant", *_TOOL)
# Arguments of transformers' apply_chat_template, which a row must not set as variables.
_TAKEN = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
_TAKEN |= {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
_TAKEN |= {"return_assistant_tokens_mask"}

Message = dict[str, Any]  # {"role": "user", "content": "3+4="}


class RowProblem(Exception):
    """A row cannot be used; the message says why."""


@dataclass(frozen=True)
class RewardColumns:
    """Columns of a row that the reward reads besides the prompt."""

    answer: bool = True  # a row without an answer is malformed
    structured: bool = False  # an answer may be a list, an object, true or false
    every: bool = False  # all columns are kept as `Prompt.row`
    source: str = ""  # column of the row's data source, which a row need not have; "": nothing reads it


@dataclass(frozen=True)
class RowColumns:
    """Columns to read of a row."""

    prompt: str
    answer: str  # "": rows have none
    reward: RewardColumns = RewardColumns()
    given: bool = False  # rows have given answers in some of `GIVEN`, and need no column

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        if self.given:
            return ()
        return (self.prompt, self.answer) if self.reward.answer else (self.prompt,)

    def read_of(self, names: Sequence[str]) -> list[str] | None:
        """Return the columns to read of those that a file has; None for all."""
        given = GIVEN if self.given else ()
        keys = dict.fromkeys((self.prompt, self.answer, self.reward.source, TOOLS, VARIABLES, *given))
        return None if self.reward.every else [key for key in keys if key in names]

    def source_of(self, row: Mapping[str, Any]) -> str:
        """Return the data source of a row; empty if it names none, or nothing reads it."""
        value = row.get(self.reward.source) if self.reward.source else None
        return "" if value is None else str(value)


def conversation(prompt: list[object], key: str) -> list[Message]:
    """Return a row's messages without null keys, ready for the assistant's turn. Raises RowProblem."""
    messages = messages_of(prompt, key)
    if messages[-1]["role"] not in ("user", *_TOOL):
        raise RowProblem(
            f"{key!r} ends with a message of the {messages[-1]['role']}, and the assistant's is to be sampled; end it "
            "with a message of the user"
        )
    return messages


def messages_of(prompt: list[object], key: str) -> list[Message]:
    """Return a row's messages without null keys. Raises RowProblem."""
    if not prompt:
        raise RowProblem(f"{key!r} is an empty list of messages")
    messages: list[Message] = []
    for number, message in enumerate(prompt, start=1):
        place = f"message {number} of {key!r}"
        if not isinstance(message, dict):
            raise RowProblem(f"{place} is not an object with strings 'role' and 'content'")
        message = _without_nulls(message)
        role = message.get("role")
        if role not in _ROLES:
            raise RowProblem(f"{place} has the role {role!r}; legal: {', '.join(_ROLES)}")
        content = message.setdefault("content", None)
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise RowProblem(f"{place} has a 'content' that is {kind_of(content)}, not a string")
        if misplaced := _misplaced(role, messages[-1]["role"] if messages else ""):
            raise RowProblem(f"{place} is {role!r} {misplaced}")
        messages.append(message)
    return messages


def _misplaced(role: str, last: str) -> str:
    """Return why a role cannot follow the last one; "" if it can."""
    if role in _SYSTEM:
        return "" if last in ("", *_SYSTEM) and role != last else "and not at the beginning, once"
    if role == "user":
        return "after another message of the user" if last == "user" else ""
    before, allowed = ("user", ("user", *_TOOL)) if role == "assistant" else ("assistant", ("assistant", *_TOOL))
    return "" if last in allowed else f"without a message of the {before} before it"


def template_columns(row: Mapping[str, object]) -> Message:
    """Return the template's variables of a row: its tools, and its chat_template_kwargs. Raises RowProblem."""
    variables = _of_kind(row, VARIABLES, dict) or {}
    if taken := sorted(_TAKEN & variables.keys()):
        raise RowProblem(f"{VARIABLES!r} has {taken[0]!r}, which the run itself sets")
    tools = _of_kind(row, TOOLS, list)
    return {**variables, TOOLS: tools} if tools else dict(variables)


def _of_kind(row: Mapping[str, object], key: str, kind: type) -> Any:
    """Return a column without null keys, from JSON if it is a string. Raises RowProblem."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError) as error:
            raise RowProblem(f"{key!r} is a string that is not JSON: {error}") from error
    if value is not None and not isinstance(value, kind):
        raise RowProblem(f"{key!r} is {kind_of(value)}, not {kind_of(kind())}")
    return _without_nulls(value)


def _without_nulls(value: object) -> Any:
    """Return a value without the keys of its objects that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def kind_of(value: object) -> str:
    """Return the name of a value's type in JSON."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
