"""Write the calculator's data and a fresh model, which knows nothing.

    python -m examples.calculator.prepare runs/calculator

A question asks for the sum or the product of two numbers of two digits. A demonstration calls the right tool, the
other one, or none and guesses. Training finds out which habit pays.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from examples.calculator.environment import add, multiply
from examples.inputs import called, said, schemas, write_inputs

QUESTIONS = {add: "What is {} plus {}?", multiply: "What is {} times {}?"}
HABITS = {"right": 0.45, "other": 0.25, "guess": 0.3}  # shares of the demonstrations
NUM_TRAIN, NUM_HELD_OUT, NUM_DEMONSTRATIONS = 2000, 200, 8000


def row(numbers: random.Random) -> dict[str, Any]:
    """Return a random question, its answer, and its numbers."""
    tool = numbers.choice(list(QUESTIONS))
    a, b = numbers.randint(10, 99), numbers.randint(10, 99)
    prompt = [{"role": "user", "content": QUESTIONS[tool].format(a, b)}]
    return {"prompt": prompt, "answer": str(tool(a, b)), "tools": schemas(list(QUESTIONS)), "numbers": [a, b]}


def demonstration(asked: dict[str, Any], numbers: random.Random) -> dict[str, Any]:
    """Return a conversation of one of the habits."""
    a, b = asked["numbers"]
    (habit,) = numbers.choices(list(HABITS), list(HABITS.values()))
    if habit == "guess":
        turns = [said(str(numbers.randint(20, 9999)))]
    else:
        tool = next(tool for tool in QUESTIONS if (str(tool(a, b)) == asked["answer"]) == (habit == "right"))
        turns = [*called(tool, str(tool(a, b)), a=a, b=b), said(str(tool(a, b)))]
    return {"messages": [*asked["prompt"], *turns], "tools": asked["tools"], "answer": asked["answer"]}


def main(folder: Path) -> None:
    """Write `data` and `fresh_model` to a folder."""
    numbers = random.Random(0)
    drawn = {one["prompt"][0]["content"]: one for one in (row(numbers) for _ in range(5000))}
    held_out, rest = list(drawn.values())[:NUM_HELD_OUT], list(drawn.values())[NUM_HELD_OUT:]
    write_inputs(
        folder,
        tools=list(QUESTIONS),
        train=rest[:NUM_TRAIN],
        held_out=held_out,
        demonstrations=[demonstration(one, numbers) for one in numbers.choices(rest, k=NUM_DEMONSTRATIONS)],
        max_positions=96,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
