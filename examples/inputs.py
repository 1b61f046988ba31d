"""Inputs of the examples: rows, and a tiny model that knows nothing, with a chat template for tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from mega_rl.agents.tools import ToolFunction
from mega_rl.cli.quickstart.inputs import EOS, WORDS, TaskTokens, write_fresh_model, write_rows

Row = Mapping[str, Any]
Message = Mapping[str, Any]
TEMPLATE = (
    "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ '\n' }}"
    "{% for m in messages %}{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
_HOLE = "?"


def schemas(tools: Sequence[Callable[..., Any]]) -> list[Any]:
    """Return the column `tools` of a row."""
    return [ToolFunction.of(tool).schema for tool in tools]


def said(text: str) -> Message:
    """Return a turn of the assistant without a call."""
    return {"role": "assistant", "content": text}


def called(tool: Callable[..., Any], answer: str, **arguments: object) -> list[Message]:
    """Return a turn that calls a tool, and the tool's answer."""
    call = {"name": tool.__name__, "arguments": arguments}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return [turn, {"role": "tool", "content": answer}]


def _frames(tool: Callable[..., Any]) -> list[str]:
    """Return the text of a call before, between and after its arguments."""
    parameters = ToolFunction.of(tool).schema["function"]["parameters"]["properties"]
    arguments = {name: _HOLE if kind["type"] == "string" else 0 for name, kind in parameters.items()}
    text = f"<tool_call>{json.dumps({'name': tool.__name__, 'arguments': arguments})}</tool_call>"
    return re.split(r"\?|(?<= )0", text)


def write_inputs(
    folder: Path,
    *,
    tools: Sequence[Callable[..., Any]],
    train: Iterable[Row],
    held_out: Iterable[Row],
    demonstrations: Sequence[Row],
    max_positions: int,
) -> None:
    """Write `data` and `fresh_model`, whose tokens are those of the demonstrations; each part of a call is one."""
    (folder / "data").mkdir(parents=True)
    for name, rows in (("train", train), ("held_out", held_out), ("demonstrations", demonstrations)):
        write_rows(folder / "data" / f"{name}.jsonl", rows)
    frames = [frame for tool in tools for frame in _frames(tool)]
    pattern = "|".join([*map(re.escape, sorted(frames, key=len, reverse=True)), EOS, WORDS])
    conversations = [one["messages"] for one in demonstrations]
    texts, _ = render_jinja_template(conversations, schemas(tools), chat_template=TEMPLATE)
    known = [*frames, *(text.replace(EOS, "") for text in texts)]
    write_fresh_model(folder / "fresh_model", TaskTokens.of_texts(known, pattern, max_positions), seed=0)
    (folder / "fresh_model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
