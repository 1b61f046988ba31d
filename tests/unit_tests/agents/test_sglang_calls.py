"""Calls as SGLang's own parsers read them: the same, or a difference whose reason stands here."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from mega_rl.agents.tools import STYLES, Toolbox
from mega_rl.environment import python_module
from mega_rl.rollout.sglang.server.installation import find_sglang
from tests.helpers.sglang import needs_sglang
from tests.peers.package import ROOT

pytestmark = needs_sglang
Calls = list[tuple[str, dict[str, Any]]]
WORDS = ("x", "Zürich", 'a "quoted" one', "b\\c", "two\nlines", "{", "}]", "4", "; ", " sp ", "日本🙂", "", "a,b")
HURTS = (
    "{", "}", "]", '"', ",", ";", "\n", " ", "'", "null", "NaN", "1e999", '{"name": "find"}', "nothing", "find",
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|call|>",
    "<|message|>", "functions.", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```", "<arg_key>",
    "</arg_value>", "<|channel|>",
)  # fmt: skip


def find(text: str, count: int = 1, exact: bool = False, tags: list[str] | None = None) -> None:
    """Find a text.

    Args:
        text: The text.
        count: How many.
        exact: As it is.
        tags: Labels.
    """


def add(a: float, b: float) -> None:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """


BOX = {style: Toolbox([find, add], style) for style in STYLES}
TOOLS = [find.__name__, add.__name__]


def made(generator: random.Random) -> Calls:
    """One to three calls."""
    calls: Calls = []
    for _ in range(generator.choice((1, 1, 2, 3))):
        if generator.random() < 0.3:
            calls.append(("add", {"a": generator.randint(-9, 99) / 4, "b": generator.randint(-9, 9)}))
            continue
        arguments: dict[str, Any] = {"text": "".join(generator.choices(WORDS, k=generator.randint(1, 3)))}
        if generator.random() < 0.5:
            arguments |= {"count": generator.randint(0, 99), "exact": generator.random() < 0.5}
        if generator.random() < 0.3:
            arguments["tags"] = generator.choices(WORDS, k=2)
        calls.append(("find", arguments))
    return calls


def objects(calls: Calls, key: str) -> list[str]:
    return [json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in calls]


def glm(calls: Calls) -> str:
    def pair(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"

    return "\n".join(
        f"<tool_call>{name}\n{''.join(pair(*one) for one in given.items())}</tool_call>" for name, given in calls
    )


def deepseek(calls: Calls, form: str) -> str:
    parts = "".join(
        f"<｜tool▁call▁begin｜>{form.format(name=name, given=json.dumps(given, ensure_ascii=False))}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{parts}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


class Form(NamedTuple):
    """A form in which a family's template writes calls."""

    style: str
    parser: str  # SGLang's
    write: Callable[[Calls], str]
    said: str = ""  # words before calls
    before: str = ""  # the template's own words before a turn, which SGLang's parser wants to see


FORMS = {
    "hermes": Form("hermes", "hermes", lambda calls: "\n".join(
        f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls, "arguments")
    ), "I look.\n"),
    "llama3": Form("llama3", "llama3", lambda calls: ";".join(objects(calls, "parameters"))),
    "llama3 tag": Form("llama3", "llama3", lambda calls: "<|python_tag|>" + ";".join(objects(calls, "parameters"))),
    "deepseek v3": Form("deepseek", "deepseekv3", lambda calls: deepseek(
        calls, "function<｜tool▁sep｜>{name}\n```json\n{given}\n```"
    ), "I look."),
    "deepseek v3.1": Form("deepseek", "deepseekv31", lambda calls: deepseek(
        calls, "{name}<｜tool▁sep｜>{given}"
    ), "I look."),
    "glm": Form("glm", "glm45", glm, "I look.\n"),
    "mistral": Form("mistral", "mistral", lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls, 'arguments'))}]"),
    "mistral args": Form("mistral", "mistral", lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given, ensure_ascii=False)}" for name, given in calls
    ), "I look."),
    "harmony": Form("harmony", "gpt-oss", lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given, ensure_ascii=False)}"
        "<|call|>" for name, given in calls
    ), "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|start|>assistant"),
}  # fmt: skip


def hurt(text: str, generator: random.Random) -> str:
    """Cut, double or insert a piece."""
    for _ in range(generator.choice((1, 1, 2))):
        begin = generator.randrange(len(text) + 1)
        end = min(len(text), begin + generator.choice((0, 0, 1, 3, 20)))
        text = text[:begin] + generator.choice((*HURTS, "", text[begin:end] * 2)) + text[end:]
    return text


def ours(style: str, text: str) -> Calls:
    """The calls that a policy's turn makes, whatever their arguments' types."""
    tools = BOX[style]._tools
    read = [one for one in STYLES[style](text) if not one.problem and one.name in tools]
    return [(one.name, tools[one.name].fit(one).arguments) for one in read]


@cache
def texts(name: str) -> list[tuple[str, Calls | None]]:
    """Texts of a form and the calls in them; None where they were hurt."""
    generator, form, given = random.Random(name), FORMS[name], list[tuple[str, Calls | None]]()
    for _ in range(200):
        calls = made(generator)
        text = generator.choice(("", form.said)) + form.write(calls)
        given += [(text, calls), (hurt(text, generator), None)]
    return given


