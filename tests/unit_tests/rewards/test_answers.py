"""Answers by a user's function: one error on all ranks where it fails, or hangs, on one."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.role import answers_together
from tests.helpers.distributed import run_ranks
from tests.unit_tests.rewards.answers_on_ranks import answers_on


def test_a_failure_on_one_rank_ends_all() -> None:
    first, second = run_ranks(2, answers_on, device="cpu")
    assert (first[0], second[0]) == (["A", "B"], ["C"])
    for outcomes in (first, second):
        assert outcomes[1].startswith("UserError: answer_of=a.py:f: failed for a response: ZeroDivisionError")
        assert outcomes[2] == "UserError: answer_of=a.py:f: returned int; it must return a string, or None"
        assert outcomes[3].endswith(
            "rank 1: answer_of=a.py:f has not returned for 0.5 s (trainer.timeout_s): it reads a response"
        )
    assert first[3].startswith("StalledError: ")
    assert second[3].startswith("HungError: ")


def test_the_function_runs_on_the_main_thread_and_may_find_no_answer() -> None:
    """Functions that limit their own time do it by signals."""

    def answer(response: str) -> str | None:
        assert threading.current_thread() is threading.main_thread()
        return response or None

    read = partial(answers_together, setting="answer_of", everyone=SingleRank(), timeout_s=60.0)
    assert read(answer, ["7", ""]) == ["7", None]
    assert read(answer, []) == []


def test_what_leaves_the_program_is_a_users_mistake() -> None:
    def leaves(response: str) -> str:
        raise SystemExit(3)

    with pytest.raises(UserError, match="answer_of: failed for a response: SystemExit: 3"):
        answers_together(leaves, ["a"], setting="answer_of", everyone=SingleRank(), timeout_s=60.0)
