"""Evaluations: what they sample and measure, and the answer that a response votes for."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.config.schema import Config
from mega_rl.config.user_files import load_from_file
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks
from mega_rl.rewards.builtin import final_answer
from mega_rl.rewards.role import UsersAnswers
from mega_rl.trainer.validation import AnswersOf, Evaluation, EvaluationPlan
from mega_rl.types import Draws, PromptSet


def build_evaluation(config: Config, sets: Sequence[PromptSet], everyone: Ranks) -> Evaluation:
    """Return the evaluation of sets of prompts. Raises UserError for an `answer_of` that cannot be loaded.

    everyone: all ranks of the run.
    """
    val = config.validation
    longest = val.max_new_tokens
    usual = val.temperature == 0 and not longest
    draws = None if usual else Draws(val.n, val.temperature, val.top_p, val.top_k, max_new_tokens=longest)
    plan = EvaluationPlan(draws, val.counted, val.right_above, val.right_part, val.chunk)
    return Evaluation(sets, plan, _answers_of(config, everyone))


def last_answer(response: str) -> str | None:
    """Return the final answer of a response, or all of it without one, white space aside; None where it is blank."""
    answer = final_answer(response)
    return " ".join((response if answer is None else answer).split()) or None


def _answers_of(config: Config, everyone: Ranks) -> AnswersOf:
    """Return the function that finds the answers of responses, of the package or of the user."""
    spec = config.validation.answer_of
    if not spec:
        return lambda responses: [last_answer(response) for response in responses]
    function = load_from_file(spec, key="validation.answer_of", kind="function")
    if not callable(function):
        raise UserError(f"validation.answer_of={spec!r}: is of type {type(function).__name__}, not a function")
    setting = f"validation.answer_of={spec!r}"
    return UsersAnswers(function, setting=setting, everyone=everyone, timeout_s=config.trainer.timeout_s)
