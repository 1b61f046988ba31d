"""Tests as Python text: whose names they read, and whether they check anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mega_rl.config.schema import DataConfig, RewardConfig
from mega_rl.config.schema.data import StreamConfig
from mega_rl.data.build import ONLY, PromptReader
from mega_rl.data.columns import RewardColumns
from mega_rl.data.stream import Position
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.build import RunRewards, check_tests
from mega_rl.rewards.code import AssertCase
from mega_rl.rewards.sandbox.suites import UnknownTestsError, suite_of, unfit
from mega_rl.trainer.assemble.data import Tokens, open_streams
from mega_rl.types import Prompt
from tests.helpers.models import write_digit_tokenizer
from tests.helpers.sandboxes import local_sandbox
from tests.hostile_programs.judging import VACUOUS

GOOD = "assert f(1) == 3"
ERROR = "def test_a():\n    try: f(-1)\n    except ValueError: assert True\n    else: assert False"


@pytest.mark.parametrize(
    ("tests", "entry", "names", "modules"),
    [
        (GOOD, "", ["f"], []),
        ("assert set(f(1)) == set(g(2))", "", ["f", "g"], []),
        ("assert sum(1, 2) == 3", "", ["sum"], []),
        ("assert f(1) == sum([3])", "sum", ["f", "sum"], []),
        ("def check(candidate):\n    assert candidate(1) == sum([3])", "sum", [], []),
        ("assert math.isclose(f(1), np.pi)", "", ["f"], ["math", "np"]),
        ("import math\nassert math.isclose(f(1), 3)", "", ["f"], []),
        ("assert copy(1) == 1", "", ["copy"], []),
        ("from math import isclose as c\nassert c(f(1), 3)", "", ["f"], []),
        ("def g(x): return x\nassert f(1) == g(3)", "", ["f"], []),
        ("def test_a(f):\n    assert f(1)\ntest_a(f)", "", ["f"], []),
        ("def test_a():\n    global f\n    f = 1\n    assert f == g", "", ["g"], []),
        ("class A:\n    x = f(1)\n    y = x\nassert A.x == [v for v in h]", "", ["f", "h"], []),
        ("from solution import f\nassert f(1) == 3", "", [], []),
    ],
)
def test_names_of_the_program_come_from_the_row(tests: str, entry: str, names: list[str], modules: list[str]) -> None:
    assert suite_of(tests, entry) == {"tests": tests, "entry": entry, "names": names, "modules": modules}


@pytest.mark.parametrize("tests", ["assert len(sorted([1])) == 1", "assert 1 == 1", "f(1)", ""])
def test_tests_without_a_function_or_an_assert_are_refused(tests: str) -> None:
    with pytest.raises(UnknownTestsError, match=r"call no function of the program|have no assert"):
        suite_of(tests, "")


def test_each_suite_is_tried_over_functions_that_raise() -> None:
    """Tests that need all of the sandbox's time do not keep the others from being tried."""
    slow = "try:\n    assert f(1) == 3\nexcept Exception:\n    import time\n    time.sleep(60)"
    texts = [
        GOOD,
        "if False: assert f(1)",
        slow,
        ERROR,
        "try: f(1)\nexcept Exception: pass\nassert f",
        "import nothing\nassert f(1)",
        "assert f(lambda x: x + 1) == 4",
    ]
    reasons = list(unfit(local_sandbox(), [suite_of(text, "") for text in texts], 5.0))
    assert [bool(reason) for reason in reasons] == [False, True, False, False, True, True, True]
    assert reasons[1] == "run no assert"
    assert "check nothing" in reasons[4]
    assert "need 'nothing'; reward.sandbox.interpreter" in reasons[5]


@pytest.mark.parametrize("tests", VACUOUS.values(), ids=VACUOUS.keys())
def test_rows_that_check_nothing_are_refused_by_number(tests: Any) -> None:
    local_sandbox()
    reward = RewardConfig(function="code_tests")
    rows = [prompt(0, GOOD), prompt(7, tests), prompt(9, ERROR)]
    with pytest.raises(UserError, match=r"rows? 7\b|row 7:"):
        check_tests(reward, rows)
    check_tests(reward, [rows[0], rows[2]])


def test_later_blocks_of_a_stream_are_tried(tmp_path: Path) -> None:
    local_sandbox()
    write_digit_tokenizer(tmp_path, vocab_size=50)
    rows = [{"prompt": "1+1=", "answer": tests} for tests in (GOOD, GOOD, "assert True")]
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train_files=[str(file)], shuffle=False, stream=StreamConfig(rows=2))
    reward = RewardConfig(function="code_tests")
    tokens = Tokens(AutoTokenizer.from_pretrained(tmp_path), (1,), skip_special_tokens=True)
    reader = PromptReader(data, tokens.tokenizer, 50, RewardColumns())
    streams, _ = open_streams(reader, tokens, RunRewards(reward, None), [], seed=0, ranks=SingleRank())
    blocks = streams[ONLY].blocks(Position())
    assert len(next(blocks).prompts) == 2
    with pytest.raises(UserError, match=r"check nothing|row 2:"):
        next(blocks)


def prompt(index: int, tests: Any, row: Mapping[str, Any] | None = None) -> Prompt:
    return Prompt(index, (1,), "p", answer=tests, row=row)


@pytest.mark.parametrize(
    ("program", "passes"),
    [("def f(x): return 3 * x", True), ("def f(x): return 0", False), ("def f(x): raise StopIteration", False)],
)
def test_asserts_that_ran_are_counted(program: str, passes: bool) -> None:
    """A wrong program that yields nothing to assert over does not pass."""
    case = AssertCase("for x, y in zip(map(f, [1, 2]), [3, 6]):\n    assert x == y")
    assert case.run(local_sandbox(), program, 5.0) == passes
