"""Built-in reward functions, and a user's own by name. Imports no torch."""

from __future__ import annotations

import difflib
import math
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
MOST_DIGITS = 1e6  # longest number that is computed: about a second
MOST_LEVELS = 200  # deepest nesting of an expression that is estimated
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SPELLINGS = str.maketrans(_FULL_WIDTH | dict.fromkeys(map(ord, "\u2012\u2013\u2212\ufe63"), "-"))
_SPELLINGS |= dict.fromkeys(map(ord, "\u00a3\u00a5\u20a9\u20ac\u20b9"), "$")
_VALUE = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_PLAIN = re.compile(rf"\$?\s*(?P<sign>[+-]?)\s*\$?\s*(?P<value>{_VALUE})(?P<exponent>[eE][+-]?\d{{1,4}})?")
_OPERATOR = re.compile(r"[^\w$=]*[-+*/^<>|~\u00d7\u00f7\u00b1\u2248][^\w$=]*|.*[-+/^\d]")
_FACTOR = re.compile(  # a number next to such a word is part of another one
    "and|or|to|over|by|plus|minus|negative|times|point|below|squared|cubed|factorial|pi|sqrt|mod|[eikmnxyz]|mn|bn|lakh|"
    "crore|hundred|thousand|dozens?|(?:m|b|tr)illions?|hal(?:f|ves)|thirds?|quarters?|fifths?|eighths?|ninths?|"
    "(?:four|six|seven|ten|hundred|thousand|million)ths?"
)
_UNIT = re.compile(r"(?:[a-zA-Z]{3,}|of|in|per|[ckm]m|[km]g|ml|lb|ft|oz|hr)\.?")
_NEGATION = re.compile(r"\\(?:not|neg|lnot|sim|prime)(?![a-zA-Z])|[\u00ac']")
_FONT = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|mbox)\s*\{([^{}\\]*)\}")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])\s*(?=\d{3}(?!\d))")


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
    gold_text, response_text = final_answer(answer), final_answer(response)
    gold_text = _formula(answer if gold_text is None else gold_text)
    if response_text is not None:
        response_text = _formula(response_text)
        texts = [_words(text) for text in (response_text, gold_text)]
        if None not in texts:
            return float(texts[0] == texts[1])
        if len(_NEGATION.findall(response_text)) != len(_NEGATION.findall(gold_text)):
            return 0.0
    gold = verifier.parse(_boxed(gold_text), parsing_timeout=timeout)
    parsed = verifier.parse(response if response_text is None else _boxed(response_text), parsing_timeout=timeout)
    if not gold or not parsed:
        return 0.0
    if any(num_digits(expression) > MOST_DIGITS for expression in parsed):
        return float(response_text == gold_text)
    return float(verifier.verify(gold, parsed, timeout_seconds=timeout))


def number_match(response: str, answer: str) -> float:
    """Return 1.0 if the response ends with the reference's number, else 0.0; never raises.

    The number is all that stands in the last \\boxed{...} or after the last "####"; in a response without either it is
    the last word with a digit. Signs of currency, separators of thousands, "%" and units do not count:
    "#### -$1,200.00" is -1200. Fractions, powers, ranges, exponents and numbers with other separators are not read.
    The reference may be a whole solution of GSM8K, and may have an exponent. Far cheaper than `math_verify`.
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
    text = _plain_text(text).strip(" \t\n*_`")
    match = _PLAIN.match(text)
    if match is None or (match["exponent"] and not exponent):
        return None
    rest = re.sub(r"(?<!\.)[.,;:]$", "", text[match.end() :])
    unit = re.sub(r"^\s*(?:[%$]|\^?\{?(?:\\circ|\u00b0)\}?)|(?<=[a-z])(?:\^\{?[23]\}?|[\u00b2\u00b3])$", "", rest)
    words = re.split(r"[\s/-]+", unit.strip()) if unit.strip() else []
    if unit[:1].isalpha() or not all(_UNIT.fullmatch(word) and not _FACTOR.fullmatch(word.lower()) for word in words):
        return None
    return Decimal(match["sign"] + match["value"].replace(",", "") + (match["exponent"] or ""))


def _last_number(text: str) -> Decimal | None:
    """Return the last word with a digit as a number; None within an expression."""
    words = ["", *_plain_text(text).split(), ""]
    place = next((place for place in range(len(words) - 1, 0, -1) if re.search(r"\d", words[place])), 0)
    left, _, word = words[place].rpartition("=")
    neighbours = (words[place + 1] if place else "", "" if left else words[place - 1])
    if any(_OPERATOR.fullmatch(near) or _FACTOR.fullmatch(near.strip(".,;:*$").lower()) for near in neighbours):
        return None
    return plain_number(re.sub(r"(?<!\.)[.,;:]$", "", word).strip("\"'()[]"))


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


def num_digits(expression: object, depth: int = 0) -> float:
    """Return roughly how many decimal digits the largest number of a computed sympy expression has.

    Only powers, factorials and binomials are estimated, from above: 9^{9^{9^9}} takes longer to compute than anybody
    waits. 0.0 below `MOST_LEVELS` of nesting.
    """
    import sympy

    if isinstance(expression, sympy.Integer):
        return math.log10(max(abs(int(expression)), 1))
    if not isinstance(expression, sympy.Basic) or depth > MOST_LEVELS:
        return 0.0
    digits = [num_digits(part, depth + 1) for part in expression.args]
    most = max(digits, default=0.0)
    values = [10.0 ** min(number, 300.0) for number in digits]  # the parts, roughly
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


def resolve(spec: str, *, key: str = "reward.function") -> RewardFunction:
    """Return the reward function that the setting `key` names: a built-in name, or `path/to/file.py:function`.

    spec: `code_tests` may have its settings behind it, as `code.specification` writes them.

    Raises:
        UserError: an unknown name, a missing file or function, a file that fails to import.
    """
    if spec in BUILTINS:
        return BUILTINS[spec]
    if spec.startswith(f"{CODE_TESTS} "):
        return with_settings(spec.removeprefix(f"{CODE_TESTS} "))
    if ":" in spec:
        function: RewardFunction = load_from_file(spec, key=key, kind="function")
        return function
    nearest = difflib.get_close_matches(spec, BUILTINS, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "or give path/to/file.py:function"
    if spec.endswith(".py"):
        hint = f"add the function: {spec}:name"
    raise UserError(f"{key}={spec!r}: is not among the built-in functions {', '.join(sorted(BUILTINS))}; {hint}")
