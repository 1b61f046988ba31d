"""Tools: schemas of functions, calls of every style through its template, limits, and garbage."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.agents.tools import STYLES, Call, Toolbox, ToolFunction
from mega_rl.errors import UserError
from tests.helpers.chats import byte_tokenizer
from tests.unit_tests.agents.families import FAMILIES
from tests.unit_tests.agents.test_templates import PEERS

GOOD = {"city": 'Zürich "x"', "days": 3, "exact": True, "tags": ["a", "b"]}


def weather(city: str, days: int = 1, exact: bool = False, tags: list[str] | None = None) -> dict[str, Any]:
    """Return the weather.

    Args:
        city: Name of the city.
        days: How many days from now.
        exact: More digits.
        tags: Labels.
    """
    return {"city": city, "days": days, "exact": exact, "tags": tags}


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def fail(seconds: float = 0.0) -> None:
    """Wait, then fail.

    Args:
        seconds: How long to wait.
    """
    time.sleep(seconds)
    raise KeyError("no such thing")


def answer(box: Toolbox, text: str) -> list[str]:
    return [one["content"] for one in asyncio.run(box.answers(box.calls(text)))]


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# style -> families of ours and of TRL whose templates write it
WRITERS = {
    "hermes": ("chatml", "qwen3.jinja", "qwen2_5.jinja"),
    "llama3": ("llama3", "llama3_1.jinja"),
    "deepseek": ("deepseekv3.jinja",),
    "glm": ("glm", "glm4moe.jinja"),
    "mistral": ("mistral",),
    "harmony": ("harmony", "gptoss.jinja"),
}


@pytest.mark.parametrize(("style", "writer"), [(style, one) for style, names in WRITERS.items() for one in names])
def test_calls_come_back_through_the_template(style: str, writer: str) -> None:
    paths = {path.name: path for path in PEERS}
    if writer not in FAMILIES and writer not in paths:
        pytest.skip("`make peers` puts TRL's templates there")
    text = FAMILIES[writer].template if writer in FAMILIES else paths[writer].read_text(encoding="utf-8")
    box = Toolbox([weather], style)
    for arguments in (GOOD, {"city": "4"}, {"city": "a\n</b> {}", "days": -1}):
        given_arguments: Any = json.dumps(arguments) if style == "deepseek" else arguments
        call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": given_arguments}}
        asked = {"role": "user", "content": "?"}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        tokenizer = byte_tokenizer(text, eos="</s>")
        whole = tokenizer.apply_chat_template([asked, turn], tokenize=False, tools=box.schemas)
        before = tokenizer.apply_chat_template([asked], tokenize=False, tools=box.schemas)
        written = whole[len(before) :] if whole.startswith(before) else whole.rpartition("?")[2]
        written = written.removeprefix("<|start_header_id|>assistant<|end_header_id|>").strip()
        assert box.calls(written) == [Call("weather", arguments)], written


def test_thoughts_of_harmony_call_nothing() -> None:
    thought = "<|channel|>analysis<|message|>I may call to=functions.weather now<|end|>"
    text = f"{thought}<|start|>assistant<|channel|>final<|message|>{json.dumps(GOOD)}<|return|>"
    assert Toolbox([weather], "harmony").calls(text) == []


def test_every_style_has_a_template() -> None:
    assert WRITERS.keys() == STYLES.keys()


def test_schema_is_that_of_the_function() -> None:
    (schema,) = Toolbox([weather], "hermes").schemas
    properties = schema["function"]["parameters"]["properties"]
    assert {name: one["type"] for name, one in properties.items()} == {
        "city": "string", "days": "integer", "exact": "boolean", "tags": "array",
    }  # fmt: skip
    assert schema["function"]["parameters"]["required"] == ["city"]


def test_function_without_hints_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        """Do it."""

    with pytest.raises(UserError, match=r"tool bare: .*a tool has type hints"):
        Toolbox([bare], "hermes")
    with pytest.raises(UserError, match="two tools have one name"):
        Toolbox([weather, weather], "hermes")
    with pytest.raises(UserError, match="style='qwen'"):
        Toolbox([weather], "qwen")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (hermes("weather", GOOD), json.dumps(GOOD, ensure_ascii=False)),
        ("no call at all", None),
        (f"<think>{hermes('weather', GOOD)}</think>\n\nnone", None),
        ("<tool_call>{broken</tool_call>", "error: the call: not valid JSON"),
        ("<tool_call>[1]</tool_call>", "error: the call: holds a JSON list"),
        (hermes("wether", {}), "error: no tool 'wether'; there are: weather, fail"),
        (hermes("weather", {}), "error: 'city' is missing"),
        (hermes("weather", {"city": "x", "day": 1}), "error: 'day' is no argument"),
        (hermes("weather", {"city": "x", "days": "2"}), "error: 'days' must be of type integer"),
        (hermes("weather", {"city": "x", "days": True}), "error: 'days' must be of type integer"),
        (hermes("weather", [1]), "error: the arguments are not an object"),
        (hermes("fail", {}), "error: KeyError: 'no such thing'"),
    ],
)
def test_calls_get_answers_that_say_why(text: str, expected: str | None) -> None:
    answers = answer(Toolbox([weather, fail], "hermes"), text)
    assert len(answers) == (expected is not None)
    assert all(one.startswith(expected or "") for one in answers)


def test_late_tools_stop_nobody() -> None:
    box = Toolbox([slow, fail, weather], "hermes", timeout_s=0.3)
    begun, threads = time.monotonic(), threading.active_count()
    texts = answer(
        box, hermes("slow", {"seconds": 9}) + hermes("fail", {"seconds": 2}) + hermes("weather", {"city": "x"})
    )
    assert time.monotonic() - begun < 1.5
    assert texts[:2] == ["error: slow took more than 0.3 s", "error: fail took more than 0.3 s"]
    assert json.loads(texts[2])["city"] == "x"
    assert answer(box, hermes("slow", {"seconds": 0})) == ["waited"]
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


def test_answers_and_calls_are_limited() -> None:
    box = Toolbox([weather], "hermes", most_calls=2, most_characters=20)
    texts = answer(box, hermes("weather", {"city": "x" * 100}) * 3)
    assert texts[0] == texts[1]
    assert texts[0].startswith('{"city": "xxxxxxxxxx... (')
    assert texts[2] == "error: at most 2 calls in a turn"


_PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"weather"', '"arguments"', "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "weather", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "function", "<｜tool▁call▁end｜>", "to=functions.", "<|message|>", "<|call|>", "<|python_tag|>", "\n", "1e999",
    "NaN", "[", "]", ",", "</think>", '"city"', "null", "[[[[", "```json",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=25), style=st.sampled_from(sorted(STYLES)))
def test_garbage_never_raises(parts: list[str], style: str) -> None:
    box = Toolbox([weather], style)
    for call, text in zip(box.calls("".join(parts)), answer(box, "".join(parts)), strict=True):
        assert call.problem or call.name == "weather"
        assert isinstance(text, str)
        assert text.startswith("error: ") == bool(call.problem) or not call.problem


def test_tool_of_a_user_may_have_a_schema_of_its_own(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "echo", "parameters": {"properties": {"x": {}}}}}
    box = Toolbox([ToolFunction(lambda x: [x, str(tmp_path)], schema)], "hermes")
    assert json.loads(answer(box, hermes("echo", {"x": None}))[0]) == [None, str(tmp_path)]
