"""Tests of rows in the forms of published data sets, each with a right and a wrong program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mega_rl.sandbox.inside.values import encode
from mega_rl.workers.code.cases import UnknownTestsError, read_cases, same_text, same_value
from tests.helpers.sandboxes import local_sandbox

DOUBLE = "n = int(input())\nprint(2 * n)"
ADD = "def add(a, b):\n    return a + b"
IO = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
"""
OF_STACK = """
s, t = Stack(), Stack()
s.push(3)
t.push(3)
assert len(s) == 1 and s == t and s != 3 and s.items == [3]
assert s.pop() == 3
try:
    s.pop()
    raise SystemExit("no error")
except IndexError:
    pass
"""


@pytest.mark.parametrize(
    ("answer", "row", "program", "passes"),
    [
        (IO, {}, DOUBLE, [True, True]),
        (json.dumps(IO), {}, DOUBLE, [True, True]),
        (IO, {}, "print(2)", [True, False]),
        (IO, {}, DOUBLE + "\nraise SystemExit(1)", [False, False]),
        ({"input": ["3"], "output": ["6"]}, {}, DOUBLE, [True]),
        ([{"input": "3", "output": "6"}, {"input": "4", "output": "9"}], {}, DOUBLE, [True, False]),
        (CALLS, {}, ADD, [True, True]),
        (CALLS, {}, "class Solution:\n    def add(self, a, b): return a + b", [True, True]),
        (CALLS, {}, "def add(a, b): return 3", [True, False]),
        (CALLS, {}, "def sub(a, b): return 3", [False, False]),
        ({"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}, {"fn_name": "add"}, ADD, [True, True]),
        (["assert add(1, 2) == 3", "assert add(1, 1) == 3"], {}, ADD, [True, False]),
        (CHECK, {"entry_point": "add"}, ADD, [True]),
        (CHECK, {"entry_point": "add"}, "def add(a, b): return 3", [False]),
        ({"test": CHECK, "entry_point": "add"}, {}, ADD, [True]),
        ({"tests": "assert isclose(add(1, 2), 3)", "setup": "from math import isclose"}, {}, ADD, [True]),
        ("from solution import add\ndef test_one():\n    assert add(1, 2) == 3", {}, ADD, [True]),
        ("from solution import add\ndef test_one():\n    assert add(1, 2) == 4", {}, ADD, [False]),
        (OF_STACK, {}, STACK, [True]),
        (OF_STACK, {}, STACK.replace("append", "remove"), [False]),
        ("x = [3, 1]\nsort(x)\nassert x == [1, 3]", {}, "def sort(x): x.sort()", [True]),
        ("assert apply(lambda x: x + 1) == 4", {}, "def apply(f): return f(3)", [True]),
        ("assert list(g()) == [0, 1] and set(g()) == {0, 1}", {}, "def g(): yield from range(2)", [True]),
        ("assert f((1, {2: {3}}, b'x')) == (1, {2: {3}}, b'x')", {}, "def f(x): return x", [True]),
        ("assert abs(f(1) - 0.5) < 1e-9", {}, "def f(x): return x / 2", [True]),
        ("assert f(1)", {}, "class A: pass\ndef f(x): return A()", [True]),
        ("assert f(10 ** 5000) == 10 ** 5000", {}, "def f(x): return x", [True]),
    ],
)
def test_forms_of_tests(answer: Any, row: dict[str, Any], program: str, passes: list[bool]) -> None:
    sandbox = local_sandbox()
    assert [case.run(sandbox, program, 5.0)[0] for case in read_cases(answer, row)] == passes


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([], "there are no tests"),
        (None, 'tests are {"inputs"'),
        (3, 'tests are {"inputs"'),
        ({"a": 1}, 'tests are {"inputs"'),
        ({"inputs": ["1"], "outputs": []}, "lists of one length"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "a list of arguments"),
        ({"inputs": ["x y"], "outputs": [1], "fn_name": "f"}, "one JSON value a line"),
        ("assert f(", "the tests are not Python"),
        (["assert f(1) == 1", "assert ("], "the tests are not Python"),
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
        ("1  2 \n\n", "1 2", True),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.333", False),
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
        ("1 2", "1", False),
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
        (1, 1.0, True),
        (1.0, 1, True),
        (True, 1, False),
        (1, True, False),
        ("1", 1, False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", 2: "b"}, {"1": "a"}, False),
        (float("nan"), 1.0, False),
        (None, None, True),
        ([1], [1, 2], False),
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("-inf"), float("inf"), False),
        (1.5, float("inf"), False),
        ({3, 1}, [1, 3], True),
        (range(3), [0, 1, 2], True),
        (range(10**12), [0], False),
        ({"set": 1}, [1], False),
    ],
)
def test_results_are_compared_by_type_and_value(given: Any, expected: Any, same: bool) -> None:
    assert same_value(encode(given, repr), expected) == same
