"""Tests of a row, in the forms that published data sets have.

| form of the answer, as JSON or as text of JSON | of |
|---|---|
| {"inputs": [text, ...], "outputs": [text, ...]} or "input", "output" | standard input and output: APPS, TACO, CodeContests |
| the same with "fn_name": inputs are lists of arguments, or texts of one JSON value a line | calls: APPS, LeetCode, LiveCodeBench |
| [{"input": text, "output": text}, ...] | LiveCodeBench, Codeforces |
| [text of assert statements, ...] | MBPP: each is a case |
| text of Python with assert statements, `check(candidate)` or functions test_... | HumanEval, KodCode: one case |
| {"test" or "tests" or "test_list": as the two above, "entry_point", "setup"} | |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mega_rl.sandbox.limits import Execution, Sandbox
from mega_rl.sandbox.orders import Order, harness_text
from mega_rl.workers.code.suites import UnknownTestsError, suite_of

TOLERANCE = 1e-6  # relative and absolute, where the expected number has a decimal point
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


class Case(Protocol):
    """One test of a program."""

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        """Return whether the program passes, and what became of its run. Raises SandboxError."""
        ...


@dataclass(frozen=True)
class StdioCase:
    """A program that reads standard input and writes standard output."""

    stdin: str
    stdout: str

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        outcome = sandbox.run(program, self.stdin.encode(), timeout_s=timeout_s)
        return outcome.succeeded and same_text(outcome.stdout.decode(errors="replace"), self.stdout), outcome


@dataclass(frozen=True)
class CallCase:
    """A function that is called; its result is compared outside of the sandbox."""

    entry: str
    arguments: Sequence[object]
    expected: object  # a text stands for itself, and for the value that it has as JSON

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        order = Order.of_call(program, self.entry, list(self.arguments))
        outcome = sandbox.run(harness_text(), order.stdin, timeout_s=timeout_s)
        verdict = order.verdict(outcome)
        if "value" not in verdict:
            return False, outcome
        wanted = [self.expected]
        if isinstance(self.expected, str):
            with contextlib.suppress(ValueError, RecursionError):
                wanted.append(json.loads(self.expected))
        wanted += [one[0] for one in wanted if isinstance(one, list) and len(one) == 1]  # APPS wraps some results
        try:
            return any(same_value(verdict["value"], one) for one in wanted), outcome
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):  # the program's form is none
            return False, outcome


@dataclass(frozen=True)
class AssertCase:
    """Assert statements over the names that a program defines."""

    tests: str
    entry: str = ""

    @property
    def suite(self) -> Mapping[str, object]:
        """Return the tests as the harness takes them. Raises UnknownTestsError."""
        return suite_of(self.tests, self.entry)

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        order = Order.of_tests(program, self.suite)
        outcome = sandbox.run(harness_text(), order.stdin, timeout_s=timeout_s)
        return order.verdict(outcome).get("passed") is True, outcome


def read_cases(answer: object, row: Mapping[str, object] | None = None) -> list[Case]:
    """Return the tests of a row's answer; `row` may name "entry_point". Raises UnknownTestsError."""
    cases = _read(_parsed(answer), row or {})
    if not cases:
        raise UnknownTestsError("there are no tests")
    return cases


def _read(tests: object, row: Mapping[str, object]) -> list[Case]:
    if isinstance(tests, str):
        return [_asserts(tests, row)]
    if isinstance(tests, list):
        if all(isinstance(one, str) for one in tests):
            return [_asserts(str(one), row) for one in tests]
        if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in tests):
            pairs = {"inputs": [one["input"] for one in tests], "outputs": [one["output"] for one in tests]}
            return _pairs(pairs, str(row.get("fn_name") or ""))
    if isinstance(tests, dict):
        for key in ("tests", "test", "test_list"):
            if key in tests:
                return _read(_parsed(tests[key]), {**row, **tests})
        if {"input", "output"} <= tests.keys():
            tests = {**tests, "inputs": tests["input"], "outputs": tests["output"]}
        if {"inputs", "outputs"} <= tests.keys():
            return _pairs(tests, str(tests.get("fn_name") or row.get("fn_name") or ""))
    raise UnknownTestsError(
        'tests are {"inputs": [...], "outputs": [...]}, with "fn_name" for calls; [{"input", "output"}, ...]; text of '
        'assert statements, or a list of such; or {"tests": ...}'
    )


def _parsed(value: object) -> object:
    """Return the value, or what a text of JSON holds."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _asserts(text: str, row: Mapping[str, object]) -> AssertCase:
    setup = row.get("setup") or row.get("test_setup_code") or row.get("test_imports") or ""
    before = "\n".join(map(str, setup)) if isinstance(setup, list) else str(setup)
    tests = f"{before}\n{text}" if before else text
    case = AssertCase(tests, str(row.get("entry_point") or ""))
    suite_of(case.tests, case.entry)  # raises for tests that no program can be judged by
    return case


def _pairs(tests: Mapping[str, object], entry: str) -> list[Case]:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnknownTestsError('"inputs" and "outputs" must be lists of one length')
    if entry:
        return [CallCase(entry, _arguments(one), other) for one, other in zip(inputs, outputs, strict=True)]
    return [StdioCase(_text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True)]


def _arguments(value: object) -> list[object]:
    """Return the arguments of a call: a list, or a text with one JSON value a line."""
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise UnknownTestsError("the input of a call is a list of arguments, or a text with one JSON value a line")
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except ValueError:
        raise UnknownTestsError("the input of a call is a text, but not one JSON value a line") from None


def _text(value: object) -> str:
    """Return standard input or output: a text, or a list of its lines. Raises UnknownTestsError for null."""
    if value is None or (isinstance(value, list) and None in value):
        raise UnknownTestsError("an input or output is null; it must be a text, or a list of lines")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_text(given: str, expected: str) -> bool:
    """Return whether two outputs have the same words; one expected with a decimal point may differ by `TOLERANCE`."""
    ours, theirs = given.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    is_decimal = "." in expected and _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given)
    return bool(is_decimal) and _close(float(given), float(expected))


def same_value(given: object, expected: object) -> bool:
    """Return whether a result is the expected one: any sequence is a list, a set one in any order; an int is no bool.

    given: in the form of `mega_rl.sandbox.inside.values`; it is never made a set or dict again, for keys of a program
    may all have one hash. Raises ValueError, TypeError or KeyError for what has no form.
    """
    if isinstance(expected, list):
        items = _items(given, len(expected))
        if isinstance(given, dict) and given.keys() & {"set", "frozenset"} and items is not None:
            items, expected = sorted(items, key=str), sorted(expected, key=str)
        return items is not None and len(items) == len(expected) and all(map(same_value, items, expected))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or "dict" not in given or len(given["dict"]) != len(expected):
            return False
        texts = {str(key): value for key, value in given["dict"]}  # JSON has no other keys
        return all(key in texts and same_value(texts[key], value) for key, value in expected.items())
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    if isinstance(expected, float) and isinstance(given, int | float):
        return _close(float(given), expected)
    return bool(type(given) is type(expected) or isinstance(given, float)) and given == expected


def _items(given: object, count: int) -> Sequence[object] | None:
    """Return the items of a list or another collection, None of anything else and of a range of another length."""
    if isinstance(given, list):
        return given
    if not isinstance(given, dict):
        return None
    ((kind, parts),) = given.items()
    if kind == "range":
        return range(*parts) if len(range(*parts)) == count else None
    return parts if kind in ("tuple", "iterator", "set", "frozenset") else None


def _close(given: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return given == expected or (math.isnan(given) and math.isnan(expected))
    return math.isfinite(given) and math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
