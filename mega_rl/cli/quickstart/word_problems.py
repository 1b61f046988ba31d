"""Word problems in the shape of GSM8K, for runs without a network, and a fresh model.

A question needs one or two steps of arithmetic with small numbers. Its answer is a worked solution with the
calculator annotations of GSM8K, `7+8=<<7+8=15>>15`, and ends with a line `#### 15`. Some demonstrations of the warm
start calculate right, the others forget the tens of their first result (`7+8=<<7+8=5>>5`); half of each end with the
line `#### 15`, half with a sentence. Training finds out from two components of a reward which habits pay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mega_rl.cli.quickstart.inputs import WORDS, Row, TaskTokens, write_folder, write_rows
from mega_rl.errors import UserError

WHO = ("baker", "farmer", "teacher", "gardener", "painter", "driver", "keeper", "tailor")
THINGS = ("rolls", "apples", "books", "roses", "brushes", "boxes", "coins", "buttons")
KINDS = (  # question, and the operator of each step
    ("A {who} has {a} {things} and buys {b} more. How many {things} does the {who} have now?", "+"),
    ("A {who} packs {a} bags with {b} {things} each. How many {things} are in the bags?", "*"),
    ("A {who} has {a} {things}, buys {b} more and finds another {c}. How many {things} are that?", "++"),
    ("A {who} has {a} {things}, buys {b} more and sells {c}. How many {things} are left?", "+-"),
    ("A {who} packs {a} bags with {b} {things} each and keeps {c} apart. How many {things} are there?", "*+"),
)
MOST_REPEATED = 1000  # draws without a new question, after which nearly all have been drawn
CARD = """Word problems in the shape of GSM8K

{train} questions to train on and {test} to test with, made by `mega-rl data word-problems --seed {seed}`. Columns:
`question`, and `answer`, a solution with calculator annotations that ends with `#### ` and the final number."""
ANSWER, SENTENCE = "#### {}", "The answer is {}."
_NUMBERS = {"a": 2, "b": 3, "c": 4}
_TEXTS = [text.format(who=who, things=some, **_NUMBERS) for text, _ in KINDS for who in WHO for some in THINGS]
_TEXTS += ["0123456789+-*=<<>>\n#### .", *(f" {things}" for things in THINGS), SENTENCE]
TOKENS = TaskTokens.of_texts(_TEXTS, rf"#### |<<|>>|{WORDS}", max_positions=128)
NUM_TRAIN, NUM_TEST = 4000, 128
NUM_DEMONSTRATIONS = 32_000
RIGHT_SHARE = 0.4  # share of right demonstrations

Calculate = Callable[[int, str, int], int]  # left, operator, right -> result


def calculate(left: int, operator: str, right: int) -> int:
    """Return the result of +, - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def careless(left: int, operator: str, right: int) -> int:
    """Return the result of a step; that of a first step without its tens."""
    result = calculate(left, operator, right)
    return result % 10 if left < 10 <= result else result


class WordProblem(NamedTuple):
    """A question and its steps; each step starts from the result of the step before."""

    question: str
    things: str
    first: int
    steps: tuple[tuple[str, int], ...]  # operator and right operand

    def solution(self, calculate: Calculate, *, ending: str = ANSWER) -> str:
        """Return the worked solution by some arithmetic, with an ending that names the last result."""
        lines, value = [], self.first
        for operator, right in self.steps:
            result = calculate(value, operator, right)
            term = f"{value}{operator}{right}"
            lines.append(f"{term}=<<{term}={result}>>{result} {self.things}.")
            value = result
        return "\n".join([*lines, ending.format(value)])


def make_problems(count: int, *, seed: int) -> list[WordProblem]:
    """Return distinct questions in random order, the same for one seed. Raises UserError: too many."""
    numbers = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    repeated = 0  # in a row
    while len(problems) < count and repeated < MOST_REPEATED:
        who, things = numbers.choice(WHO), numbers.choice(THINGS)
        text, operators = numbers.choice(KINDS)
        a, b, c = (numbers.randint(2, 9) for _ in range(3))
        if operators == "+-":  # something is left
            c = numbers.randint(2, min(9, a + b - 1))
        question = text.format(who=who, things=things, a=a, b=b, c=c)
        repeated = repeated + 1 if question in problems else 0
        steps = tuple(zip(operators, (b, c), strict=False))
        problems.setdefault(question, WordProblem(question, things, a, steps))
    if len(problems) < count:
        raise UserError(f"{count} different questions are more than there are, about {len(problems)}; ask for fewer")
    return list(problems.values())


def write_problems(
    folder: Path, train: Sequence[WordProblem], test: Sequence[WordProblem], *, seed: int, force: bool = False
) -> dict[Path, int]:
    """Write the problems as a Hub dataset folder; return row counts by file. Raises UserError."""
    rows = [
        [{"question": problem.question, "answer": problem.solution(calculate)} for problem in own]
        for own in (train, test)
    ]
    card = CARD.format(train=len(train), test=len(test), seed=seed)
    return write_folder(folder, card, *rows, force=force)


def demonstrations(problems: Sequence[WordProblem], *, seed: int) -> Sequence[Row]:
    """Return rows {"prompt", "response"} of the warm start; the same seed gives the same ones."""
    numbers = random.Random(seed)
    rows = []
    for problem in numbers.choices(problems, k=NUM_DEMONSTRATIONS):
        arithmetic = calculate if numbers.random() < RIGHT_SHARE else careless
        ending = ANSWER if numbers.random() < 0.5 else SENTENCE
        rows.append({"prompt": problem.question, "response": problem.solution(arithmetic, ending=ending)})
    return rows


def write_data(folder: Path, *, seed: int) -> None:
    """Write `word_problems`, the folder that a Hub would have, and demonstrations.jsonl."""
    problems = make_problems(NUM_TRAIN + NUM_TEST, seed=seed)
    write_problems(folder / "word_problems", problems[NUM_TEST:], problems[:NUM_TEST], seed=seed)
    write_rows(folder / "demonstrations.jsonl", demonstrations(problems[NUM_TEST:], seed=seed))
