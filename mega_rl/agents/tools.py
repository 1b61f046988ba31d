"""Tools of a policy: functions as JSON schemas, calls in its text, answers within limits.

Nothing that a policy writes raises: a call that cannot be made gets an answer that says why.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from mega_rl.data.columns import Message
from mega_rl.errors import RunError, UserError
from mega_rl.processes import Running
from mega_rl.untrusted import parse_object, shorten

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


class Call(NamedTuple):
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why it cannot be made


def _call(name: object, arguments: object) -> Call:
    """Return a call; its arguments are an object, or the JSON text of one."""
    try:
        given = parse_object(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return Call(str(name), {}, f"the arguments: {error}")
    if not isinstance(given, dict):
        return Call(str(name), {}, "the arguments are not an object")
    return Call(str(name), given) if isinstance(name, str) else Call("", {}, "the call has no name")


def _object_call(text: str) -> Call:
    """Return the call of a JSON object with a name, and arguments or parameters."""
    try:
        given = parse_object(text.strip())
    except ValueError as error:
        return Call("", {}, f"the call: {error}")
    if unknown := given.keys() - {"name", "arguments", "parameters", "type", "id"}:
        return Call(str(given.get("name")), {}, f"the call: {shorten(min(unknown))!r} is no key of a call")
    return _call(given.get("name"), given.get("arguments", given.get("parameters", {})))


def _hermes(text: str) -> Iterator[Call]:
    for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        yield _object_call(part)


def _llama3(text: str) -> Iterator[Call]:
    calls = re.sub(r"<\|\w+\|>$", "", text.strip()).strip()
    if not re.match(r'\{\s*"(name|type|parameters)"', calls):
        calls = calls.partition("<|python_tag|>")[2].strip()
    while calls:
        try:
            _, end = json.JSONDecoder().raw_decode(calls)
        except (ValueError, RecursionError):
            end = len(calls)
        rest = calls[end:].strip()
        own, calls = (calls[:end], rest[1:].strip()) if rest.startswith(";") else (calls, "")
        yield _object_call(own)


def _deepseek(text: str) -> Iterator[Call]:
    for part in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", text, re.DOTALL):
        name, _, rest = part.partition("<｜tool▁sep｜>")
        if name == "function":  # V3 and R1: a kind, then a name and a block of JSON
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        yield _call(name.strip(), rest.strip())


def _glm(text: str) -> Iterator[Call]:
    for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        name, _, rest = part.partition("<arg_key>")
        pair, rest = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", f"<arg_key>{rest}" if rest else ""
        pairs = {key: Untyped(value) for key, value in re.findall(pair, rest, re.DOTALL)}
        left = re.sub(pair, "", rest, flags=re.DOTALL).strip()
        yield Call(name.strip(), pairs, f"the arguments: {shorten(left)} is no pair of key and value" if left else "")


def _mistral(text: str) -> Iterator[Call]:
    for part in re.sub(r"</s>$", "", text.strip()).split("[TOOL_CALLS]")[1:]:
        name, separator, arguments = part.partition("[ARGS]")
        if separator:
            yield _call(name.partition("[CALL_ID]")[0].strip(), arguments.strip())
            continue
        try:
            calls = json.loads(part)
        except (ValueError, RecursionError) as error:
            yield Call("", {}, f"the calls: not valid JSON ({shorten(str(error))})")
            continue
        for one in calls if isinstance(calls, list) else [calls]:
            is_object = isinstance(one, dict)
            yield _call(one.get("name"), one.get("arguments")) if is_object else Call("", {}, "a call is not an object")


def _harmony(text: str) -> Iterator[Call]:
    message = r"(.*?)<\|message\|>(.*?)(?:<\|(?:call|end|return)\|>|(?=<\|start\|>)|$)"
    for header, body in re.findall(message, text, re.DOTALL):
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            is_tool = name != recipient[1]
            yield _call(name, body) if is_tool else Call(name, {}, "a call begins with to=functions.NAME")


STYLES: dict[str, Callable[[str], Iterator[Call]]] = {
    "hermes": _hermes, "llama3": _llama3, "deepseek": _deepseek, "glm": _glm, "mistral": _mistral, "harmony": _harmony,
}  # fmt: skip


class Untyped(str):
    """An argument whose style writes strings bare and other values as JSON."""

    def as_kind(self, kinds: Sequence[str]) -> Any:
        """Return the value for a parameter of these kinds."""
        if "string" in kinds:
            return str(self)
        try:
            return json.loads(self)
        except (ValueError, RecursionError):
            return str(self)


@dataclass(frozen=True)
class ToolFunction:
    """A function that the policy may call, and its JSON schema."""

    function: Callable[..., Any]  # async, or called on a thread
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ToolFunction:
        """Return the tool of a function with type hints and documented arguments. Raises UserError."""
        try:
            return cls(function, get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException) as error:
            name = getattr(function, "__name__", function)
            raise UserError(
                f"tool {name}: {error}; a tool has type hints, and a docstring with a line 'name: what it is' for each "
                "argument under 'Args:'"
            ) from error

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def fit(self, call: Call) -> Call:
        """Return a call with typed arguments, and a problem if they do not fit the schema."""
        parameters = self.schema["function"].get("parameters", {})
        known, arguments = parameters.get("properties", {}), dict(call.arguments)
        problems = [f"{name!r} is missing" for name in parameters.get("required", ()) if name not in arguments]
        for name, value in arguments.items():
            if name not in known:
                problems.append(f"{shorten(name)!r} is no argument")
                continue
            schema = known[name]
            kinds = _kinds(schema)
            if isinstance(value, Untyped):
                value = arguments[name] = value.as_kind(kinds)
            if kinds and not _is_of(value, kinds):
                problems.append(f"{name!r} must be of type {' or '.join(kinds)}")
            elif "enum" in schema and value not in schema["enum"]:
                problems.append(f"{name!r} must be one of {schema['enum']}")
        return call._replace(arguments=arguments, problem="; ".join(problems))


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a parameter may have; empty for any."""
    own = schema.get("type", [])
    kinds = [own] if isinstance(own, str) else [one for one in own if isinstance(one, str)]
    kinds = [one for one in kinds if one in _KINDS]
    return [*kinds, "null"] if kinds and schema.get("nullable") else kinds


