"""Built-in reward functions, and a user's own by name. Imports no torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from decimal import Decimal

from mega_rl.config.schema.rollout import CODE_TESTS
from mega_rl.config.user_files import load_from_file
from mega_rl.errors import UserError
from mega_rl.rewards.code import code_format, code_tests, with_settings

# Returns a `score.Score`, an awaitable of one, or a list of scores for several responses.
RewardFunction = Callable[..., object]

MATH_TIMEOUT_S = 5  # for parsing, and again for comparing
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SPELLINGS = str.maketrans(_FULL_WIDTH | dict.fromkeys(map(ord, "\u2012\u2013\u2212\ufe63"), "-"))
_SPELLINGS |= dict.fromkeys(map(ord, "\u00a3\u00a5\u20a9\u20ac\u20b9"), "$")
_VALUE = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"\$?\s*(?P<sign>[+-]?)\s*\$?\s*(?P<value>{_VALUE})(?P<exponent>[eE][+-]?\d{{1,4}})?")
_UNIT = re.compile(r"\s*(?:[%$\u00b0]|(?:[a-z]{3,}|of|in|[ckm]m|[km]g)(?:[\s/-]+[a-z]+)*)?", re.IGNORECASE)
_FACTOR = re.compile(r"\b(?:and|or|to|half|dozen|(?:hundred|thousand|[bmtr]+illion)s?)\b", re.IGNORECASE)
_NEGATION = re.compile(r"\\(?:not|neg|lnot|sim|prime)(?![a-zA-Z])|[\u00ac']")
_FONT = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|mbox)\s*\{([^{}\\]*)\}")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])\s*(?=\d{3}(?!\d))")


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
    gold_text, response_text = final_answer(answer), final_answer(response)
    gold_text = _formula(answer if gold_text is None else gold_text)
    if response_text is not None:
        response_text = _formula(response_text)
        texts = [_words(text) for text in (response_text, gold_text)]
        if None not in texts:
            return float(texts[0] == texts[1])
        if len(_NEGATION.findall(response_text)) != len(_NEGATION.findall(gold_text)):
            return 0.0
    gold = verifier.parse(f"\\boxed{{{gold_text}}}", parsing_timeout=timeout)
    shown = response if response_text is None else f"\\boxed{{{response_text}}}"
    parsed = verifier.parse(shown, parsing_timeout=timeout)
    if not gold or not parsed:
        return 0.0
    return float(verifier.verify(gold, parsed, timeout_seconds=timeout))


def number_match(response: str, answer: str) -> float:
    """Return 1.0 if the response ends with the reference's number, else 0.0; never raises.

    The number is all that stands in the last \\boxed{...} or after the last "####"; in a response without either it is
    the last number of the text. Signs of currency, separators of thousands, "%" and units do not count:
    "#### -$1,200.00" is -1200. Fractions, powers, ranges and exponents are not read. The reference may be a whole
    solution of GSM8K, and may have an exponent. Far cheaper than `math_verify`.
    """
    final = final_answer(answer)
    reference = plain_number(answer if final is None else final, exponent=True)
    if reference is None:
        return 0.0
    final = final_answer(response)
    return float((_last_number(response) if final is None else plain_number(final)) == reference)


def has_final_answer(response: str) -> float:
    """Return 1.0 if the response names its final answer once and in form, else 0.0.

    The form is either one closed \\boxed{...} with something in it, or a last line "#### " and a number, as in GSM8K.
    """
    if response.count("####") + response.count("\\boxed") != 1:
        return 0.0
    if "\\boxed" in response:
        return float(bool(final_answer(response)))
    last_line = response.rstrip().rpartition("\n")[2]
    return float(last_line.startswith("####") and plain_number(last_line[4:]) is not None)


def plain_number(text: str, *, exponent: bool = False) -> Decimal | None:
    """Return the number that is the whole text, perhaps with currency and unit, else None."""
    text = _plain_text(text).strip(" \t\n*_`").removesuffix(".")
    match = _NUMBER.match(text)
    if match is None or (match["exponent"] and not exponent):
        return None
    unit = text[match.end() :]
    if not _UNIT.fullmatch(unit) or _FACTOR.search(unit):
        return None
    return Decimal(match["sign"] + match["value"].replace(",", "") + (match["exponent"] or ""))


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None within an expression such as 1/2."""
    words = [word for word in _plain_text(text).split() if re.search(r"\d", word)]
    last = words[-1].rpartition("=")[2].strip("\"'()[]*.,;:") if words else ""
    return plain_number(last)


def _plain_text(text: str) -> str:
    """Return a text without LaTeX's spaces, fonts and delimiters; one spelling of minus and currency."""
    text = _FONT.sub(lambda match: match[1] if re.search(r"\d", match[1]) else f" {match[1]}", text)
    text = text.replace("{,}", ",").replace(",\\!", ",").translate(_SPELLINGS)
    return re.sub(r"\\(?=[$%])|\\[()\[\]]|\\!", "", re.sub(r"\\[,;: ]", " ", text))


def _words(text: str) -> str | None:
    """Return a text of letters and white space only, in lower case; None for others."""
    words = text.strip("() ").lower().split()
    return " ".join(words) if "".join(words).isalpha() else None


def _formula(text: str) -> str:
    """Return an answer as the verifier reads it: no full stop, thin spaces or fonts."""
    text = re.sub(r"\\not\s*=", r"\\ne ", _THIN_SPACE.sub("", text.translate(_FULL_WIDTH).strip()))
    text = re.sub(r"(?<!\.)\.$", "", re.sub(r"^[\u2012\u2013\ufe63]", "-", text)).strip()
    text = re.sub(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", text)
    only = _FONT.fullmatch(text)
    return re.sub(r"\^(-\d+)", r"^{\1}", only[1].strip() if only else text)


def final_answer(text: str) -> str | None:
    """Return the last closed \\boxed{...} or the line after the last "####", whichever is later."""
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
    """Return the position behind each opening brace -> that of its closing brace, in one pass.

    Escaped braces do not count.
    """
    opened: list[int] = []
    closing = {}
    for match in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


BUILTINS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "code_tests": code_tests,
    "code_format": code_format,
    "number_match": number_match,
    "has_final_answer": has_final_answer,
}
CHEAP = frozenset({"exact_match", "number_match", "has_final_answer"})  # a process has nothing to guard there


def resolve(spec: str, *, key: str = "reward.function") -> RewardFunction:
    """Return the reward function that the setting `key` names: a built-in name, or `path/to/file.py:function`.

    spec: `code_tests` may have its settings behind it, as `code.specification` writes them. Raises UserError.
    """
    if spec in BUILTINS:
        return BUILTINS[spec]
    if spec.startswith(f"{CODE_TESTS} "):
        return with_settings(spec.removeprefix(f"{CODE_TESTS} "))
    if ":" in spec:
        function: RewardFunction = load_from_file(spec, key=key, kind="function")
        return function
    hint = f"add the function: {spec}:name" if spec.endswith(".py") else "or give path/to/file.py:function"
    raise UserError(f"{key}={spec!r}: is not among the built-in functions {', '.join(sorted(BUILTINS))}; {hint}")
