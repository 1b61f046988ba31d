"""Nodes that resolved a name on the Hub to different commits do not train together."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import check_commits
from tests.helpers.threads import OneRank, ThreadGroup


def outcomes(*origins: dict[str, Any]) -> list[Any]:
    def check(rank: OneRank) -> None:
        check_commits(origins[rank.rank], rank)

    return ThreadGroup(len(origins)).run(check)


@pytest.mark.parametrize("origins", [{}, {"model.path": "o/m@1", "data.train_files": ["o/d:a:b@2", "x.jsonl"]}])
def test_equal_commits(origins: dict[str, Any]) -> None:
    assert outcomes(origins, dict(origins)) == [None, None]


@pytest.mark.parametrize(
    ("second", "shown"), [({"model.path": "o/m@2"}, 'model.path="o/m@2"'), ({}, "local files alone")]
)
def test_other_commits_end_the_run_on_every_rank(second: dict[str, Any], shown: str) -> None:
    failures = outcomes({"model.path": "o/m@1"}, second)
    for failure in failures:
        assert isinstance(failure, RunError)
        assert str(failure).startswith(f"rank 1 reads other models or data than rank 0: {shown}; give names")
