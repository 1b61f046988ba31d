"""bf16 messages, FP32 sums: the collective alone, against others, and through the buckets of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.reduce_scatter_cases import run_world

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by world size."""
    return {size: run_ranks(size, run_world, size, timeout_s=120) for size in SIZES}


WRONG = {
    "function": "bits of a sequential fp32 sum: sizes, dtypes, sums, means, handles, in place, in pieces",
    "instances": "fp32 sums of optimizer instances are added before anything is rounded",
    "buckets": "the same bits through DDP, with and without overlap; several buckets in a group; bounded memory",
    "links": "every parameter finds its group, and every group the next one to gather",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wrong(worlds: dict[int, list[dict[str, Any]]], size: int, what: str) -> None:
    assert [rank[what] for rank in worlds[size]] == [[]] * size, WRONG[what]


@pytest.mark.parametrize("size", SIZES)
def test_same_as_upstream(worlds: dict[int, list[dict[str, Any]]], size: int) -> None:
    """Bit-equal to Megatron-Core's own, which adds in rank order too at these sizes."""
    assert all(rank["others"]["same_as_upstream"] for rank in worlds[size])


@pytest.mark.parametrize("size", SIZES)
def test_rounds_once(worlds: dict[int, list[dict[str, Any]]], size: int) -> None:
    """A bf16 reduce-scatter differs once there are two additions; an FP32 one hardly, in the order of its sums."""
    for rank in worlds[size]:
        others = rank["others"]
        assert others["off_fp32"] <= (0 if size == 2 else 10)  # of 10000: sums that end next to a tie
        assert others["off_bf16"] > 500 if size == 4 else others["off_bf16"] == 0


def test_mean_over_one_of_its_terms() -> None:
    """Rounded once, also where the result takes the place of the first term."""
    from mega_rl.ddp.reduce_scatter import sum_rows

    rows = list(torch.randn(2, 100_000, generator=torch.Generator().manual_seed(1)).bfloat16())
    expected = ((rows[0].float() + rows[1].float()) / 2).bfloat16()
    sum_rows(rows, rows[0], divisor=2)
    assert torch.equal(rows[0], expected)
