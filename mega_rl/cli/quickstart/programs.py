"""Small programming problems, for runs without a network, and a fresh model.

A problem asks for a program that reads a number and prints another one. Its tests are cases of standard input and
output in the form of APPS: `{"inputs": ["3", "40"], "outputs": ["10", "84"]}`. Some demonstrations of the warm start
solve the problem, the others forget a part of it; some are in a block of code, the others bare. Training finds out from
two components of a reward which habits pay.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mega_rl.cli.quickstart.inputs import WORDS, Row, TaskTokens, write_folder, write_rows

CARD = """Small programming problems

{train} problems to train on and {test} to test with, made with the seed {seed}. Columns: `question`, and `tests`, cases
of standard input and output as JSON."""
PROGRAM = "x = int(input())\nprint({})\n"
BLOCK = "```python\n{}```"
NUM_TEST = 24
NUM_DEMONSTRATIONS = 16_000
RIGHT_SHARE, BLOCK_SHARE = 0.35, 0.6  # shares of the demonstrations


class Wording(NamedTuple):
    """A kind of problem with numbers a and b."""

    question: str
    right: str  # expression in x
    careless: str  # expression that forgets a part of the question
    value: Callable[[int, int, int], int]  # x, a, b


KINDS = (
    Wording("Print x times {a} plus {b}.", "x * {a} + {b}", "x * {a}", lambda x, a, b: x * a + b),
    Wording("Print x times {a} minus {b}.", "x * {a} - {b}", "x * {a}", lambda x, a, b: x * a - b),
    Wording("Print x, plus {b} if it is above {a}.", "x + {b} * (x > {a})", "x + {b}", lambda x, a, b: x + b * (x > a)),
    Wording("Print the larger of x and {a}, plus {b}.", "max(x, {a}) + {b}", "x + {b}", lambda x, a, b: max(x, a) + b),
)  # fmt: skip
_WORDINGS = [text for kind in KINDS for text in (kind.question + "\n", f"({kind.right}", f"({kind.careless}")]
_TEXTS = [BLOCK.format(PROGRAM), "0123456789", *_WORDINGS]
TOKENS = TaskTokens.of_texts(_TEXTS, rf"```python\n|```|{WORDS}", max_positions=96)


class CodeProblem(NamedTuple):
    """A problem with its numbers."""

    kind: Wording
    a: int
    b: int
    inputs: tuple[int, int]  # one at most a, and one above it

    @property
    def row(self) -> Row:
        """Return the question and its test cases."""
        outputs = [str(self.kind.value(x, self.a, self.b)) for x in self.inputs]
        tests = json.dumps({"inputs": [str(x) for x in self.inputs], "outputs": outputs})
        return {"question": self.kind.question.format(a=self.a, b=self.b) + "\n", "tests": tests}

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


def demonstrations(problems: Sequence[CodeProblem], *, seed: int) -> Sequence[Row]:
    """Return rows {"prompt", "response"} of the warm start; the same seed gives the same ones."""
    numbers = random.Random(seed)
    rows = []
    for problem in numbers.choices(problems, k=NUM_DEMONSTRATIONS):
        program = problem.program(careless=numbers.random() >= RIGHT_SHARE)
        response = BLOCK.format(program) if numbers.random() < BLOCK_SHARE else program
        rows.append({"prompt": problem.row["question"], "response": response})
    return rows


def write_data(folder: Path, *, seed: int) -> None:
    """Write `programs`, the folder that a Hub would have, and demonstrations.jsonl."""
    problems = make_problems(seed=seed)
    train, test = problems[NUM_TEST:], problems[:NUM_TEST]
    card = CARD.format(train=len(train), test=len(test), seed=seed)
    write_folder(folder / "programs", card, [one.row for one in train], [one.row for one in test])
    write_rows(folder / "demonstrations.jsonl", demonstrations(train, seed=seed))
