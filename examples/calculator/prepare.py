"""Write the calculator's data and a fresh model, which knows nothing.

    python examples/calculator/prepare.py runs/calculator

A question asks for the sum or the product of two numbers of two digits. A demonstration calls the tool that the
question asks for, the other tool, or none and guesses; a third of each. Training finds out which habit pays.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from environment import add, multiply

from mega_rl.agents.tools import ToolFunction
from mega_rl.cli.quickstart.inputs import EOS, WORDS, vocabulary_of, write_fresh_model, write_rows

KINDS = {"What is {} plus {}?": add, "What is {} times {}?": multiply}
SCHEMAS = [ToolFunction.of(tool).schema for tool in KINDS.values()]
TEMPLATE = (
    "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ '\n' }}"
    "{% for m in messages %}{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
CALL = ('<tool_call>{"name": "', '", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
TOKEN = "|".join([*(part.replace("{", r"\{").replace("}", r"\}") for part in CALL), EOS, WORDS])
NUM_TRAIN, NUM_HELD_OUT, NUM_DEMONSTRATIONS = 2000, 200, 8000


def row(numbers: random.Random) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return a question with its answer, and its numbers."""
    text, tool = numbers.choice(list(KINDS.items()))
    a, b = numbers.randint(10, 99), numbers.randint(10, 99)
    prompt = [{"role": "user", "content": text.format(a, b)}]
    return {"prompt": prompt, "answer": str(tool(a, b)), "tools": SCHEMAS}, (a, b)


def demonstration(numbers: random.Random) -> dict[str, Any]:
    """Return a conversation of one of three habits."""
    asked, (a, b) = row(numbers)
    tool = numbers.choice([*KINDS.values(), None])
    messages, value = list(asked["prompt"]), numbers.randint(20, 9999)
    if tool is not None:
        call = {"name": tool.__name__, "arguments": {"a": a, "b": b}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        value = tool(a, b)
        messages.append({"role": "tool", "content": str(value)})
    messages.append({"role": "assistant", "content": str(value)})
    return {"messages": messages, "tools": SCHEMAS}


def main(folder: Path) -> None:
    """Write `data` and `fresh_model` to a folder."""
    numbers = random.Random(0)
    (folder / "data").mkdir(parents=True)
    drawn = {one["prompt"][0]["content"]: one for one, _ in (row(numbers) for _ in range(5000))}
    rows = list(drawn.values())
    write_rows(folder / "data" / "held_out.jsonl", rows[:NUM_HELD_OUT])
    write_rows(folder / "data" / "train.jsonl", rows[NUM_HELD_OUT:][:NUM_TRAIN])
    shown = [demonstration(numbers) for _ in range(NUM_DEMONSTRATIONS)]
    write_rows(folder / "data" / "demonstrations.jsonl", shown)
    texts = [*CALL, *KINDS, "multiply", "add multiply \nuser\nassistant\ntool\n0123456789 error: a at most in turn"]
    write_fresh_model(folder / "fresh_model", vocabulary_of(texts, TOKEN), TOKEN, max_positions=96, seed=0)
    (folder / "fresh_model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
