"""Gloo's groups share one network thread while a world of ours exists, and PyTorch's own ways hold before and after."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.parallel import gloo
from tests.helpers.distributed import run_ranks


def network_threads() -> int:
    """The threads of gloo devices in this process."""
    return sum(path.read_text().strip() == "gloo_tcp_loop" for path in Path("/proc/self/task").glob("*/comm"))


def count_threads(rank: int) -> dict[str, Any]:
    """Network threads and sums: in a world of ours, after it, in one of another's, and named by the environment."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    import torch.distributed as dist

    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    actual: dict[str, Any] = {}
    for name, interfaces in {"default": "", "one": "lo", "two names of one": "lo,lo"}.items():
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
        built = groups.initialize(ParallelLayout(world_size=2, tp=2), accelerator=accelerator, timeout_s=20)
        more = [dist.new_group([0, 1], backend="gloo") for _ in range(5)]
        total = torch.tensor([float(rank + 1)])
        for group in (built.world, built.tp, *more):
            dist.all_reduce(total, group=group)
        actual[name] = (network_threads(), float(total))
        del built, more, group
        groups.destroy()
        actual[f"after {name}"] = network_threads()
    os.environ["GLOO_SOCKET_IFNAME"] = ""
    dist.init_process_group("gloo")
    others = [dist.new_group([0, 1]) for _ in range(3)]
    actual["another's"] = (network_threads(), len(others) + 1)
    dist.destroy_process_group()
    return actual


def test_one_thread_for_all_groups() -> None:
    for actual in run_ranks(2, count_threads, device="cpu"):
        total = 3.0 * 2**6  # two ranks' 1 and 2, then doubled by each further group
        assert actual["default"] == (1, total)
        assert actual["one"] == (1, total)
        assert actual["two names of one"] == (2, total)
        assert {actual[name] for name in actual if name.startswith("after")} == {0}
        threads, groups = actual["another's"]
        assert threads == groups


class Recorded:
    """`ProcessGroupGloo.__init__` that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *positional: Any, **named: Any) -> None:
        self.calls.append((positional, named))


def test_later_releases_may_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.15 names `enable_reconfigure`; where it asks for that, the group is made as PyTorch makes it."""
    recorded = Recorded()
    monkeypatch.setattr(gloo, "_construct", recorded)
    monkeypatch.setattr(gloo, "_options", lambda timeout: ("options", timeout))
    second = timedelta(seconds=1)
    construct: Any = gloo._construct_on_shared_devices
    construct("group", "store", 0, 2, timeout=second)
    construct("group", "store", 0, 2, timeout=second, enable_reconfigure=False)
    construct("group", "store", 0, 2, timeout=second, enable_reconfigure=True)
    construct("group", "store", 0, 2, "options of another")
    shared = (("group", "store", 0, 2, ("options", second)), {})
    assert recorded.calls == [
        shared,
        shared,
        (("group", "store", 0, 2, second), {"enable_reconfigure": True}),
        (("group", "store", 0, 2, "options of another"), {}),
    ]
