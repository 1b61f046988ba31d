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

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mega_rl.sandbox.inside.values import decode
from mega_rl.sandbox.limits import Execution, Sandbox
from mega_rl.sandbox.orders import Order, harness_text

TOLERANCE = 1e-6  # relative and absolute, of numbers with a decimal point


class UnknownTestsError(ValueError):
    """A row's tests have no form that is known; the message says which there are."""


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
    expected: object

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        order = Order.of_call(program, self.entry, list(self.arguments))
        outcome = sandbox.run(harness_text(), order.stdin, timeout_s=timeout_s)
        verdict = order.verdict(outcome)
        if "value" not in verdict:
            return False, outcome
        try:
            value = decode(verdict["value"], _no_data)
        except (TypeError, ValueError, KeyError, RecursionError):
            return False, outcome
        wrapped = isinstance(self.expected, list) and len(self.expected) == 1 and same_value(value, self.expected[0])
        return wrapped or same_value(value, self.expected), outcome  # APPS wraps some results in a list


@dataclass(frozen=True)
class AssertCase:
    """Assert statements over the names that a program defines."""

    tests: str
    entry: str = ""

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> tuple[bool, Execution]:
        order = Order.of_tests(program, self.tests, self.entry)
        outcome = sandbox.run(harness_text(), order.stdin, timeout_s=timeout_s)
        return order.verdict(outcome).get("passed") is True, outcome


def _no_data(kind: str, parts: object) -> object:
    raise ValueError(f"a result of the form {kind!r} is no data")


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
    try:
        compile(tests, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownTestsError(f"the tests are not Python: {error}") from None
    return AssertCase(tests, str(row.get("entry_point") or ""))


def _pairs(tests: Mapping[str, object], entry: str) -> list[Case]:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnknownTestsError('"inputs" and "outputs" must be lists of one length')
    if entry:
        return [CallCase(entry, _arguments(one), _expected(other)) for one, other in zip(inputs, outputs, strict=True)]
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


def _expected(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _text(value: object) -> str:
    """Return standard input or output: a text, or a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_text(given: str, expected: str) -> bool:
    """Return whether two outputs have the same words; numbers with a decimal point may differ by `TOLERANCE`."""
    ours, theirs = given.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if not any(mark in given + expected for mark in ".eE"):
        return False
    try:
        return _close(float(given), float(expected))
    except ValueError:
        return False


def same_value(given: object, expected: object) -> bool:
    """Return whether two results are the same: a tuple is a list, and an int is no bool."""
    if isinstance(expected, list | tuple):
        return isinstance(given, list | tuple) and len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        texts = {str(key): value for key, value in given.items()}  # JSON has no other keys
        return all(str(key) in texts and same_value(texts[str(key)], value) for key, value in expected.items())
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    if isinstance(expected, float) and isinstance(given, int | float):
        return _close(float(given), expected)
    return bool(type(given) is type(expected) or isinstance(given, float)) and given == expected


def _close(given: float, expected: float) -> bool:
    return math.isfinite(given) and math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
