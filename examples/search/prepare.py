"""Write the questions of the search, demonstrations and a fresh model, which knows nothing.

    python -m examples.search.prepare runs/search

A question needs two searches: for a person's town, then for its river. A demonstration searches twice, or once and
guesses, or only guesses. No question of a held-out town is trained on or demonstrated: its river has to be found.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from examples.inputs import called, said, schemas, write_inputs
from examples.search.environment import RIVERS, facts, search

QUESTION = "Which river flows through the town of {}?"
HABITS = {2: 0.25, 1: 0.45, 0: 0.3}  # searches -> share of the demonstrations
NUM_HELD_OUT_TOWNS, NUM_DEMONSTRATIONS = 24, 16000


def row(person: str, river: str) -> dict[str, Any]:
    """Return a question and its answer."""
    prompt = [{"role": "user", "content": QUESTION.format(person)}]
    return {"prompt": prompt, "answer": river, "tools": schemas([search])}


def demonstration(person: str, town: str, river: str, numbers: random.Random) -> dict[str, Any]:
    """Return a conversation of one of the habits."""
    (searches,) = numbers.choices(list(HABITS), list(HABITS.values()))
    queries = [f"{person} lives", f"flows through {town}"][:searches]
    turns = [part for query in queries for part in called(search, search(query), query=query)]
    asked = row(person, river)
    answer = said(river if searches == 2 else numbers.choice(RIVERS))
    return {"messages": [*asked["prompt"], *turns, answer], "tools": asked["tools"], "answer": asked["answer"]}


def main(folder: Path) -> None:
    """Write `data` and `fresh_model` to a folder."""
    numbers = random.Random(0)
    towns, rivers = facts()
    held_out_towns = numbers.sample(list(rivers), NUM_HELD_OUT_TOWNS)
    asked = [(person, town, rivers[town]) for person, town in towns.items()]
    numbers.shuffle(asked)
    known = [one for one in asked if one[1] not in held_out_towns]
    write_inputs(
        folder,
        tools=[search],
        train=[row(person, river) for person, _, river in known],
        held_out=[row(person, river) for person, town, river in asked if town in held_out_towns],
        demonstrations=[demonstration(*one, numbers) for one in numbers.choices(known, k=NUM_DEMONSTRATIONS)],
        max_positions=128,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
