"""A rank's share of the host."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from mega_rl import environment
from mega_rl.parallel.accelerator import base


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of 16 cores with 32 processors; the folder stands for its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 32 if logical else 16)
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
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
    assert environment.own_cores(ranks) == share


@pytest.fixture
def sysfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with two sockets of 8 processors, hyperthreads of a socket behind both, and a GPU on the second."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    gpu = tmp_path / "bus/pci/devices/0000:dc:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    monkeypatch.setattr(environment, "SYSFS", tmp_path)
    monkeypatch.setattr(environment, "_before", set())
    return tmp_path


@pytest.mark.parametrize(
    ("node", "allowed", "bound"),
    [
        ("1", set(range(16)), {4, 5, 6, 7, 12, 13, 14, 15}),
        ("0", {1, 2, 4}, {1, 2}),  # only those that the launcher has given to this rank
        ("1", {0, 1}, None),  # none of those
        ("-1", set(range(16)), None),  # a machine without nodes
        ("7", set(range(16)), None),
        ("?", set(range(16)), None),
    ],
)
def test_a_rank_runs_near_its_gpu(
    node: str, allowed: set[int], bound: set[int] | None, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: calls[-1] if calls else allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: calls.append(cpus))
    (sysfs / "bus/pci/devices/0000:dc:00.0/numa_node").write_text(node + "\n")
    environment.bind_near("0000:dc:00.0")
    assert calls == ([] if bound is None else [bound])
    assert environment.processors() == allowed, "what it starts may use all of them"


def test_a_rank_is_bound_before_it_allocates(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0, name="H100", uuid="u")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: order.append(cpus))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    base.prepare_cuda.__wrapped__()
    assert order == [torch.device("cuda", 0), {4, 5}]
