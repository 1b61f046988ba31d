"""Ranks and the GPUs of their machine, of which a fake number is visible."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import base

SECOND = timedelta(seconds=1)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One visible GPU, and no variables of launchers."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("LOCAL_RANK", base.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "count", "index"),
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "0"}, 1, 0),
        ({"LOCAL_RANK": "3"}, 8, 3),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4, 3),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, 1, 0),  # Ray
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}, 1, 0),  # Slurm, whose tasks see their own device as 0
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, 1, 0),
    ],
)
def test_a_rank_takes_its_own_device(environment: dict[str, str], count: int, index: int) -> None:
    assert base.device_index(environment, count=count) == index


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"LOCAL_RANK": "1"}, 1),  # torchrun on a machine with one GPU
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,"}, 0),
    ],
)
def test_more_ranks_than_devices_are_an_error_with_its_fix(environment: dict[str, str], count: int) -> None:
    with pytest.raises(UserError, match=rf"at most {count} rank\(s\) per node, or set CUDA_VISIBLE_DEVICES= \(empty\)"):
        base.device_index(environment, count=count)


def test_ranks_that_share_a_gpu_are_refused_and_others_are_not() -> None:
    store = HashStore()
    for rank, identity in enumerate(["GPU-a", "GPU-b", "", ""]):
        base.claim(identity, store=store, rank=rank, timeout=SECOND)
    with pytest.raises(UserError, match=r"ranks 1 and 4 have the same CUDA device \(GPU-b\)"):
        base.claim("GPU-b", store=store, rank=4, timeout=SECOND)


@pytest.mark.parametrize(("ranks", "variables"), [(1, {}), (2, base.HIDDEN)])
def test_ranks_without_a_gpu_for_each_see_none(
    visible: pytest.MonkeyPatch, ranks: int, variables: dict[str, str]
) -> None:
    assert base.environment_of_ranks(ranks) == variables