ONE, OTHER = ("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})
A, B = (json.dumps({"name": name, "arguments": given}) for name, given in (ONE, OTHER))
GLM = "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
# why -> (form, text, our calls, SGLang's)
DIFFERENT: dict[str, tuple[str, str, Calls, Calls]] = {
    "a broken call costs itself only": (
        "hermes", f"<tool_call>{A}</tool_call><tool_call>{{</tool_call><tool_call>{B}</tool_call>", [ONE, OTHER], []
    ),
    "the template asks for an object in each pair of marks": (
        "hermes", f"<tool_call>[{A}, {B}]</tool_call>", [], [ONE, OTHER]
    ),
    "templates show arguments that are given as text as a JSON string": (
        "hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ONE],
        [("add", '{"a": 1, "b": 2}')],  # type: ignore[list-item]
    ),
    "JSON has no infinite numbers": (
        "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', [],
        [("add", {"a": float("inf")})],
    ),
    "the template asks for JSON, not for Python": (
        "llama3", "<|python_tag|>{'name': 'add', 'parameters': {'a': 1, 'b': 2}}", [], [ONE]
    ),
    "an answer in JSON is no call": ("llama3", '{"answer": 4, "name": "add"}', [], [("add", {})]),
    "nothing behind a broken call is guessed": ("llama3", f'{A};{{"name": "add";{B}', [ONE], [ONE, OTHER]),
    "each call has marks, too": (
        "deepseek v3.1",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{json.dumps(ONE[1])}<｜tool▁call▁end｜>", [ONE], [],
    ),
    "the template writes a text as it is": (
        "glm", GLM.format("true"), [("find", {"text": "true"})], [("find", {"text": "True"})]
    ),
    "quotes belong to a text": ("glm", GLM.format("'x'"), [("find", {"text": "'x'"})], [("find", {"text": "x"})]),
    "no argument may be lost": (
        "glm", GLM.format("x</arg_value>\n<arg_key>count</arg_key>\n<arg_val>3"), [], [("find", {"text": "x"})]
    ),
    "newer tokenizers write no blank": ("mistral", f"[TOOL_CALLS][{A}, {B}]", [ONE, OTHER], []),
    "tokenizers of 2025 write an id": (
        "mistral", f"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{json.dumps(ONE[1])}", [ONE], []
    ),
    "calls end a turn": ("mistral", f"[TOOL_CALLS] [{A}] so?", [], [ONE]),
    "the template names the tool before the channel": (
        "harmony", f" to=functions.add<|channel|>commentary json<|message|>{json.dumps(ONE[1])}<|call|>", [ONE], []
    ),
    "functions have a namespace": (
        "harmony", f"<|channel|>commentary to=add <|constrain|>json<|message|>{json.dumps(ONE[1])}<|call|>", [], [ONE]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[Calls]]:
    """SGLang's calls in each form's texts, and in those of DIFFERENT."""
    installation = find_sglang()
    assert installation is not None
    asked = {name: [(form, text) for text, _ in texts(name)] for name, form in FORMS.items()}
    asked["different"] = [(FORMS[name], text) for name, text, *_ in DIFFERENT.values()]
    rows = [(form.parser, form.before + text) for pairs in asked.values() for form, text in pairs]
    ended = subprocess.run(
        python_module("tests.unit_tests.agents.sglang_calls"),
        input=json.dumps({"texts": rows, "schemas": BOX["hermes"].schemas}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installation.folder or "")])},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    answers = iter(json.loads(ended.stdout.splitlines()[-1]))
    return {name: [[(one, given) for one, given in next(answers)] for _ in pairs] for name, pairs in asked.items()}


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_templates_are_read_as_by_sglang(name: str, theirs: dict[str, list[Calls]]) -> None:
    for (text, calls), read in zip(texts(name), theirs[name], strict=True):
        if calls is not None:
            assert ours(FORMS[name].style, text) == calls == read, text


@pytest.mark.parametrize("name", FORMS)
def test_hurt_calls_are_never_lost_in_silence(name: str, theirs: dict[str, list[Calls]]) -> None:
    """What only SGLang reads is answered with a reason; what only we read stands whole in the text."""
    differ = 0
    for (text, calls), read in zip(texts(name), theirs[name], strict=True):
        own = ours(FORMS[name].style, text)
        if calls is not None or own == read:
            continue
        differ += 1
        is_text = name == "llama3" and not list(STYLES["llama3"](text))  # "an answer in JSON is no call"
        if [one for one in read if one not in own] and not is_text:
            assert [one for one in BOX[FORMS[name].style].calls(text) if one.problem], (text, own, read)
        for _, arguments in (one for one in own if one not in read):
            pieces: list[Any] = [*arguments.values()] if name == "glm" else [arguments] if arguments else []
            for piece in pieces:
                whole = piece if isinstance(piece, str) else json.dumps(piece, ensure_ascii=False)
                assert whole in text, (text, own, read)
    assert 0 < differ < 120  # of 200


def test_differences_have_reasons(theirs: dict[str, list[Calls]]) -> None:
    for (why, (name, text, own, other)), read in zip(DIFFERENT.items(), theirs["different"], strict=True):
        assert (ours(FORMS[name].style, text), read) == (own, other), why
