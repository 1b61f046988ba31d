"""Rewards of programs: `code_tests` runs a response's program against its row's tests, `code_format` only parses it.

docs/sandbox.md lists the forms of a row's tests, which are those of published data sets. Imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from mega_rl.config.keys import kind_of
from mega_rl.config.schema.rollout import CODE_TESTS, LocalSandboxConfig, RemoteSandboxConfig, RewardSandboxConfig
from mega_rl.errors import UserError
from mega_rl.rewards.sandbox import MIB, Limits, Sandbox, SandboxError
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool
from mega_rl.rewards.sandbox.suites import UnknownTestsError, judge, suite_of
from mega_rl.rewards.service import RETRIES, WAIT_S, Poster, RemoteSandbox, find_service

SECTION = "reward.sandbox"
MOST_CHARACTERS = 1 << 15  # longest program parsed outside a sandbox: half a second
PYTHON = ("", "python", "python3", "py")
TOLERANCE = 1e-6  # relative and absolute, where the expected number has a decimal point
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class CodeTests:
    """Scores of responses by their rows' tests."""

    sandbox: Sandbox
    timeout_s: float  # limit of one case
    total_s: float  # limit of a response's cases; those not begun by then have failed
    all_or_nothing: bool

    def __call__(self, response: str, answer: object, row: Mapping[str, object] | None = None) -> float:
        """Return the share of the cases that pass; with `all_or_nothing` 1.0 or 0.0.

        Raises UnknownTestsError for a row without tests, and SandboxError where the sandbox fails.
        """
        cases = read_cases(answer, row)
        program = last_program(response)
        if program is None or not program.strip():
            return 0.0
        deadline, passed = time.monotonic() + self.total_s, 0
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s > 0 and case.run(self.sandbox, program, min(self.timeout_s, left_s)):
                passed += 1
            elif left_s <= 0 or self.all_or_nothing:
                break
        return float(passed == len(cases)) if self.all_or_nothing else passed / len(cases)


def code_tests(response: str, answer: object, row: Mapping[str, object] | None = None) -> float:
    """Return the share of the row's tests that the program passes, under default settings."""
    return _built(LocalSandboxConfig())(response, answer, row)


def specification(settings: RewardSandboxConfig) -> str:
    """Return the reward function's name with its settings, for `resolve` in any process."""
    return f"{CODE_TESTS} {json.dumps(settings.plain, sort_keys=True)}"


def with_settings(text: str) -> CodeTests:
    """Return the reward function of settings in JSON. Raises UserError without such a sandbox."""
    return _built(cast(RewardSandboxConfig, kind_of(SECTION, json.loads(text))))


@functools.cache
def _built(settings: RewardSandboxConfig) -> CodeTests:
    with usable_sandbox(settings) as sandbox:
        return CodeTests(sandbox, settings.timeout_s, settings.total_s, all_or_nothing=settings.score == "all")


def build_sandbox(settings: RewardSandboxConfig) -> LocalSandbox | RemoteSandbox:
    """Return the sandbox, which has run nothing yet. Raises SandboxError and UserError with the fix."""
    limits = Limits(settings.timeout_s, settings.memory_mib * MIB, output_bytes=settings.output_kib << 10)
    if isinstance(settings, RemoteSandboxConfig):
        service = find_service(settings.url, settings.key_file, SECTION)
        timeout_s = settings.timeout_s + WAIT_S
        return RemoteSandbox(Poster(service, section=SECTION, timeout_s=timeout_s, retries=RETRIES), limits)
    assert isinstance(settings, LocalSandboxConfig)
    limits = replace(limits, processes=settings.processes, tmp_bytes=settings.tmp_mib * MIB)
    return LocalSandbox(Tool.find(settings.interpreter), limits)


@contextlib.contextmanager
def usable_sandbox(settings: RewardSandboxConfig) -> Iterator[LocalSandbox | RemoteSandbox]:
    """Yield the sandbox of the settings; its failure is a mistake of the user."""
    try:
        yield build_sandbox(settings)
    except SandboxError as error:
        raise UserError(f"{SECTION}={settings}: {error}") from None


def check_sandbox(settings: RewardSandboxConfig) -> None:
    """Run a program in the sandbox of the settings. Raises UserError unless it works."""
    with usable_sandbox(settings) as sandbox:
        sandbox.check()


