"""Reward functions: built-in ones, and a user's own from a file.

`mega_rl.workers.reward_calls` says how they are called.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import threading
from collections.abc import Callable
from decimal import Decimal

from mega_rl.config.schema.sandbox import CODE_TESTS
from mega_rl.errors import UserError
from mega_rl.workers.code.blocks import code_format
from mega_rl.workers.code.reward import code_tests, with_settings
from mega_rl.workers.reward_calls import plan_call
from mega_rl.workers.user_files import load_from_file

# A score as `reward_calls.Score`, an awaitable of one, or a list of scores of a function of several responses.
RewardFunction = Callable[..., object]

MATH_TIMEOUT_S = 5  # for parsing, and again for comparing
MOST_DIGITS = 1e6  # of a number in an answer that is computed: a second or so
MOST_LEVELS = 200  # of an expression's nesting that is looked into
_NUMBER = re.compile(r"(?:(?<![\d.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_LAST_LINE = re.compile(r"#### ?-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)%?\.?")


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, white space around either aside; else 0.0."""
    return float(response.strip() == answer.strip())


def math_verify(prompt: str, response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference as mathematics, else 0.0; never raises.

    The final answer is what stands in the last \\boxed{...} or after the last "####" (GSM8K), whichever comes later;
    without either, the last expression of the text. What cannot be parsed, takes more than 5 s to parse or compare, or
    has more than a million digits and is not the reference letter by letter, scores 0.0. Those time limits are alarms
    of the operating system that only the main thread can set: called from another thread there is none.
    Source: the math-verify package; GSM8K's format: Cobbe et al. 2021, arXiv:2110.14168.
    """
    import math_verify as verifier  # brings sympy: too slow to import where it is not used

    timeout = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    gold_text = final_answer(answer)
    gold_text = answer.strip() if gold_text is None else gold_text
    gold = verifier.parse(_boxed(gold_text), parsing_timeout=timeout)
    response_text = final_answer(response)
    parsed = verifier.parse(response if response_text is None else _boxed(response_text), parsing_timeout=timeout)
    if not gold or not parsed:
        return 0.0
    if any(num_digits(expression) > MOST_DIGITS for expression in parsed):
        return float(response_text == gold_text)
    return float(verifier.verify(gold, parsed, timeout_seconds=timeout))


def number_match(response: str, answer: str) -> float:
    """Return 1.0 if the number that the response ends with is that of the reference, else 0.0; never raises.

    It stands in the last \\boxed{...} or after the last "####"; in a response without either it is the last number of
    the text. Signs of currency, separators of thousands and units do not count: "#### $1,200.00" is 1200. The reference
    may be a whole solution of GSM8K. Far cheaper than `math_verify`, and for plain numbers alone.
    """
    reference = _number(answer)
    return float(reference is not None and _number(response) == reference)


def has_final_answer(response: str) -> float:
    """Return 1.0 if the response names its final answer in the form that is asked for, once; else 0.0.

    Either one closed \\boxed{...} with something in it, or a last line "#### " and a number, as in GSM8K.
    """
    if response.count("####") + response.count("\\boxed") != 1:
        return 0.0
    if "\\boxed" in response:
        return float(bool(final_answer(response)))
    return float(_LAST_LINE.fullmatch(response.rstrip().rpartition("\n")[2]) is not None)


def _number(text: str) -> Decimal | None:
    """Return the final answer of a text as a number; None without one."""
    final = final_answer(text)
    numbers = _NUMBER.findall(text if final is None else final)
    return Decimal(numbers[0 if final is not None else -1].replace(",", "")) if numbers else None


def final_answer(text: str) -> str | None:
    """The content of the last closed \\boxed{...} or the line after the last "####", whichever is later, or None."""
    hashes, closing = text.rfind("####"), _closing_braces(text)
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        if match.start() < hashes:
            break
        end = closing.get(match.end())
        if end is not None:
            return text[match.end() : end].strip()
    if hashes < 0:
        return None
    return text[hashes + 4 :].strip().partition("\n")[0].strip()


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position behind each opening brace -> that of the brace that closes it; escaped ones do not count.

    One pass, whatever the nesting.
    """
    opened: list[int] = []
    closing = {}
    for match in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def num_digits(expression: object, depth: int = 0) -> float:
    """Return about how many decimal digits the largest number in a sympy expression has once it is computed.

    Powers, factorials and binomials alone are estimated, from above: 9^{9^{9^9}} takes longer to compute than anybody
    waits. 0.0 below `MOST_LEVELS` of nesting.
    """
    import sympy

    if isinstance(expression, sympy.Integer):
        return math.log10(max(abs(int(expression)), 1))
    if not isinstance(expression, sympy.Basic) or depth > MOST_LEVELS:
        return 0.0
    digits = [num_digits(part, depth + 1) for part in expression.args]
    most = max(digits, default=0.0)
    values = [10.0 ** min(number, 300.0) for number in digits]  # of the parts, about
    if isinstance(expression, sympy.Pow):
        return max(most, digits[0] * values[1])
    if isinstance(expression, sympy.factorial):
        return max(most, values[0] * digits[0])
    if isinstance(expression, sympy.binomial):
        return max(most, values[1] * digits[0])
    return sum(digits) if isinstance(expression, sympy.Mul) else most


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


BUILTINS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "code_tests": code_tests,
    "code_format": code_format,
    "number_match": number_match,
    "has_final_answer": has_final_answer,
}
CHEAP = frozenset({"exact_match", "number_match", "has_final_answer"})  # a process has nothing to guard there


def resolve(spec: str, given: RewardFunction | None = None, *, key: str = "reward.function") -> RewardFunction:
    """Return the reward function that the setting `key` names: a built-in name, or `path/to/file.py:function`.

    spec: `code_tests` may have its settings behind it (`mega_rl.workers.code.reward.specification`).
    given: the function itself, of a Python program; its name is then in `spec`.

    Raises UserError for an unknown name, a missing file, a file that fails to import, a missing or uncallable function,
    and one that cannot be called as `mega_rl.workers.reward_calls` does.
    """
    if given is not None:
        _check_signature(given, spec, key)
        return given
    if spec in BUILTINS:
        return BUILTINS[spec]
    if spec.startswith(f"{CODE_TESTS} "):
        return with_settings(spec.removeprefix(f"{CODE_TESTS} "))
    if ":" not in spec:
        raise UserError(_unknown(spec, key))
    function: RewardFunction = load_from_file(spec, key=key, kind="function")
    _check_signature(function, spec, key)
    return function


def _unknown(spec: str, key: str) -> str:
    nearest = difflib.get_close_matches(spec, BUILTINS, n=1)
    if spec.endswith(".py"):
        hint = f"add the function: {spec}:name"
    elif nearest:
        hint = f"did you mean {nearest[0]}?"
    else:
        hint = "or give path/to/file.py:function"
    return f"{key}={spec!r}: is not among the built-in functions {', '.join(sorted(BUILTINS))}; {hint}"


def _check_signature(function: object, spec: str, key: str) -> None:
    if not callable(function):
        raise UserError(f"{key}={spec!r}: is of type {type(function).__name__}, not a function")
    try:
        plan_call(function)
    except TypeError as error:
        raise UserError(f"{key}={spec!r}: {error}") from error
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"{key}={spec!r}: is a generator; it must return a number itself")
