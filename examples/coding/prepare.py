"""Write files with a mistake, demonstrations of their repair, and a fresh model, which knows nothing.

    python -m examples.coding.prepare runs/coding

A file has a function with a wrong sign or a wrong number; only its tests, which the policy does not see, tell which. A
demonstration runs the tests and repairs what they say, or runs them and repairs anything, or does not run them. Whoever
fails gives up or tries again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.coding.environment import replace, run_tests
from examples.inputs import called, said, schemas, write_inputs

FILE = "def f(x):\n    return x {}\n"
SIGNS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
CHANGES = [f"{sign} {number}" for sign in SIGNS for number in range(2, 10)]
HABITS = {"careful": 0.25, "careless": 0.35, "blind": 0.4}  # shares of the demonstrations
RETRY_SHARE = 0.5
NUM_HELD_OUT, NUM_DEMONSTRATIONS = 100, 12000


def values(change: str) -> list[int]:
    """Return f(0) and f(1) of the file with a change."""
    sign, number = change.split()
    return [SIGNS[sign](x, int(number)) for x in (0, 1)]


def row(wrong: str, right: str) -> dict[str, Any]:
    """Return a file with a mistake, and what its tests want."""
    prompt = [{"role": "user", "content": FILE.format(wrong)}]
    return {"prompt": prompt, "answer": json.dumps(values(right)), "tools": schemas([run_tests, replace])}


def report(change: str, right: str) -> str:
    """Return what the tests say of the file with a change, without the sandbox."""
    now, wanted = values(change), values(right)
    failure = f"f(0) and f(1) are {now[0]} and {now[1]}, not {wanted[0]} and {wanted[1]}"
    return "passed" if now == wanted else failure


def demonstration(wrong: str, right: str, numbers: random.Random) -> dict[str, Any]:
    """Return a conversation of one of the habits."""
    (habit,) = numbers.choices(list(HABITS), list(HABITS.values()))
    asked, now = row(wrong, right), wrong
    turns = [] if habit == "blind" else called(run_tests, report(now, right))
    for _ in range(2):
        new = right if habit == "careful" else numbers.choice(CHANGES)
        turns += called(replace, report(new, right), old=now, new=new)
        now = new
        if now == right or numbers.random() > RETRY_SHARE:
            break
    return {"messages": [*asked["prompt"], *turns, said("done")], "tools": asked["tools"], "answer": asked["answer"]}


def main(folder: Path) -> None:
    """Write `data` and `fresh_model` to a folder."""
    numbers = random.Random(0)
    pairs = [(wrong, right) for wrong in CHANGES for right in CHANGES if wrong != right]
    numbers.shuffle(pairs)
    held_out, known = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    write_inputs(
        folder,
        tools=[run_tests, replace],
        train=[row(*pair) for pair in known],
        held_out=[row(*pair) for pair in held_out],
        demonstrations=[demonstration(*pair, numbers) for pair in numbers.choices(known, k=NUM_DEMONSTRATIONS)],
        max_positions=192,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
