"""Conversations of rows: their messages, tools and template variables, checked before a chat template sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TOOLS, VARIABLES = "tools", "chat_template_kwargs"  # columns of a row that its chat template reads
_SYSTEM, _TOOL = ("system", "developer"), ("tool", "function", "ipython")
_ROLES = (*_SYSTEM, "user", "assistant", *_TOOL)
# Arguments of transformers' apply_chat_template, which a row must not set as variables.
_TAKEN = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
_TAKEN |= {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
_TAKEN |= {"return_assistant_tokens_mask"}

Message = dict[str, Any]  # one of a conversation: {"role": "user", "content": "3+4="}


class RowProblem(Exception):
    """A row cannot be used; the message says why."""


def conversation(prompt: list[object], key: str) -> list[Message]:
    """Return the messages of a row without keys that are null, ready for the assistant's turn. Raises RowProblem.

    Parquet gives each message all keys of its column, null where a row had none.
    """
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
        if misplaced := _misplaced(role, messages):
            raise RowProblem(f"{place} is {role!r} {misplaced}")
        messages.append(message)
    if messages[-1]["role"] not in ("user", *_TOOL):
        raise RowProblem(
            f"{key!r} ends with a message of the {messages[-1]['role']}, and the assistant's is to be sampled; end it "
            "with a message of the user"
        )
    return messages


def _misplaced(role: str, before: list[Message]) -> str:
    """Return why a role cannot follow the messages before it; "" where it can."""
    last = before[-1]["role"] if before else ""
    if role in _SYSTEM:
        return "" if last in ("", *_SYSTEM) and role != last else "and not at the beginning, once"
    if role == "user":
        return "after another message of the user" if last == "user" else ""
    if role == "assistant":
        return "" if last in ("user", *_TOOL) else "without a message of the user before it"
    return "" if last in ("assistant", *_TOOL) else "without a message of the assistant before it"


def template_columns(row: Mapping[str, object]) -> Message:
    """Return the template's variables that a row sets: its tools, and its chat_template_kwargs. Raises RowProblem."""
    variables = _of_kind(row, VARIABLES, dict) or {}
    if taken := sorted(_TAKEN & variables.keys()):
        raise RowProblem(f"{VARIABLES!r} has {taken[0]!r}, which the run itself sets")
    tools = _of_kind(row, TOOLS, list)
    return {**variables, TOOLS: tools} if tools else dict(variables)


def _of_kind(row: Mapping[str, object], key: str, kind: type) -> Any:
    """Return a column without keys that are null; JSON in a string is read. Raises RowProblem for another type."""
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
    """Return a value's type in JSON's words."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
