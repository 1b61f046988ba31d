"""The buffers behind DDP: where every parameter lies, and what its gradient is once synchronised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl.config.schema.engine import DdpConfig
from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.test_distributed_data_parallel import Layers, groups_of, own_part, wrapped

LAYERS, BUFFER_WIDTH = 10, 100
BUCKET_SIZES = [0, 9000, 9025, 9050, 9075, 9999, 10000, 10001, 10100, 20000]  # 0: one bucket for all
# name -> (settings, distributed optimizer, dtype of the parameters)
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1000}
WIRE = {"grad_reduce_in_fp32": False, "reduce_scatter_fp32_accumulation": True}
SYNCS: dict[str, tuple[DdpConfig, bool, torch.dtype]] = {
    f"{kind}{' average' if average else ''}{' overlap' if overlap else ''}{f' instances{n}' if n > 1 else ''}": (
        DdpConfig(**{**settings, **overlap}, average_in_collective=average, optimizer_instances=n),
        sharded,
        dtype,
    )
    for (kind, settings, sharded, dtype), average, overlap, n in product(
        (
            ("plain", {}, False, torch.float32),
            ("sharded", {}, True, torch.float32),
            ("sharded bf16", {"grad_reduce_in_fp32": False}, True, torch.bfloat16),
            ("wire", WIRE, True, torch.bfloat16),
            ("plain wire", WIRE, False, torch.bfloat16),
        ),
        (False, True),
        ({}, OVERLAP),
        (1, 2),
    )
    if n == 1 or sharded
}


def layouts(groups: Any, device: torch.device) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every bucket of every setting: (setting, what Megatron-Core made of it)."""
    for size, sharded, bias, shared in product(BUCKET_SIZES, (False, True), (False, True), (False, True)):
        ddp = DdpConfig(overlap_grad_reduce=size > 0, bucket_size=size)
        module = Layers(LAYERS, BUFFER_WIDTH, bias=bias, shared=LAYERS - 1 if shared else None).to(device)
        chunk = wrapped([module], ddp, collection=groups.collection, distributed_optimizer=sharded)[0]
        (buffer,) = chunk.buffers
        names = {parameter: name for name, parameter in chunk.module.named_parameters()}
        yield (
            (size, sharded, bias, shared),
            {
                "buckets": [(b.offset, b.grad_data.numel(), [names[p] for p in b.params_list]) for b in buffer.buckets],
                "places": {names[p]: place for p, place in buffer.param_index_map.items()},
                "views": {
                    names[p]: (p.main_grad.data_ptr() - buffer.grad_data.data_ptr()) // p.main_grad.element_size()
                    for p in buffer.params
                },
            },
        )


def synced_values(name: str, groups: Any, device: torch.device) -> dict[str, Any]:
    """Gradients of rank + 1 everywhere, reduced three times: the largest error in what this rank answers for.

    Small whole numbers are exact in every dtype here, and so are their sums and, over 2 or 4 ranks, their means.
    """
    ddp, sharded, dtype = SYNCS[name]
    chunk = wrapped(
        [Layers(4).to(device).cast(dtype)], ddp, collection=groups.collection, distributed_optimizer=sharded
    )[0]
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = sum(range(1, size + 1)) / (size if ddp.average_in_collective else 1)
    error = 0.0
    for step in range(3):
        chunk.zero_grad_buffer()
        for number, parameter in enumerate(chunk.parameters()):
            parameter.main_grad.fill_((rank + 1) * (step + 1) * (number + 1))
        if ddp.overlap_grad_reduce:
            for parameter in reversed(list(chunk.parameters())):
                chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
        started = [group.grad_reduce_handle is not None for group in chunk.bucket_groups]
        if ddp.optimizer_instances == 1:  # Megatron-Core's own groups keep no handle of what several do
            assert started == [ddp.overlap_grad_reduce and step > 0] * len(started)
        chunk.finish_grad_sync()
        for number, parameter in enumerate(chunk.parameters()):
            own = parameter.main_grad.flatten()[own_part(chunk, parameter, sharded)]
            if own.numel():
                error = max(error, float((own.float() - expected * (step + 1) * (number + 1)).abs().max()))
    return {"error": error, "buckets": len(chunk.bucket_groups), "kind": type(chunk.bucket_groups[0]).__name__}


def whole_values(groups: Any, device: torch.device) -> float:
    """As `synced_values`, with every rank asking for all gradients in spite of the distributed optimizer."""
    ddp, _, dtype = SYNCS["wire"]
    chunk = wrapped([Layers(4).to(device).cast(dtype)], ddp, collection=groups.collection)[0]
    for parameter in chunk.parameters():
        parameter.main_grad.fill_(dist.get_rank() + 1)
    chunk.finish_grad_sync(force_all_reduce=True)
    expected = sum(range(1, dist.get_world_size() + 1))
    return max(float((parameter.main_grad.float() - expected).abs().max()) for parameter in chunk.parameters())


def unready(name: str, groups: Any, device: torch.device) -> str:
    """What is said of a bucket that is used while one of its parameters has no gradient yet."""
    ddp, sharded, dtype = SYNCS[name]
    chunk = wrapped(
        [Layers(4).to(device).cast(dtype)], ddp, collection=groups.collection, distributed_optimizer=sharded
    )[0]
    for _ in range(2):
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
        chunk.finish_grad_sync()
    chunk.zero_grad_buffer()
    group = chunk.bucket_groups[0]
    for parameter in group.buckets[0].params_list[:-1]:
        group.register_grad_ready(parameter)
    try:
        group.finish_grad_sync()
    except AssertionError as error:
        return str(error)
    return "nothing"


def run_world(rank: int, world_size: int) -> dict[str, Any]:
    """Everything of one world size in one launch."""
    actual: dict[str, Any] = {"sync": {}, "unready": {}}
    with groups_of(world_size) as (groups, device):
        actual["layouts"] = dict(layouts(groups, device))
        actual["whole"] = whole_values(groups, device)
        for name, (ddp, _, _) in SYNCS.items():
            if ddp.optimizer_instances == 1:
                actual["sync"][name] = synced_values(name, groups, device)
                if ddp.overlap_grad_reduce:
                    actual["unready"][name] = unready(name, groups, device)
    if world_size > 1:
        with groups_of(world_size, optimizer_instances=2) as (groups, device):
            for name, (ddp, _, _) in SYNCS.items():
                if ddp.optimizer_instances == 2:
                    actual["sync"][name] = synced_values(name, groups, device)
    return actual


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
