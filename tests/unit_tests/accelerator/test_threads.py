"""A rank's share of the host."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from mega_rl import cores
from mega_rl.accelerator import threads


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of 16 cores with 32 processors; the folder stands for its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 32 if logical else 16)
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "ranks", "share"),
    [
        (None, 1, 16),
        (None, 8, 2),
        (None, 32, 1),
        ("max 100000", 1, 16),
        ("200000 100000", 1, 2),
        ("150000 100000", 1, 2),
        ("200000 100000", 4, 1),
    ],
)
def test_share_of_a_rank(host: Path, limit: str | None, ranks: int, share: int) -> None:
    if limit is not None:
        (host / "cpu.max").write_text(limit + "\n")
    assert cores.threads_per_rank(ranks) == share


def test_affinity_limits_the_share(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4})
    assert cores.threads_per_rank(1) == 2


def test_torch_gets_the_share_unless_the_user_says_otherwise(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads.use_threads()
    assert given == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads.use_threads()
    assert given == [4]
