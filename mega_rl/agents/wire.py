"""Requests and answers of OpenAI's and Anthropic's APIs as messages of chat templates."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from mega_rl.agents.tools import ToolFunction
from mega_rl.data.columns import Message
from mega_rl.untrusted import parse_object, shorten

_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_ANTHROPIC_ENDS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_OF_THOUGHTS = ("thinking", "redacted_thinking")


class Reply(NamedTuple):
    """A turn as an answer."""

    message: Message
    thoughts: str
    end: str  # finish_reason of OpenAI's API
    read: int  # tokens
    wrote: int


def tool_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a message; chat templates take its arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Asked(NamedTuple):
    """A request in the terms of chat templates."""

    tools: dict[str, ToolFunction]  # keys: names
    messages: list[Message]
    limit: int  # most tokens of the answer; 0: as many as there is room for


def asked_in(body: Mapping[str, Any]) -> Asked:
    """Return the content of a request. Raises ValueError, KeyError, TypeError and AttributeError."""
    given = () if body.get("tool_choice") == "none" else body.get("tools") or ()
    tools = [
        ToolFunction(cast(Any, None), {"type": "function", "function": _function(one["function"])}) for one in given
    ]
    names: dict[str, str] = {}  # the tools' names by the call's id
    messages = [_message(one, names) for one in body["messages"]]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("the last message must be of a user or a tool; a turn continues no other")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if type(limit) is not int or limit < 0:
        raise ValueError("the most tokens must be a whole number from 1 on")
    return Asked({one.name: one for one in tools}, messages, limit)


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema, without what is null."""
    function = {key: value for key, value in given.items() if value is not None}
    if not isinstance(function["name"], str):
        raise TypeError("the name of a tool must be a string")
    parameters = function.get("parameters", {})
    lists = [
        parameters.get("required", []),
        *(one.get("enum", []) for one in parameters.get("properties", {}).values()),
    ]
    kinds = [one.get("type", "") for one in parameters.get("properties", {}).values()]
    if not all(isinstance(one, list) for one in lists) or not all(isinstance(one, (str, list)) for one in kinds):
        raise TypeError(f"the parameters of the tool {shorten(function['name'])} are not a JSON schema")
    return function


def _message(given: Mapping[str, Any], names: dict[str, str]) -> Message:
    if given["role"] not in _ROLES:
        raise ValueError(f"the role {given['role']!r} is unknown")
    message: Message = {"role": _ROLES[given["role"]], "content": _text(given.get("content"))}
    if message["role"] == "assistant":
        message["content"] = message["content"].strip()
        calls = [_given_call(one) for one in given.get("tool_calls") or ()]
        names.update((one["id"], one["function"]["name"]) for one in calls)
        message |= {"tool_calls": calls} if calls else {}
    if message["role"] == "tool":
        call_id = str(given["tool_call_id"])
        message |= {"tool_call_id": call_id, "name": names.get(call_id, "tool")}
    return message


def _given_call(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given["function"]["arguments"]
    known = parse_object(arguments) if isinstance(arguments, str) else dict(arguments)
    return tool_call(str(given["id"]), str(given["function"]["name"]), known)


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := [one["type"] for one in content if one["type"] != "text"]:
        raise ValueError(f"content of the type {other[0]!r} is not supported; send text")
    return "\n".join(one["text"] for one in content)


def from_anthropic(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of Anthropic's API as one of OpenAI's."""
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for one in body["messages"]:
        content = one["content"]
        blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        results = [block for block in blocks if block["type"] == "tool_result"]
        calls = [
            tool_call(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"
        ]
        rest = [block for block in blocks if block["type"] not in (*_OF_THOUGHTS, "tool_result", "tool_use")]
        messages += [
            {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content")} for block in results
        ]
        if rest or not results:
            messages.append({"role": one["role"], "content": rest, "tool_calls": calls})
    tools = [
        {
            "function": {key: one[key] for key in ("name", "description") if key in one}
            | {"parameters": one["input_schema"]}
        }
        for one in body.get("tools") or ()
    ]
    return {**body, "messages": messages, "tools": tools, "tool_choice": (body.get("tool_choice") or {}).get("type")}


def as_openai(reply: Reply, model: str) -> dict[str, Any]:
    """Return an answer of OpenAI's API."""
    calls = [
        one
        | {"function": one["function"] | {"arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False)}}
        for one in reply.message.get("tool_calls", ())
    ]
    message = {"role": "assistant", "content": reply.message["content"] or (None if calls else "")}
    message |= {"reasoning_content": reply.thoughts} if reply.thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    usage = {"prompt_tokens": reply.read, "completion_tokens": reply.wrote, "total_tokens": reply.read + reply.wrote}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()), "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.end, "logprobs": None}], "usage": usage,
    }  # fmt: skip


def openai_events(answer: Mapping[str, Any], *, with_usage: bool) -> str:
    """Return an answer as a stream: the turn in one piece, its end, and its usage."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **one} for place, one in enumerate(delta["tool_calls"])]
    pieces = [{"index": 0, "delta": delta, "finish_reason": None}]
    pieces.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    chunk = {**answer, "object": "chat.completion.chunk", "usage": None}
    chunks = [chunk | {"choices": [piece]} for piece in pieces]
    chunks += [chunk | {"choices": [], "usage": answer["usage"]}] if with_usage else []
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


def as_anthropic(reply: Reply, model: str) -> dict[str, Any]:
    """Return an answer of Anthropic's API."""
    content: list[dict[str, Any]] = []
    content += [{"type": "thinking", "thinking": reply.thoughts, "signature": ""}] if reply.thoughts else []
    content += [{"type": "text", "text": reply.message["content"]}] if reply.message["content"] else []
    content += [
        {"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": one["function"]["arguments"]}
        for one in reply.message.get("tool_calls", ())
    ]
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": _ANTHROPIC_ENDS[reply.end], "stop_sequence": None,
        "usage": {"input_tokens": reply.read, "output_tokens": reply.wrote},
    }  # fmt: skip


def anthropic_events(answer: Mapping[str, Any]) -> str:
    """Return an answer as a stream: each block of its content in one piece."""
    end = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}},
        *(event for place, block in enumerate(answer["content"]) for event in _block_events(place, block)),
        {"type": "message_delta", "delta": end, "usage": answer["usage"]},
        {"type": "message_stop"},
    ]
    return "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)


def _block_events(place: int, block: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    name, kind, empty = {
        "text": ("text", "text_delta", ""), "thinking": ("thinking", "thinking_delta", ""),
        "tool_use": ("input", "input_json_delta", {}),
    }[block["type"]]  # fmt: skip
    key, piece = ("partial_json", json.dumps(block[name])) if name == "input" else (name, block[name])
    yield {"type": "content_block_start", "index": place, "content_block": {**block, name: empty}}
    yield {"type": "content_block_delta", "index": place, "delta": {"type": kind, key: piece}}
    yield {"type": "content_block_stop", "index": place}
