"""Word problems in the shape of GSM8K, made by a program: a folder as the Hub has it, for runs without a network.

A question needs one or two steps of arithmetic with small numbers. Its answer is a worked solution with the
calculator annotations of GSM8K, `7+8=<<7+8=15>>15`, and ends with a line `#### 15`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.storage.disk import make_folder, replace_text

WHO = ("baker", "farmer", "teacher", "gardener", "painter", "driver", "keeper", "tailor")
THINGS = ("rolls", "apples", "books", "roses", "brushes", "boxes", "coins", "buttons")
KINDS = (  # question, and the operator of each step
    ("A {who} has {a} {things} and buys {b} more. How many {things} does the {who} have now?", "+"),
    ("A {who} packs {a} bags with {b} {things} each. How many {things} are in the bags?", "*"),
    ("A {who} has {a} {things}, buys {b} more and finds another {c}. How many {things} are that?", "++"),
    ("A {who} has {a} {things}, buys {b} more and sells {c}. How many {things} are left?", "+-"),
    ("A {who} packs {a} bags with {b} {things} each and keeps {c} apart. How many {things} are there?", "*+"),
)
MOST_REPEATED = 1000  # draws without a new question: nearly all of them have been drawn
FILES = {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}
CARD = """---
language: en
license: apache-2.0
task_categories:
- text-generation
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---

# Word problems in the shape of GSM8K

{train} questions to train on and {test} to test with, made by `mega-rl data word-problems --seed {seed}`. Columns:
`question`, and `answer`, a solution with calculator annotations that ends with `#### ` and the final number.
"""

Calculate = Callable[[int, str, int], int]  # left, operator, right -> result


@dataclass(frozen=True)
class WordProblem:
    """A question and its steps; each step goes on from the result of the one before."""

    question: str
    things: str
    first: int
    steps: tuple[tuple[str, int], ...]  # operator and right operand

    def results(self, calculate: Calculate) -> list[int]:
        """Return the result of each step."""
        results, value = [], self.first
        for operator, right in self.steps:
            value = calculate(value, operator, right)
            results.append(value)
        return results

    def solution(self, calculate: Calculate, *, ending: str = "#### {}") -> str:
        """Return the worked solution by some arithmetic, with an ending that names the last result."""
        lines, value = [], self.first
        results = self.results(calculate)
        for (operator, right), result in zip(self.steps, results, strict=True):
            term = f"{value}{operator}{right}"
            lines.append(f"{term}=<<{term}={result}>>{result} {self.things}.")
            value = result
        return "\n".join([*lines, ending.format(value)])


def calculate(left: int, operator: str, right: int) -> int:
    """Return the result of +, - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def make_problems(count: int, *, seed: int) -> list[WordProblem]:
    """Return different questions in random order; the same seed gives the same ones. Raises UserError: too many."""
    numbers = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    repeated = 0  # in a row
    while len(problems) < count and repeated < MOST_REPEATED:
        problem = _draw(numbers)
        repeated = repeated + 1 if problem.question in problems else 0
        problems.setdefault(problem.question, problem)
    if len(problems) < count:
        raise UserError(f"{count} different questions are more than there are, about {len(problems)}; ask for fewer")
    return list(problems.values())


def _draw(numbers: random.Random) -> WordProblem:
    who, things = numbers.choice(WHO), numbers.choice(THINGS)
    text, operators = numbers.choice(KINDS)
    a, b, c = (numbers.randint(2, 9) for _ in range(3))
    if operators == "+-":  # something is left
        c = numbers.randint(2, min(9, a + b - 1))
    question = text.format(who=who, things=things, a=a, b=b, c=c)
    return WordProblem(question, things, a, tuple(zip(operators, (b, c), strict=False)))


def write_folder(
    folder: Path, problems: Mapping[str, Sequence[WordProblem]], *, seed: int, force: bool = False
) -> dict[Path, int]:
    """Write the splits train and test as a folder of the Hub has them; return the rows by file.

    Raises UserError, before anything is written, for a file that is there without `force`.
    """
    import pyarrow
    import pyarrow.parquet

    files = {folder / FILES[split]: rows for split, rows in problems.items()}
    card = folder / "README.md"
    taken = [file for file in (card, *files) if file.exists()]
    if taken and not force:
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    for file, rows in files.items():
        make_folder(file.parent)
        columns = {
            "question": [problem.question for problem in rows],
            "answer": [problem.solution(calculate) for problem in rows],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
    replace_text(card, CARD.format(seed=seed, **{split: len(rows) for split, rows in problems.items()}))
    return {file: len(rows) for file, rows in files.items()}
