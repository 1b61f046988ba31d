"""The buffers behind DDP: where every parameter lies, and what its gradient is once synchronised."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.buffer_cases import BUCKET_SIZES, BUFFER_WIDTH, LAYERS, SYNCS, run_world

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by world size."""
    return {size: run_ranks(size, run_world, size, timeout_s=200) for size in SIZES}


def parameters(*, bias: bool) -> list[tuple[str, int]]:
    """(name, elements) in the order of definition."""
    actual = []
    for layer in range(LAYERS):
        actual.append((f"layers.{layer}.weight", BUFFER_WIDTH**2))
        if bias:
            actual.append((f"layers.{layer}.bias", BUFFER_WIDTH))
    return actual


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def expected_buckets(
    size: int, *, sharded: bool, bias: bool, shared: bool, ranks: int
) -> list[tuple[int, int, dict[str, int]]]:
    """(offset, elements, {name: offset in the bucket}) of every bucket, by the rules.

    Parameters go in from the last to the first; a bucket is full when it has `size` elements (0: never). What is
    sharded starts at multiples of 64 elements and ends at one of lcm(ranks, 128); a sharded shared embedding is alone.
    """
    buckets: list[dict[str, int]] = [{}]
    ends = [0]
    for name, count in reversed(parameters(bias=bias)):
        alone = shared and sharded and name == f"layers.{LAYERS - 1}.weight"
        if alone and buckets[-1]:
            buckets.append({})
            ends.append(0)
        start = round_up(ends[-1], 64) if sharded else ends[-1]
        buckets[-1][name] = start
        ends[-1] = start + count
        if alone or (size and ends[-1] >= size):
            buckets.append({})
            ends.append(0)
    laid_out, offset = [], 0
    for bucket, end in zip(buckets, ends, strict=True):
        if bucket:
            length = round_up(end, math.lcm(ranks, 128)) if sharded else end
            laid_out.append((offset, length, bucket))
            offset += length
    return laid_out


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("size", BUCKET_SIZES)
def test_layout_of_buckets(worlds: dict[int, list[dict[str, Any]]], ranks: int, size: int) -> None:
    """Number, sizes, offsets and members of buckets, with and without sharding, biases and a shared embedding."""
    counts = set()
    for actual in worlds[ranks]:
        for (bucket_size, sharded, bias, shared), made in actual["layouts"].items():
            if bucket_size != size:
                continue
            expected = expected_buckets(size, sharded=sharded, bias=bias, shared=shared, ranks=ranks)
            assert made["buckets"] == [(offset, length, list(members)) for offset, length, members in expected]
            counts.add(len(expected))
            for number, (offset, _, members) in enumerate(expected):
                for name, start in members.items():
                    elements = dict(parameters(bias=bias))[name]
                    assert made["places"][name] == (offset + start, offset + start + elements, number)
                    assert made["views"][name] == offset + start
    assert max(counts) > 1  # with a size, or with the shared embedding, there is more than one


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", SYNCS)
def test_values_of_synced_gradients(worlds: dict[int, list[dict[str, Any]]], ranks: int, name: str) -> None:
    """Every gradient is the exact sum, or mean, over all ranks, in three steps one after the other."""
    ddp, _, _ = SYNCS[name]
    if ranks == 1 and ddp.optimizer_instances == 2:
        pytest.skip("two optimizer instances need two ranks")
    for rank in worlds[ranks]:
        actual = rank["sync"][name]
        assert actual["error"] == 0.0
        assert actual["buckets"] == (2 if ddp.overlap_grad_reduce else 1)


@pytest.mark.parametrize("ranks", SIZES)
def test_all_reduce_on_demand(worlds: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    """`force_all_reduce` gives every rank all gradients although they are sharded."""
    assert [rank["whole"] for rank in worlds[ranks]] == [0.0] * ranks


@pytest.mark.parametrize("ranks", SIZES)
def test_bucket_used_before_its_gradients_are_ready(worlds: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    """Finishing a bucket of which one parameter has no gradient is an error that counts them."""
    for rank in worlds[ranks]:
        assert len(rank["unready"]) == 10
        for name, message in rank["unready"].items():
            assert "3/4" in message or "3 of 4" in message, name
