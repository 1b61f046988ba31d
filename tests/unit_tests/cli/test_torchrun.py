"""Ranks on this machine."""

from __future__ import annotations

import os

import pytest

from mega_rl.cli import torchrun as launch


@pytest.mark.parametrize(("given", "used"), [(None, "4"), ("3", "3")])
def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    """torchrun itself would give each rank one thread of a host of any size."""
    seen: list[str | None] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: seen.append(os.environ.get("OMP_NUM_THREADS")))
    monkeypatch.setattr("mega_rl.accelerator.threads.threads_per_rank", lambda ranks: 8 // ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "1")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch.launch(["module"], nproc_per_node=2) == 0
    assert seen == [used]


def test_ranks_of_one_machine_need_no_name_that_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's name often does not, and torchrun would wait for it for five minutes."""
    seen: list[str] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: seen.append(arguments.local_addr))
    assert launch.launch(["module"], nproc_per_node=2) == 0
    assert seen == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with exit code 1"),
        (-9, "was killed by SIGKILL: perhaps the machine is out of memory"),
        (-11, "was killed by SIGSEGV"),
    ],
)
def test_the_last_line_names_the_signal_that_killed_a_rank(code: int, words: str) -> None:
    assert launch.ending(code) == words
