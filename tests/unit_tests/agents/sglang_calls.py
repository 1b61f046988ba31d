"""Program: read calls with SGLang's own parsers, in an environment that has it on the path."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from mega_rl.rollout.sglang.server import cpu_stand_ins

logging.disable()


def read(parser: str, text: str, schemas: list[Any]) -> list[Any]:
    """Return [name, arguments] of each call."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [Tool(**one) for one in schemas]
    try:
        _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    except (AttributeError, TypeError, ValueError, RecursionError):
        return []  # a few hurt texts
    return [[one.name, json.loads(one.parameters)] for one in calls]


if __name__ == "__main__":
    cpu_stand_ins.install()
    given = json.load(sys.stdin)
    answers = [read(parser, text, given["schemas"]) for parser, text in given["texts"]]
    print(json.dumps(answers))
