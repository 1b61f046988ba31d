"""Checkpoints in the memory of two hosts: what survives the loss of which, and what is never loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.unit_tests.checkpoint.memory.stores_on_ranks import HOSTS, LOSSES, RANKS, all_cases

ALL_OF_2 = [f"step_000002/shard_{rank:05d}.safetensors" for rank in range(RANKS)]
FROM_MEMORY = ["nothing", "a host", "one damaged", "a torn save"]
FROM_DISK = {
    "both copies of a shard": "the checkpoint of step 2 in memory lacks shard_00001.safetensors",
    "both damaged": "expected",
    "the run folder": "",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(RANKS, all_cases, str(tmp_path_factory.mktemp("memory")), device="cpu")


def test_every_loss_is_tried() -> None:
    assert {*FROM_MEMORY, *FROM_DISK} == set(LOSSES)


def test_a_host_holds_its_shards_and_those_of_the_host_before(cases: list[dict[str, Any]]) -> None:
    """With two hosts that is all of the newest step, and nothing else."""
    for actual in cases[0].values():
        assert actual["held"] == {host: ALL_OF_2 for host in range(HOSTS)}
        assert set(actual["saved"]) >= {"checkpoint/memory_s", "checkpoint/memory_bytes"}


def test_the_older_one_goes_when_all_hosts_have_the_newer(cases: list[dict[str, Any]]) -> None:
    """Also where one of them publishes late: else a kill in between leaves neither whole."""
    for actual in cases[0].values():
        assert actual["when retiring"][0] == ["host0 step_000001", "host1 step_000001"]
        both = [f"host{host} step_{step:06d}" for host in range(HOSTS) for step in (1, 2)]
        # The other host may have begun to remove its older one.
        assert set(both) - {"host1 step_000001"} <= set(actual["when retiring"][1]) <= set(both)


@pytest.mark.parametrize("lost", FROM_MEMORY)
def test_restored_from_memory(cases: list[dict[str, Any]], lost: str) -> None:
    for rank, of_rank in enumerate(cases):
        actual = of_rank[lost]
        assert actual["restored"] == (2, "memory")
        assert actual["values"] == [3.0] * 4
        assert actual["kept"] == {"x": [10 * rank, 7]}
    lines = cases[0][lost]["lines"]
    assert len(lines) == (lost in ("one damaged", "a torn save")), lines
    if lost == "one damaged":
        assert "checksum" in lines[0]
        assert lines[0].endswith("its copy on another host is taken")


@pytest.mark.parametrize("lost", FROM_DISK)
def test_restored_from_disk(cases: list[dict[str, Any]], lost: str) -> None:
    """With one line, and what memory has of it is removed."""
    for of_rank in cases:
        actual = of_rank[lost]
        assert actual["restored"] == (1, "disk")
        assert actual["values"] == [1.0] * 4
        assert actual["after start"] == {host: [] for host in range(HOSTS)}
    lines = cases[0][lost]["lines"]
    assert len(lines) == (lost != "the run folder"), lines
    assert FROM_DISK[lost] in "".join(lines)
    assert "checkpoint.fallback" not in "".join(lines)


def test_nothing_is_left_at_the_end_of_a_run(cases: list[dict[str, Any]]) -> None:
    for actual in cases[0].values():
        assert actual["after end"] == []
