"""The test launcher itself: results in order, failures shown at once, no hang, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.distributed import RanksFailed, run_megatron_fsdp, run_ranks


def raise_or_hang(rank: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    time.sleep(60)


def abort_at_first(rank: int, path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os.write(2, b"heap of a test\n")
        os.abort()
    return "done"


def hang_with_a_child(rank: int, path: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(child.pid))
    time.sleep(60)


def test_the_first_failure_ends_everybody() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="the culprit") as error:
        run_ranks(2, raise_or_hang, timeout_s=60)
    assert time.monotonic() - start < 30
    assert "rank 1 raised" in str(error.value)
    assert "raise_or_hang" in str(error.value)


def test_crashes_of_megatron_fsdp_are_tried_once_more_and_exceptions_are_not(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="heap of a test"):
        assert run_megatron_fsdp(1, abort_at_first, str(tmp_path / "flag"), timeout_s=60) == ["done"]
    with pytest.raises(RanksFailed, match="the culprit"):
        run_megatron_fsdp(2, raise_or_hang, timeout_s=60)


def test_a_hang_ends_at_the_timeout_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RanksFailed, match=r"did not end within 4 s"):
        run_ranks(1, hang_with_a_child, str(path), timeout_s=4)
    state = Path(f"/proc/{path.read_text()}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z", "the child lives"
