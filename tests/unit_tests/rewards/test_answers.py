"""Answers by a user's function: one error on all ranks where it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mega_rl.errors import UserError
from mega_rl.rewards.role import answers_together
from tests.helpers.threads import ThreadGroup


def leaves(response: str) -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda response: str(1 // int(response)), "failed for a response: ZeroDivisionError"),
        (lambda response: response if int(response) else 7, "returned int; it must return a string, or None"),
        (lambda response: response if int(response) else leaves(response), "failed for a response: SystemExit: 3"),
        (lambda response: response if int(response) else None, ""),
    ],
)
def test_failure_on_one_rank_ends_all(function: Callable[[str], object], error: str) -> None:
    def read(ranks: Any) -> object:
        try:
            return answers_together(function, ["1", "0"][ranks.rank :], setting="answer_of", everyone=ranks)
        except UserError as failure:
            return str(failure)

    results = ThreadGroup(2).run(read)
    if error:
        assert [str(result).startswith(f"answer_of: {error}") for result in results] == [True, True]
    else:
        assert results == [["1", None], [None]]
