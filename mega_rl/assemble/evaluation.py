"""Evaluations: what they sample and measure, and the answer that a response votes for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.trainer.validation import AnswerOf, Evaluation, EvaluationPlan
from mega_rl.types import Draws, PromptSet
from mega_rl.workers.reward_functions import final_answer
from mega_rl.workers.user_files import load_from_file, users_code


def build_evaluation(config: Config, sets: Sequence[PromptSet]) -> Evaluation:
    """Return the evaluation of sets of prompts. Raises UserError for an `answer_of` that cannot be loaded."""
    val = config.validation
    draws = None if val.temperature == 0 else Draws(val.n, val.temperature, val.top_p, val.top_k)
    plan = EvaluationPlan(draws, val.counted, val.right_above, val.right_part)
    return Evaluation(sets, plan, _answer_of(val.answer_of))


def last_answer(response: str) -> str | None:
    """Return the final answer of a response, or all of it without one, white space aside; None where it is blank."""
    answer = final_answer(response)
    return " ".join((response if answer is None else answer).split()) or None


def _answer_of(spec: str) -> AnswerOf:
    """Return the function that finds the answer of a response, of the package or of the user."""
    if not spec:
        return last_answer
    function = load_from_file(spec, key="validation.answer_of", kind="function")
    if not callable(function):
        raise UserError(f"validation.answer_of={spec!r}: is of type {type(function).__name__}, not a function")
    return partial(_users_answer, function, spec)


def _users_answer(function: Callable[[str], object], spec: str, response: str) -> str | None:
    """Return what a user's function finds. Raises UserError where it fails or returns anything but a string or None."""
    setting = f"validation.answer_of={spec!r}"
    with users_code(f"{setting}: failed for a response"):
        answer = function(response)
    if not (answer is None or isinstance(answer, str)):
        raise UserError(f"{setting}: returned {type(answer).__name__}; it must return a string, or None for no answer")
    return answer
