"""The reward function code_tests: its scores, its settings in any process, and what a broken sandbox costs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from mega_rl.config.schema import RewardSandboxConfig
from mega_rl.errors import UserError
from mega_rl.sandbox.limits import Execution, SandboxError
from mega_rl.types import Prompt
from mega_rl.workers.code.reward import CodeTests, specification
from mega_rl.workers.code.sandboxes import check_sandbox
from mega_rl.workers.reward import FunctionRewards
from mega_rl.workers.reward_calls import NoScore, Response
from mega_rl.workers.reward_functions import resolve
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import WorkerOrder
from mega_rl.workers.reward_pool.scorer import PooledRewards
from tests.helpers.sandboxes import local_sandbox

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
        function = resolve(specification(RewardSandboxConfig(score=score, parallel=2)))
        assert function(in_block(program), TESTS) == expected


def test_a_response_without_a_program_scores_0_and_starts_nothing() -> None:
    class Broken:
        def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
            raise AssertionError

    function = CodeTests(Broken(), 1.0, 2.0, 1, all_or_nothing=False)
    assert function("print(1)", TESTS) == 0.0


class Slow:
    """A sandbox in which every program passes after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, 0

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        self.runs += 1
        time.sleep(min(self.seconds, timeout_s))
        output = str(2 * int(stdin)).encode() if self.seconds < timeout_s and program != "wrong\n" else b""
        return Execution("finished", 0, output, b"", self.seconds)


def test_cases_that_have_not_begun_in_time_have_failed() -> None:
    sandbox = Slow(0.2)
    assert CodeTests(sandbox, 1.0, 0.5, 1, all_or_nothing=False)(in_block("right"), TESTS) == 0.5
    assert sandbox.runs == 3


def test_of_all_or_nothing_the_first_failure_is_the_last_run() -> None:
    sandbox = Slow(0.0)
    assert CodeTests(sandbox, 1.0, 5.0, 1, all_or_nothing=True)(in_block("wrong"), TESTS) == 0.0
    assert sandbox.runs == 1


def score(rewards: FunctionRewards | PooledRewards, program: str, answer: Any = None) -> Any:
    """Return the outcome of one response."""
    prompt = Prompt(0, (1,), "p", answer=TESTS if answer is None else answer, row={"answer": 1})
    return rewards.score_texts([(prompt, Response(in_block(program), 5, "stop"))], lambda _: None)[0]


def test_workers_run_it_with_the_settings_of_the_run() -> None:
    local_sandbox()
    settings = RewardSandboxConfig(memory_mib=128, timeout_s=3.0)
    spec = specification(settings)
    functions = {"tests": spec, "form": "code_format"}
    pool = RewardPool(WorkerOrder(functions, memory_bytes=0), num_workers=1, timeout_s=30)
    try:
        from mega_rl.workers.scoring.sets import load_call

        rewards = PooledRewards(load_call(functions), pool)
        assert score(rewards, "print(2 * int(input()))") == {"form": 1.0, "tests": 1.0}
        assert score(rewards, "x = bytearray(200 << 20)\nprint(2 * int(input()))") == {"form": 1.0, "tests": 0.0}
        assert score(rewards, "import os\nwhile True: os.fork()", {"inputs": [""], "outputs": [""]})["tests"] == 0.0
        unknown = score(rewards, "x", 5)
        assert isinstance(unknown, NoScore)
        assert "UnknownTestsError: tests are" in unknown.what
    finally:
        pool.close()


def test_a_sandbox_that_fails_gives_no_score() -> None:
    class Broken:
        def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
            raise SandboxError("no namespaces")

    outcome = score(FunctionRewards(CodeTests(Broken(), 1.0, 2.0, 1, all_or_nothing=False)), "x")
    assert isinstance(outcome, NoScore)
    assert "SandboxError: no namespaces" in outcome.what


def test_a_machine_without_a_sandbox_is_a_mistake_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        UserError, match=r"reward.sandbox.kind=local: bubblewrap \(bwrap\) is not installed; install it"
    ):
        check_sandbox(RewardSandboxConfig())


def test_the_name_with_settings_is_read_back() -> None:
    spec = specification(RewardSandboxConfig(score="all", parallel=3))
    assert json.loads(spec.removeprefix("code_tests "))["parallel"] == 3
