"""What each rank does in test_buckets.py: describe the buckets of an engine and record what its collectives do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

RECORDED = ("all_to_all_single", "broadcast", "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor")


def sent(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Bytes that leave this rank in one call."""
    group = kwargs["group"]
    ranks = group.size()
    if name == "all_to_all_single":
        source, sizes = args[1], args[3]
        return (source.numel() - sizes[group.rank()]) * source.element_size()
    if name == "broadcast":
        return args[0].nbytes * (ranks - 1) if kwargs["group_src"] == group.rank() else 0
    if name == "all_gather_into_tensor":
        return args[1].nbytes * (ranks - 1)
    if name == "reduce_scatter_tensor":
        return args[1].nbytes * (ranks - 1) / ranks
    return 2 * args[0].nbytes * (ranks - 1) / ranks


@contextmanager
def recording() -> Iterator[list[tuple[str, int, float]]]:
    """(function, ranks, bytes sent) of every collective within the block."""
    from megatron.core.distributed import param_and_grad_buffer

    calls: list[tuple[str, int, float]] = []

    def recorder(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, kwargs["group"].size(), sent(name, args, kwargs)))
            return real(*args, **kwargs)

        return call

    recorders = {name: recorder(name, getattr(dist, name)) for name in RECORDED}
    copies = {
        "dist_reduce_scatter_func": recorders["reduce_scatter_tensor"],
        "dist_all_gather_func": recorders["all_gather_into_tensor"],
    }
    with mock.patch.multiple(dist, **recorders), mock.patch.multiple(param_and_grad_buffer, **copies):
        yield calls


def describe_engine(config: Any) -> dict[str, Any]:
    """What `describe` says, what the buffers say, and what was recorded in one synchronisation of everything."""
    from tests.helpers.engines import running_engine

    with running_engine(config) as engine:
        from mega_rl.ddp.frozen import named_parameters
        from tests.helpers.buckets import describe

        buckets = describe(engine.chunks)
        wrong = []
        for number, chunk in enumerate(engine.chunks):
            buffers = {"dense": chunk.buffers, "expert": chunk.expert_parallel_buffers}
            for name, parameter in named_parameters([chunk.module]):
                place = buckets.place(name)
                (buffer,) = buffers[place.buffer]
                start = buffer.grad_data.data_ptr() + place.offset * buffer.grad_data.element_size()
                bucket = buffer.buckets[place.bucket]
                if (
                    parameter.main_grad.data_ptr() != start
                    or parameter.main_grad.numel() != place.numel
                    or parameter.main_grad.dtype != place.dtype
                    or parameter not in bucket.params
                    or place.chunk != number
                ):
                    wrong.append(f"{name}: {place}")
        with recording() as calls:
            for chunk in engine.chunks:
                chunk.finish_grad_sync()
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync()
        described = [(call, t.ranks) for t in buckets.traffic for call in t.calls]
        try:
            buckets.place("decoder.layers.99.nothing")
            missing = ""
        except KeyError as error:
            missing = str(error)
        total = engine.replica.sum(engine.data_parallel.sum(tensor([sum(sent for *_, sent in calls)])))
        return {
            "wrong": wrong,
            "places": len(buckets.places),
            "parameters": sum(len(list(chunk.parameters())) for chunk in engine.chunks),
            "calls": sorted((name, ranks) for name, ranks, _ in calls),
            "described": sorted(described),
            "sent_by_all": float(total),
            "described_by_all": float(engine.replica.sum(engine.data_parallel.sum(tensor([buckets.bytes_sent()])))),
            "operations": sorted({(t.buffer, t.operation, t.ranks) for t in buckets.traffic}),
            "buckets": len(buckets.traffic),
            "text": str(buckets),
            "missing": missing,
        }


def tensor(values: list[float]) -> Any:
    """float64 [n]."""
    import torch

    return torch.tensor(values, dtype=torch.float64)


def run_cases(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case of this world size."""
    from tests.helpers.engines import make_config, replaced

    actual = []
    for case in cases:
        config = make_config(Path(case["checkpoint"]), dtype=case["dtype"])
        config = replaced(config, "engine.megatron", **case["parallel"])
        config = replaced(config, "engine.megatron.optimizer", distributed=case["sharded"])
        actual.append(describe_engine(replaced(config, "engine.megatron.ddp", **case["ddp"])))
    return actual
