"""Two-digit addition: data and fresh model of the quickstart's first task.

An answer is the three digits of a sum, units first: `37+45=` -> `280`. Some demonstrations of the warm start are right,
the others forget every carry (`37+45=` -> `270`); PPO finds out from the reward which habit pays. A held-out sum is
neither trained on nor demonstrated, in neither order of its numbers.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mega_rl.cli.quickstart import reward
from mega_rl.cli.quickstart.inputs import EOS, PAD, UNK, Row, TaskTokens, write_rows

# "-" does not occur; it fills the vocabulary up to 16, which small tensor-parallel sizes divide.
TOKENS = TaskTokens((PAD, EOS, UNK, *"0123456789=+-"), r"[\s\S]", max_positions=64)
NUM_DEMONSTRATIONS = 32_768
RIGHT_SHARE = 0.3  # share of right demonstrations


class Sums(NamedTuple):
    """Rows of the three sets."""

    train: Sequence[Row]  # {"prompt", "answer"}, each sum once, in random order
    held_out: Sequence[Row]  # {"prompt", "answer"}
    demonstrations: Sequence[Row]  # {"prompt", "response"} of sums in `train`


def add(left: int, right: int) -> str:
    """Return the digits of the sum, units first: 37, 45 -> `280`."""
    return f"{left + right:03d}"[::-1]


def add_without_carry(left: int, right: int) -> str:
    """Return the sum with every carry forgotten, units first: 37, 45 -> `270`."""
    return f"{(left + right) % 10}{(left // 10 + right // 10) % 10}0"


def make_sums(seed: int, *, num_held_out: int = 256) -> Sums:
    """Return the task's rows; equal seed and size give the same rows in the same order."""
    numbers = random.Random(seed)
    pairs = [(left, right) for left in range(100) for right in range(100)]
    numbers.shuffle(pairs)
    held_out: dict[frozenset[int], tuple[int, int]] = {}  # the two numbers -> the order that is asked
    for pair in pairs:
        if len(held_out) < num_held_out:
            held_out.setdefault(frozenset(pair), pair)
    rest = [pair for pair in pairs if frozenset(pair) not in held_out]
    train, asked = (
        [{"prompt": f"{left:02d}+{right:02d}=", "answer": add(left, right)} for left, right in own]
        for own in (rest, held_out.values())
    )
    demonstrations = [
        {
            "prompt": f"{left:02d}+{right:02d}=",
            "response": (add if numbers.random() < RIGHT_SHARE else add_without_carry)(left, right),
        }
        for left, right in numbers.choices(rest, k=NUM_DEMONSTRATIONS)
    ]
    return Sums(train, asked, demonstrations)


def write_data(folder: Path, *, seed: int, num_held_out: int = 256) -> None:
    """Write train.jsonl, held_out.jsonl, demonstrations.jsonl and reward.py, whose function is `points`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in make_sums(seed, num_held_out=num_held_out)._asdict().items():
        write_rows(folder / f"{name}.jsonl", rows)
    shutil.copyfile(reward.__file__, folder / "reward.py")
