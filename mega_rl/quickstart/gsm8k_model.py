"""Data, tokenizer and fresh model of the quickstart with word problems, in the shape of GSM8K.

The warm start imitates demonstrations of mixed quality: some calculate right, the others forget the tens of their
first result (`7+8=<<7+8=5>>5`); half of each end with the line `#### 15` that is asked for, half with a sentence. So
most samples of the warm-started model are wrong and some are right, and training finds out from two parts of a reward
which habits pay.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3Config

from mega_rl.quickstart.gsm8k_problems import (
    KINDS,
    THINGS,
    WHO,
    WordProblem,
    calculate,
    make_problems,
    write_folder,
)
from mega_rl.quickstart.task import EOS, PAD, UNK, config_of, save_fresh_model, tokenizer_of

TOKEN = r"#### |<<|>>|[0-9]| ?[A-Za-z]+|[\s\S]"  # a word has the space before it
SENTENCE = "The answer is {}."
MAX_POSITIONS = 128
NUM_TRAIN, NUM_TEST = 4000, 128
NUM_DEMONSTRATIONS = 32_000
RIGHT_FRACTION = 0.4


def careless(left: int, operator: str, right: int) -> int:
    """Return the result of a step; the first one without its tens."""
    result = calculate(left, operator, right)
    return result % 10 if left < 10 <= result else result


def write_data(folder: Path, *, seed: int) -> None:
    """Write `word_problems`, the folder that a Hub would have, and demonstrations.jsonl."""
    problems = make_problems(NUM_TRAIN + NUM_TEST, seed=seed)
    train = problems[NUM_TEST:]
    write_folder(folder / "word_problems", {"train": train, "test": problems[:NUM_TEST]}, seed=seed)
    rows = demonstrations(train, seed=seed)
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def demonstrations(problems: Sequence[WordProblem], *, seed: int) -> list[dict[str, str]]:
    """Return rows {"prompt", "response"} of the warm start; the same seed gives the same ones."""
    numbers = random.Random(seed)
    rows = []
    for problem in numbers.choices(problems, k=NUM_DEMONSTRATIONS):
        arithmetic = calculate if numbers.random() < RIGHT_FRACTION else careless
        ending = "#### {}" if numbers.random() < 0.5 else SENTENCE
        rows.append({"prompt": problem.question, "response": problem.solution(arithmetic, ending=ending)})
    return rows


def vocabulary() -> list[str]:
    """Return the tokens: those of every question and solution, and special ones, a multiple of 8."""
    texts = [
        text.format(who=who, things=things, a=2, b=3, c=4) for text, _ in KINDS for who in WHO for things in THINGS
    ]
    texts += ["0123456789+-*=<<>>\n#### .", *(f" {things}" for things in THINGS), SENTENCE]
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
