"""Small programming problems, made by a program: a folder as the Hub has it, for runs without a network.

A problem asks for a program that reads a number and prints another one. Its tests are cases of standard input and
output, in the form of APPS: `{"inputs": ["3", "40"], "outputs": ["10", "84"]}`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.storage.disk import make_folder, replace_text

FILES = {"train": "data/train.jsonl", "test": "data/test.jsonl"}
CARD = """---
language: en
license: apache-2.0
task_categories:
- text-generation
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.jsonl
  - split: test
    path: data/test.jsonl
---

# Small programming problems

{train} problems to train on and {test} to test with, made with the seed {seed}. Columns: `question`, and `tests`, cases
of standard input and output as JSON.
"""
PROGRAM = "x = int(input())\nprint({})\n"


@dataclass(frozen=True)
class Wording:
    """A kind of problem with numbers a and b."""

    question: str
    right: str  # expression in x
    careless: str  # what forgets a part of the question
    value: Callable[[int, int, int], int]  # x, a, b


KINDS = (
    Wording("Print x times {a} plus {b}.", "x * {a} + {b}", "x * {a}", lambda x, a, b: x * a + b),
    Wording("Print x times {a} minus {b}.", "x * {a} - {b}", "x * {a}", lambda x, a, b: x * a - b),
    Wording("Print x, plus {b} if it is above {a}.", "x + {b} * (x > {a})", "x + {b}", lambda x, a, b: x + b * (x > a)),
    Wording("Print the larger of x and {a}, plus {b}.", "max(x, {a}) + {b}", "x + {b}", lambda x, a, b: max(x, a) + b),
)  # fmt: skip


@dataclass(frozen=True)
class CodeProblem:
    """A problem with its numbers."""

    kind: Wording
    a: int
    b: int
    inputs: tuple[int, int]  # a case each: one at most a, and one above it

    @property
    def question(self) -> str:
        """Return the text that the policy reads."""
        return self.kind.question.format(a=self.a, b=self.b) + "\n"

    @property
    def tests(self) -> str:
        """Return the cases as JSON."""
        outputs = [str(self.kind.value(x, self.a, self.b)) for x in self.inputs]
        return json.dumps({"inputs": [str(x) for x in self.inputs], "outputs": outputs})

    def program(self, *, careless: bool = False) -> str:
        """Return a program that solves the problem, or one that forgets a part of it."""
        expression = self.kind.careless if careless else self.kind.right
        return PROGRAM.format(expression.format(a=self.a, b=self.b))


def make_problems(*, seed: int) -> list[CodeProblem]:
    """Return all problems in random order; the same seed gives the same ones."""
    numbers = random.Random(seed)
    digits = range(2, 10)
    problems = [
        CodeProblem(kind, a, b, (numbers.randint(0, a - 1), numbers.randint(a + 1, 99)))
        for kind in KINDS
        for a in digits
        for b in digits
    ]
    numbers.shuffle(problems)
    return problems


def write_folder(
    folder: Path, problems: Mapping[str, Sequence[CodeProblem]], *, seed: int, force: bool = False
) -> dict[Path, int]:
    """Write the splits train and test as a folder of the Hub has them; return the rows by file.

    Raises UserError, before anything is written, for a file that is there without `force`.
    """
    files = {folder / FILES[split]: rows for split, rows in problems.items()}
    card = folder / "README.md"
    taken = [file for file in (card, *files) if file.exists()]
    if taken and not force:
        raise UserError(f"{taken[0]}: is there already; name another folder, or remove it")
    for file, rows in files.items():
        make_folder(file.parent)
        lines = [json.dumps({"question": problem.question, "tests": problem.tests}) + "\n" for problem in rows]
        replace_text(file, "".join(lines))
    replace_text(card, CARD.format(seed=seed, **{split: len(rows) for split, rows in problems.items()}))
    return {file: len(rows) for file, rows in files.items()}
