"""Data, tokenizer and fresh model of the quickstart with programs, which are run against the tests of their problems.

The warm start imitates demonstrations of mixed quality: some solve the problem, the others forget a part of it; some
are in the block of code that is asked for, the others bare. So a few samples of the warm-started model pass their
tests, and training finds out from two parts of a reward which habits pay.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3Config

from mega_rl.quickstart.code_problems import KINDS, PROGRAM, CodeProblem, make_problems, write_folder
from mega_rl.quickstart.task import EOS, PAD, UNK, config_of, save_fresh_model, tokenizer_of

TOKEN = r"```python\n|```|[0-9]| ?[A-Za-z]+|[\s\S]"  # a word has the space before it
BLOCK = "```python\n{}```"
MAX_POSITIONS = 96
NUM_TEST = 24
NUM_DEMONSTRATIONS = 16_000
RIGHT_FRACTION = 0.35
BLOCK_FRACTION = 0.6


def write_data(folder: Path, *, seed: int) -> None:
    """Write `programs`, the folder that a Hub would have, and demonstrations.jsonl."""
    problems = make_problems(seed=seed)
    train = problems[NUM_TEST:]
    write_folder(folder / "programs", {"train": train, "test": problems[:NUM_TEST]}, seed=seed)
    rows = demonstrations(train, seed=seed)
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def demonstrations(problems: Sequence[CodeProblem], *, seed: int) -> list[dict[str, str]]:
    """Return rows {"prompt", "response"} of the warm start; the same seed gives the same ones."""
    numbers = random.Random(seed)
    rows = []
    for problem in numbers.choices(problems, k=NUM_DEMONSTRATIONS):
        program = problem.program(careless=numbers.random() >= RIGHT_FRACTION)
        response = BLOCK.format(program) if numbers.random() < BLOCK_FRACTION else program
        rows.append({"prompt": problem.question, "response": response})
    return rows


def vocabulary() -> list[str]:
    """Return the tokens: those of every question and program, and special ones, a multiple of 8."""
    texts = [BLOCK.format(PROGRAM), "0123456789"]
    texts += [text for kind in KINDS for text in (kind.question + "\n", f"({kind.right}", f"({kind.careless}")]
    tokens = [PAD, EOS, UNK, *sorted({token for text in texts for token in re.findall(TOKEN, text)})]
    return [*tokens, *(f"<unused {number}>" for number in range(-len(tokens) % 8))]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, digits and signs that adds no special tokens and gives every text back as it was."""
    return tokenizer_of(vocabulary(), TOKEN, max_positions=MAX_POSITIONS)


def model_config() -> Qwen3Config:
    """Return a Qwen3 of two layers of width 128, divisible by tp=2 and by pp=2."""
    return config_of(vocabulary(), max_positions=MAX_POSITIONS)


def write_checkpoint(directory: Path, *, seed: int) -> None:
    """Write a randomly initialised checkpoint with its tokenizer; the same seed gives the same weights."""
    save_fresh_model(directory, model_config(), build_tokenizer(), seed=seed)
