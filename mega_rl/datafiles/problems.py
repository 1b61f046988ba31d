"""Published problem sets: where their rows are and how a row becomes a prompt and an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mega_rl.rewards.builtin import final_answer, plain_number

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."  # that the reward math_verify looks for


@dataclass(frozen=True)
class ProblemSet:
    """A set of questions whose solutions end with a final answer."""

    train: str  # name on the Hub
    test: str
    question: str  # column
    solution: str  # column
    answer: Callable[[str], str | None]  # the final answer of a solution; None where it has none


def number_after_hashes(solution: str) -> str | None:
    """Return the number after "####" without separators of thousands or a currency: "#### $1,200" gives "1200"."""
    if "####" not in solution:
        return None
    number = plain_number(solution.rpartition("####")[2])
    return None if number is None else f"{number:f}"


def boxed(solution: str) -> str | None:
    """Return what the last box of a solution holds: \\boxed{...}, \\fbox{...} or \\boxed 7."""
    solution = re.sub(r"\\fbox\s*\{", r"\\boxed{", solution)
    solution = re.sub(r"\\boxed\s+([^\s{$]+)", r"\\boxed{\1}", solution)
    return (final_answer(solution) or None) if "\\boxed" in solution else None


GSM8K = ProblemSet("openai/gsm8k:main:train", "openai/gsm8k:main:test", "question", "answer", number_after_hashes)
MATH = ProblemSet(
    "DigitalLearningGmbH/MATH-lighteval:default:train",
    "HuggingFaceH4/MATH-500:default:test",
    "problem",
    "solution",
    boxed,
)