def last_program(response: str) -> str | None:
    """Return the code of the last closed block of Python, or None.

    The block may name no language. It begins at a line with three or more backticks, and ends at one of as many.
    """
    program, opened, language = None, "", ""
    lines: list[str] = []
    for line in response.splitlines(keepends=True):
        words = line.strip()
        rest = words.lstrip("`")
        ticks = words[: len(words) - len(rest)]
        if not opened and len(ticks) >= 3 and "`" not in rest:
            opened, language, lines = ticks, (rest.lower().split() or [""])[0], []
        elif opened and not rest and len(ticks) >= len(opened):
            program = "".join(lines) if language in PYTHON else program
            opened = ""
        else:
            lines.append(line)
    return program


def code_format(response: str) -> float:
    """Return 1.0 if the response has a closed block of Python that parses, else 0.0.

    A block above `MOST_CHARACTERS` scores 0.0.
    """
    program = last_program(response)
    if program is None or not program.strip() or len(program) > MOST_CHARACTERS:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Parsed only: twenty nested `finally` would compile to gigabytes.
            compile(program, "program.py", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return 0.0
    return 1.0


@dataclass(frozen=True)
class StdioCase:
    """A program that reads standard input and writes standard output."""

    stdin: str
    stdout: str

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> bool:
        """Return whether the program passes. Raises SandboxError."""
        outcome = sandbox.run(program, self.stdin.encode(), timeout_s=timeout_s)
        return outcome.succeeded and same_text(outcome.stdout.decode(errors="replace"), self.stdout)


@dataclass(frozen=True)
class CallCase:
    """A function that is called; its result is compared outside of the sandbox."""

    entry: str
    arguments: Sequence[object]
    expected: object  # a text stands for itself, and for the value that it has as JSON

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> bool:
        """Return whether the program passes. Raises SandboxError."""
        order = {"code": program, "entry": self.entry, "arguments": list(self.arguments)}
        verdict = judge(sandbox, timeout_s, "call", **order)
        if "value" not in verdict:
            return False
        wanted = [self.expected]
        if isinstance(self.expected, str):
            with contextlib.suppress(ValueError, RecursionError):
                wanted.append(json.loads(self.expected))
        wanted += [one[0] for one in wanted if isinstance(one, list) and len(one) == 1]  # APPS wraps some results
        try:
            return any(same_value(verdict["value"], one) for one in wanted)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):  # the program's form is none
            return False


@dataclass(frozen=True)
class AssertCase:
    """Assert statements over the names that a program defines."""

    tests: str
    entry: str = ""

    @property
    def suite(self) -> Mapping[str, object]:
        """Return the tests as the harness takes them. Raises UnknownTestsError."""
        return suite_of(self.tests, self.entry)

    def run(self, sandbox: Sandbox, program: str, timeout_s: float) -> bool:
        """Return whether the program passes. Raises SandboxError."""
        return judge(sandbox, timeout_s, "tests", code=program, suite=self.suite).get("passed") is True


Case: TypeAlias = StdioCase | CallCase | AssertCase


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
    case = AssertCase(f"{before}\n{text}" if before else text, str(row.get("entry_point") or ""))
    assert case.suite  # raises for tests that no program can be judged by
    return case


def _pairs(tests: Mapping[str, object], entry: str) -> list[Case]:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnknownTestsError('"inputs" and "outputs" must be lists of one length')
    if entry:
        return [CallCase(entry, _arguments(one), other) for one, other in zip(inputs, outputs, strict=True)]
    return [StdioCase(_text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True)]


def _arguments(value: object) -> list[object]:
    """Return a call's arguments from a list or a text of JSON lines."""
    try:
        if isinstance(value, str):
            return [json.loads(line) for line in value.splitlines() if line.strip()]
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise UnknownTestsError("the input of a call is a list of arguments, or a text with one JSON value a line")
    return value


def _text(value: object) -> str:
    """Return a text, also from a list of its lines. Raises UnknownTestsError for null."""
    lines = value if isinstance(value, list) else [value]
    if None in lines:
        raise UnknownTestsError("an input or output is null; it must be a text, or a list of lines")
    return "\n".join(map(str, lines))


def same_text(given: str, expected: str) -> bool:
    """Return whether two outputs have the same words; decimals may differ by `TOLERANCE`."""
    ours, theirs = given.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    is_decimal = "." in expected and _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given)
    return bool(is_decimal) and _close(float(given), float(expected))


def same_value(given: object, expected: object) -> bool:
    """Return whether a result is the expected one.

    Any sequence equals a list, a set one in any order; an int equals no bool.

    given: in the form of `sandbox.harness`; it is never made a set or dict again, for keys of a program may all
    have one hash. Raises ValueError, TypeError or KeyError for an unknown form.
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
    """Return a collection's items; None for others and ranges of another length."""
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
