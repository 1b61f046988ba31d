"""Checkpoints in the memory of several hosts: what survives the loss of which, and what is never loaded."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.unit_tests.checkpoint.memory.stores_on_ranks import LOSSES, RANKS, all_cases

HELD = {  # shards on each host: its own, and those of the host before it
    2: [[0, 1, 2, 3], [0, 1, 2, 3]],
    4: [[0, 3], [0, 1], [1, 2], [2, 3]],
}
FROM_MEMORY = ["nothing", "a host", "one damaged", "a torn save"]
FROM_DISK = {
    "both copies of a shard": "the checkpoint of step 2 in memory lacks shard_00001.safetensors",
    "both damaged": "expected",
    "the run folder": "",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[int, str], Any]]:
    """By rank."""
    return run_ranks(RANKS, all_cases, str(tmp_path_factory.mktemp("memory")), device="cpu")


def test_every_loss_is_tried() -> None:
    assert {*FROM_MEMORY, *FROM_DISK} == set(LOSSES)


def test_host_holds_own_and_previous_shards(cases: list[dict[tuple[int, str], Any]]) -> None:
    """Of the newest step, and nothing else."""
    for (hosts, _), actual in cases[0].items():
        expected = [[f"step_000002/shard_{rank:05d}.safetensors" for rank in ranks] for ranks in HELD[hosts]]
        assert actual["held"] == expected
        assert set(actual["saved"]) >= {"checkpoint/memory_s", "checkpoint/memory_bytes"}


@pytest.mark.parametrize("hosts", HELD)
def test_older_one_stays_until_all_hosts_publish(cases: list[dict[tuple[int, str], Any]], hosts: int) -> None:
    """Also where some of them publish late: else a kill in between leaves neither whole."""
    first, second = cases[0][hosts, "nothing"]["when retiring"]
    assert first == [f"host{host} step_000001" for host in range(hosts)]
    # Others may have begun to remove their older one.
    newer = {f"host{host} step_000002" for host in range(hosts)}
    assert newer | {"host0 step_000001"} <= set(second) <= newer | set(first)


@pytest.mark.parametrize(("hosts", "lost"), list(product(HELD, FROM_MEMORY)))
def test_restored_from_memory(cases: list[dict[tuple[int, str], Any]], hosts: int, lost: str) -> None:
    """With every rank's own parts, and those that a rank of another host has written."""
    for rank, of_rank in enumerate(cases):
        actual = of_rank[hosts, lost]
        assert actual["restored"] == (2, "memory")
        assert actual["values"] == [3.0] * 4
        assert actual["kept"] == {"x": [10 * rank, 7]}
    lines = cases[0][hosts, lost]["lines"]
    assert len(lines) == (lost in ("one damaged", "a torn save")), lines
    if lost == "one damaged":
        assert "checksum" in lines[0]
        assert lines[0].endswith("its copy on another host is taken")


@pytest.mark.parametrize(("hosts", "lost"), list(product(HELD, FROM_DISK)))
def test_restored_from_disk(cases: list[dict[tuple[int, str], Any]], hosts: int, lost: str) -> None:
    """With one line, and what memory has of it is removed."""
    for of_rank in cases:
        actual = of_rank[hosts, lost]
        assert actual["restored"] == (1, "disk")
        assert actual["values"] == [1.0] * 4
        assert actual["after start"] == []
    lines = cases[0][hosts, lost]["lines"]
    assert len(lines) == (lost != "the run folder"), lines
    assert FROM_DISK[lost] in "".join(lines)
    assert "checkpoint.fallback" not in "".join(lines)


def test_end_of_run_leaves_no_memory(cases: list[dict[tuple[int, str], Any]]) -> None:
    for actual in cases[0].values():
        assert actual["after end"] == []