def _is_of(value: object, kinds: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return isinstance(value, tuple(kind for name in kinds for kind in _KINDS[name]))


class Toolbox:
    """The tools of an environment, and the style in which its policy calls them."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | ToolFunction],
        style: str,
        *,
        timeout_s: float = 30.0,
        most_calls: int = 8,
        most_characters: int = 20_000,
    ) -> None:
        """style: of STYLES. timeout_s: of a call. most_calls: of a turn. most_characters: of an answer."""
        if style not in STYLES:
            raise UserError(f"style={style!r} of tool calls is unknown; legal: {', '.join(STYLES)}")
        self._parse = STYLES[style]
        self._timeout_s, self._most_calls, self._most_characters = timeout_s, most_calls, most_characters
        tools = [one if isinstance(one, ToolFunction) else ToolFunction.of(one) for one in functions]
        self._tools = {one.name: one for one in tools}
        if len(self._tools) < len(tools):
            raise UserError(f"two tools have one name: {', '.join(sorted(one.name for one in tools))}")
        self.schemas = [one.schema for one in tools]

    def calls(self, text: str) -> list[Call]:
        """Return the calls of a turn, whose text has its special tokens; thoughts hold none."""
        calls = list(self._parse(text.rpartition("</think>")[2]))
        return [call if call.problem else self._checked(call) for call in calls]

    async def answers(self, calls: Sequence[Call]) -> list[Message]:
        """Return an answer to each call, in their order; calls run at the same time."""
        texts = await asyncio.gather(*(self._answer(place, call) for place, call in enumerate(calls)))
        return [
            {"role": "tool", "name": call.name or "unknown", "tool_call_id": f"call{place:05d}", "content": text}
            for place, (call, text) in enumerate(zip(calls, texts, strict=True))
        ]

    def _checked(self, call: Call) -> Call:
        tool = self._tools.get(call.name)
        if tool is None:
            return call._replace(problem=f"no tool {shorten(call.name)!r}; there are: {', '.join(self._tools)}")
        return tool.fit(call)

    async def _answer(self, place: int, call: Call) -> str:
        """Return a call's result as text, or why there is none."""
        if place >= self._most_calls:
            return f"error: at most {self._most_calls} calls in a turn"
        if call.problem:
            return f"error: {call.problem}"
        try:
            result, error = await asyncio.wait_for(_run(self._tools[call.name].function, call), self._timeout_s)
        except TimeoutError:
            return f"error: {call.name} took more than {self._timeout_s:g} s"
        if isinstance(error, RunError):  # the machine's fault, not the call's: it costs the sample
            raise error
        if error is not None:
            text = f"error: {type(error).__name__}: {error}"
        else:
            text = result if isinstance(result, str) else _as_json(result)
        left_out = len(text) - self._most_characters
        return text if left_out <= 0 else f"{text[: self._most_characters]}... ({left_out} more characters)"


def _as_json(result: object) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


async def _run(function: Callable[..., Any], call: Call) -> tuple[Any, BaseException | None]:
    """Return (result, error) of a function; without async it runs on a thread of its own."""
    if inspect.iscoroutinefunction(function):
        task = asyncio.ensure_future(function(**call.arguments))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        return (None, asyncio.CancelledError()) if task.cancelled() else (_result_of(task), task.exception())
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def work() -> Any:
        try:
            return function(**call.arguments)
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

    running = Running(work, name=f"tool {call.name}")
    await ended.wait()
    running.wait(1.0)  # it has ended but for a few instructions
    return running.result, running.error


def _result_of(task: asyncio.Future[Any]) -> Any:
    return None if task.exception() is not None else task.result()
