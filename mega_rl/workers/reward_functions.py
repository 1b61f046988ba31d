"""Reward functions: built-in ones, and a user's own from a file.

`mega_rl.workers.reward_calls` says how they are called.
"""

from __future__ import annotations

import difflib
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.errors import UserError
from mega_rl.workers.reward_calls import plan_call
from mega_rl.workers.user_files import load_from_file

RewardFunction = Callable[..., float | Mapping[str, float]]

MATH_TIMEOUT_S = 5  # for parsing, and again for comparing


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, white space around either aside; else 0.0."""
    return float(response.strip() == answer.strip())


def math_verify(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference as mathematics, else 0.0; never raises.

    The final answer is what stands in the last \\boxed{...} or after the last "####" (GSM8K), whichever comes later;
    without either, the last expression of the text. What cannot be parsed, or takes more than 5 s to parse or compare,
    scores 0.0. Those time limits are alarms of the operating system that only the main thread can set: called from
    another thread there is none.
    Source: the math-verify package; GSM8K's format: Cobbe et al. 2021, arXiv:2110.14168.
    """
    import math_verify as verifier  # brings sympy: too slow to import where it is not used

    timeout = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    gold_text = final_answer(answer)
    gold = verifier.parse(_boxed(answer.strip() if gold_text is None else gold_text), parsing_timeout=timeout)
    response_text = final_answer(response)
    parsed = verifier.parse(response if response_text is None else _boxed(response_text), parsing_timeout=timeout)
    if not gold or not parsed:
        return 0.0
    return float(verifier.verify(gold, parsed, timeout_seconds=timeout))


def final_answer(text: str) -> str | None:
    """The content of the last closed \\boxed{...} or the line after the last "####", whichever is later, or None."""
    hashes = text.rfind("####")
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        if match.start() < hashes:
            break
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end].strip()
    if hashes < 0:
        return None
    return text[hashes + 4 :].strip().partition("\n")[0].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one opened just before `start`; escaped braces do not count."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


BUILTINS: dict[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}


def resolve(spec: str, given: RewardFunction | None = None) -> RewardFunction:
    """Return the reward function that `reward.function` names: a built-in name, or `path/to/file.py:function`.

    given: the function itself, of a Python program; its name is then in `spec`.

    Raises UserError for an unknown name, a missing file, a file that fails to import, a missing or uncallable function,
    and one that cannot be called as `mega_rl.workers.reward_calls` does.
    """
    if given is not None:
        _check_signature(given, spec)
        return given
    if spec in BUILTINS:
        return BUILTINS[spec]
    if ":" not in spec:
        raise UserError(_unknown(spec))
    function: RewardFunction = load_from_file(spec, key="reward.function", kind="function")
    _check_signature(function, spec)
    return function


def _unknown(spec: str) -> str:
    nearest = difflib.get_close_matches(spec, BUILTINS, n=1)
    if spec.endswith(".py"):
        hint = f"add the function: {spec}:name"
    elif nearest:
        hint = f"did you mean {nearest[0]}?"
    else:
        hint = "or give path/to/file.py:function"
    return f"reward.function={spec!r}: is not among the built-in functions {', '.join(sorted(BUILTINS))}; {hint}"


def _check_signature(function: Any, spec: str) -> None:
    if not callable(function):
        raise UserError(f"reward.function={spec!r}: is of type {type(function).__name__}, not a function")
    try:
        plan_call(function)
    except TypeError as error:
        raise UserError(f"reward.function={spec!r}: {error}") from error
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"reward.function={spec!r}: is asynchronous or a generator; it must return a number itself")
