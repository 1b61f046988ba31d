"""Rewards of programs: blocks of responses, tests of rows in the forms of published data sets, scores and failures."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mega_rl.config.schema.rollout import LocalSandboxConfig
from mega_rl.rewards.builtin import resolve
from mega_rl.rewards.code import CodeTests, code_format, last_program, read_cases, same_text, same_value, specification
from mega_rl.rewards.sandbox import Execution, SandboxError
from mega_rl.rewards.sandbox.harness import encode
from mega_rl.rewards.sandbox.suites import UnknownTestsError
from mega_rl.rewards.score import Response, RewardFailure
from mega_rl.types import Prompt
from tests.helpers.sandboxes import local_sandbox
from tests.unit_tests.rewards.reward_cases import called

DOUBLE = "n = int(input())\nprint(2 * n)"
ADD = "def add(a, b):\n    return a + b"
IO = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n"


@pytest.mark.parametrize(
    ("answer", "row", "program", "passes"),
    [
        (IO, {}, DOUBLE, [True, True]),
        (IO, {}, "print(2)", [True, False]),
        (IO, {}, DOUBLE + "\nraise SystemExit(1)", [False, False]),
        ({"input": ["3"], "output": ["6"]}, {}, DOUBLE, [True]),
        ([{"input": "3", "output": "6"}, {"input": "4", "output": "9"}], {}, DOUBLE, [True, False]),
        (CALLS, {}, ADD, [True, True]),
        (CALLS, {}, "class Solution:\n    def add(self, a, b): return a + b", [True, True]),
        (CALLS, {}, "def add(a, b): return 3", [True, False]),
        ({"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}, {"fn_name": "add"}, ADD, [True, True]),
        (["assert add(1, 2) == 3", "assert add(1, 1) == 3"], {}, ADD, [True, False]),
        (CHECK, {"entry_point": "add"}, ADD, [True]),
        (CHECK, {"entry_point": "add"}, "def add(a, b): return 3", [False]),
        ({"test": CHECK, "entry_point": "add"}, {}, ADD, [True]),
        ({"tests": "assert isclose(add(1, 2), 3)", "setup": "from math import isclose"}, {}, ADD, [True]),
        ("from solution import add\ndef test_one():\n    assert add(1, 2) == 3", {}, ADD, [True]),
        ("from solution import add\ndef test_one():\n    assert add(1, 2) == 4", {}, ADD, [False]),
        ("x = [3, 1]\nsort(x)\nassert x == [1, 3]", {}, "def sort(x): x.sort()", [True]),
        ("assert list(g()) == [0, 1] and set(g()) == {0, 1}", {}, "def g(): yield from range(2)", [True]),
        ("assert f((1, {2: {3}}, b'x')) == (1, {2: {3}}, b'x')", {}, "def f(x): return x", [True]),
        ("assert abs(f(1) - 0.5) < 1e-9", {}, "def f(x): return x / 2", [True]),
        ("assert f(1)", {}, "class A: pass\ndef f(x): return A()", [False]),
        ("from solution import N, f\nassert f(N) == N", {}, "N = 3\ndef f(x): return x", [True]),
        ("assert f(10 ** 5000) == 10 ** 5000", {}, "def f(x): return x", [True]),
    ],
)
def test_forms_of_tests(answer: Any, row: dict[str, Any], program: str, passes: list[bool]) -> None:
    sandbox = local_sandbox()
    assert [case.run(sandbox, program, 5.0) for case in read_cases(answer, row)] == passes


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([], "there are no tests"),
        (None, 'tests are {"inputs"'),
        ({"a": 1}, 'tests are {"inputs"'),
        ({"inputs": ["1"], "outputs": []}, "lists of one length"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "a list of arguments"),
        ({"inputs": ["x y"], "outputs": [1], "fn_name": "f"}, "one JSON value a line"),
        ("assert f(", "the tests are not Python"),
        (["assert f(1) == 1", "assert ("], "the tests are not Python"),
        ("assert Stack().pop() == 1", "the tests use Stack, a class of the program"),
    ],
)
def test_tests_of_no_known_form_say_which_there_are(answer: Any, why: str) -> None:
    with pytest.raises(UnknownTestsError) as error:
        read_cases(answer)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("1e18", "1000000000000000001", False),
        ("1000000000000000000.0", "1000000000000999999", False),
        ("0e1", "0e830400451993494058024219903391", False),
        ("0.0", "1e-9", False),
        ("1_0.5", "10.5", False),
        (".5", "0.50", True),
        ("1" * 250_000 + "x", "1.5", False),
        ("1", "2", False),
        ("nan", "nan", True),
        ("inf", "1e400", False),
        ("yes", "Yes", False),
    ],
)
def test_outputs_are_compared_by_words(given: str, expected: str, same: bool) -> None:
    assert same_text(given, expected) == same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        (1.0000000001, 1.0, True),
        (1.0, 1, True),
        (True, 1, False),
        (1, True, False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", 2: "b"}, {"1": "a"}, False),
        (float("nan"), 1.0, False),
        ([1], [1, 2], False),
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("-inf"), float("inf"), False),
        ({3, 1}, [1, 3], True),
        (range(3), [0, 1, 2], True),
        (range(10**12), [0], False),
        ({"set": 1}, [1], False),
    ],
)
def test_results_are_compared_by_type_and_value(given: Any, expected: Any, same: bool) -> None:
    assert same_value(encode(given), expected) == same


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("a\n```py\nx\n```\nb\n```\ny\n```\nc", "y\n"),
        ("```python\nx\n```\n```json\n{}\n```", "x\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("  ```Python3 title\n  x\n  ```", "  x\n"),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
        ("```python\nunclosed", None),
        ("print(1)", None),
        ("", None),
        ("```\n```", ""),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("```python\nx = 1\n```", 1.0),
        ("```python\nx = (\n```", 0.0),
        ("```python\n \n```", 0.0),
        ("```python\n\0\n```", 0.0),
        ("x = 1", 0.0),
        ("```python\n" + "(" * 10_000 + "\n```", 0.0),
        ("```python\n" + "-" * 100_000 + "1\n```", 0.0),
    ],
)
def test_a_block_that_parses_has_the_form(response: str, score: float) -> None:
    assert code_format(response) == score


@pytest.mark.parametrize(
    "line", ["```" + " " * 32_000 + "`", "~" * 100_000 + "`", "```" + " \t" * 32_000 + "x`", "`" * 99_999 + "x`"]
)
def test_long_line_is_read_in_linear_time(line: str) -> None:
    begin = time.perf_counter()
    assert last_program(f"{line}\n```\nx\n```") == "x\n"
    assert time.perf_counter() - begin < 1


TESTS = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]}


def in_block(program: str) -> str:
    """Return a response with a program."""
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.mark.parametrize(
    ("program", "share", "whole"),
    [("print(2 * int(input()))", 1.0, 1.0), ("print(4)", 0.25, 0.0), ("print(0)", 0.0, 0.0), (" ", 0.0, 0.0)],
)
def test_scores_are_shares_or_all_or_nothing(program: str, share: float, whole: float) -> None:
    local_sandbox()
    for score, expected in (("share", share), ("all", whole)):
        function = resolve(specification(LocalSandboxConfig(score=score)))
        assert function(in_block(program), TESTS) == expected


class Slow:
    """A sandbox in which every program passes after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, 0

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        self.runs += 1
        time.sleep(min(self.seconds, timeout_s))
        output = str(2 * int(stdin)).encode() if self.seconds < timeout_s and program != "wrong\n" else b""
        return Execution("finished", 0, output, b"")


def test_cases_that_have_not_begun_in_time_have_failed() -> None:
    sandbox = Slow(0.2)
    assert CodeTests(sandbox, 1.0, 0.5, all_or_nothing=False)(in_block("right"), TESTS) == 0.5
    assert sandbox.runs == 3


def test_of_all_or_nothing_the_first_failure_is_the_last_run() -> None:
    sandbox = Slow(0.0)
    assert CodeTests(sandbox, 1.0, 5.0, all_or_nothing=True)(in_block("wrong"), TESTS) == 0.0
    assert sandbox.runs == 1


def score(source: Any, program: str, answer: Any = None) -> Any:
    """Return the outcome of one response."""
    prompt = Prompt(0, (1,), "p", answer=TESTS if answer is None else answer, row={"answer": 1})
    (outcome,) = source.score([(prompt, Response(in_block(program), 5, "stop"))])
    return outcome


def test_a_sandbox_that_fails_gives_no_score() -> None:
    class Broken:
        def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
            raise SandboxError("no namespaces")

    outcome = score(called(CodeTests(Broken(), 1.0, 2.0, all_or_nothing=False)), "x")
    assert isinstance(outcome, RewardFailure)
    assert "SandboxError: no namespaces" in outcome.what
