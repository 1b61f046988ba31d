"""What each rank does in the tests of the gradient buffers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from mega_rl.config.schema import DdpConfig
from tests.unit_tests.distributed.ddp_cases import Layers, groups_of, own_part, wrapped

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
