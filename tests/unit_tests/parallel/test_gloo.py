"""Gloo's groups share one network thread while a world of ours exists, and PyTorch's own ways hold before and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

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
