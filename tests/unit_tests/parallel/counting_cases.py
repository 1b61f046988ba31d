"""Steps of real engines in simulated worlds of up to 4096 ranks, and what they send; one process, nothing moves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 8,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "2 layers": RAW,
    "4 layers": {**RAW, "num_hidden_layers": 4},
    "16 layers": {**RAW, "num_hidden_layers": 16},
    "experts": {**RAW, **EXPERTS},
}
LENGTH = 32  # tokens of every row


def write_models(root: Path) -> None:
    """A checkpoint with random weights of each model."""
    from mega_rl.converters.hf.config import parse_hf_config
    from mega_rl.converters.safetensors.writer import write_checkpoint
    from mega_rl.verify.twin import random_tensors

    for name, raw in MODELS.items():
        config = root / f"{name}.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        tensors = random_tensors(parse_hf_config(raw))
        write_checkpoint(root / name, tensors, files={"config.json": config})


def _join_fake_world(rank: int, ranks: int) -> None:
    """Join a world of which no other rank is there, and which gloo cannot have twins of."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mega_rl.parallel import groups

    groups._on_host = lambda group, *_, **__: group
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


@contextmanager
def simulated(model: str, *, ranks: int, rank: int = 0, micro_batch_size: int = 1, **settings: Any) -> Iterator[Any]:
    """The engine of one rank of a world of `ranks`, none of which but this is there.

    `settings` are those of `engine.megatron`, and `dtype`, `bucket_size`, `overlap`, `engine`, `fsdp`.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config.schema import (
        Config,
        DdpConfig,
        EngineConfig,
        FsdpConfig,
        MegatronConfig,
        MicrobatchConfig,
        ModelConfig,
        OptimConfig,
        TrainerConfig,
    )
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.layout import ParallelLayout
    from mega_rl.trainer.assemble import build_actor

    dtype, bucket = settings.pop("dtype", "fp32"), settings.pop("bucket_size", 0)
    overlap = settings.pop("overlap", False)
    backend, fsdp = settings.pop("engine", "megatron"), FsdpConfig(**settings.pop("fsdp", {}))
    ddp = DdpConfig(bucket_size=bucket, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    config = Config(
        engine=EngineConfig(backend=backend, megatron=MegatronConfig(**settings, ddp=ddp), fsdp=fsdp),
        model=ModelConfig(path=model, dtype=dtype),
        optim=OptimConfig(lr=1e-3),
        trainer=TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(packing=False, size=micro_batch_size)),
    )
    sizes = {name: value for name, value in settings.items() if name != "overlap_p2p"}
    layout = ParallelLayout(world_size=ranks, **sizes)
    _join_fake_world(rank, ranks)
    try:
        groups = process_groups.initialize(layout, accelerator=accelerator, timeout_s=60.0)
        process_groups.seed_model_parallel(0, groups)
        yield build_actor(config, groups, accelerator)
    finally:
        process_groups.destroy()


def batch(rows: int) -> Any:
    """Rows of `LENGTH` tokens that all train."""
    from mega_rl.types import Experience

    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    return Experience.from_rows(
        torch.randint(0, 96, (rows, LENGTH), generator=generator),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        lengths=torch.full((rows,), LENGTH),
        advantages=torch.randn(rows, LENGTH, generator=generator) * mask,
        loss_weights=mask / mask.sum(),
        token_weights=mask / mask.sum(),
    )


def recorded(engine: Any, *, rows: int = 4, steps: int = 1) -> Any:
    """What the last of `steps` training steps sends. What a simulated world answers need not be numbers."""
    from mega_rl.errors import NonFiniteGradientError
    from mega_rl.verify.measure import policy_loss
    from tests.helpers.counting import CollectiveRecorder

    for _ in range(steps):
        # Gradients of what nobody has sent, and metrics that a last stage would have sent.
        with CollectiveRecorder() as recorder, suppress(NonFiniteGradientError, json.JSONDecodeError):
            engine.train_minibatch(batch(rows), policy_loss(), lr=1e-4)
    return recorder


def data_parallel(root: str, *, ranks: int, rank: int = 0, model: str = "2 layers", rows: int = 4, **how: Any) -> Any:
    """What a rank of pure data parallelism sends in a step for gradients and parameters, and what it holds."""
    from mega_rl.ddp.optimizer import torch_optimizers
    from tests.helpers.counting import total_bytes

    steps = how.pop("steps", 1)
    with simulated(f"{root}/{model}", ranks=ranks, rank=rank, **how) as engine:
        recorder = recorded(engine, rows=rows, steps=steps)
        group = engine.groups.collection.dp_cp
        scattered, gathered = recorder.of(group, "reduce_scatter"), recorder.of(group, "all_gather")
        buffers = [buffer for chunk in engine.chunks for buffer in chunk.buffers]
        parameters = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
        state = [
            value
            for optimizer in torch_optimizers(engine.optimizer)
            for entry in optimizer.state.values()
            for name, value in entry.items()
            if name in ("exp_avg", "exp_avg_sq")
        ]
        return {
            "bytes": total_bytes([*scattered, *gathered]),
            "scattered": total_bytes(scattered),
            "gathered": total_bytes(gathered),
            "collectives": len(scattered) + len(gathered),
            "all": len(recorder.collectives),
            "padded": sum(buffer.numel for buffer in buffers),
            "buckets": sum(len(buffer.buckets) for buffer in buffers),
            "parameters": parameters,
            "tensors": sum(1 for chunk in engine.chunks for _ in chunk.parameters()),
            "grad_bytes": buffers[0].grad_data.element_size(),
            "param_bytes": buffers[0].param_data.element_size(),
            "state": sum(value.nbytes for value in state),
        }


def fsdp(root: str, *, ranks: int, rows: int = 4, shard_ranks: int = 0, **settings: Any) -> Any:
    """What a rank of the FSDP engine sends for layers and gradients in a step of one row for each micro-batch."""
    from tests.helpers.counting import total_bytes

    settings["shard_ranks"] = shard_ranks
    with simulated(f"{root}/2 layers", ranks=ranks, dtype="bf16", engine="fsdp", fsdp=settings) as engine:
        recorder = recorded(engine, rows=rows)
        of = {op: [c for c in recorder.collectives if c.op == op] for op in ("all_gather", "reduce_scatter")}
        summed = [c for c in recorder.collectives if c.op == "all_reduce" and c.dtype == torch.float32]  # no metrics
        root_only = engine.model.model.norm.weight
        return {
            "parameters": sum(parameter.numel() for parameter in engine.parameters),
            "of the root": root_only.numel(),
            "gathered": total_bytes(of["all_gather"]),
            "scattered": total_bytes(of["reduce_scatter"]),
            "summed": total_bytes(summed),
            "scatters": len(of["reduce_scatter"]),
            "held": sum(parameter.to_local().numel() for parameter in engine.parameters),
        }


def tensor_parallel(root: str, *, tp: int, model: str) -> int:
    """Bytes that the layers' activations take over tensor parallelism in one micro-batch, forward and backward."""
    from tests.helpers.counting import total_bytes

    with simulated(f"{root}/{model}", ranks=tp, tp=tp, etp=tp, sequence_parallel=True, micro_batch_size=4) as engine:
        recorder = recorded(engine, rows=4)
        return total_bytes(recorder.of(engine.groups.tp, "all_gather", "reduce_scatter"))


def pipeline(root: str, *, pp: int, rank: int, rows: int) -> dict[str, int]:
    """Float bytes that a stage sends to its neighbours in a step of `rows` micro-batches."""
    with simulated(f"{root}/16 layers", ranks=pp, rank=rank, pp=pp) as engine:
        recorder = recorded(engine, rows=rows)
        sends = [c for c in recorder.collectives if c.op == "send"]
        assert all(c.dtype.is_floating_point for c in sends), "shapes travel, though all micro-batches have one"
        return {"sends": len(sends), "bytes": sum(c.nbytes for c in sends)}


def experts(root: str, *, ep: int) -> int:
    """Bytes that one layer sends from one rank's tokens to the experts of the others."""
    from tests.helpers.counting import CollectiveRecorder

    with simulated(f"{root}/experts", ranks=ep, ep=ep, etp=1, micro_batch_size=16) as engine:
        # Nobody answers with the tokens that come back, and upstream's split sizes then fit no tensor.
        with CollectiveRecorder() as recorder, suppress(RuntimeError):
            engine.forward(batch(16))
        sent = recorder.of(engine.groups.collection.ep, "all_to_all")
        return next(c.nbytes for c in sent if c.dtype.is_floating_point)


def mixtures(root: str, *, ranks: int) -> dict[str, Any]:
    """Gathers of each bucket in a step by upstream and by us, dense weights and experts having an optimizer each."""
    from mega_rl.ddp.optimizer import step
    from tests.helpers.counting import CollectiveRecorder

    with simulated(f"{root}/experts", ranks=ranks, ep=2, etp=1) as engine:
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        collection, chunks = engine.groups.collection, engine.chunks
        buckets = {
            "dense": (collection.dp_cp, [bucket for c in chunks for b in c.buffers for bucket in b.buckets]),
            "expert": (collection.expt_dp, [u for c in chunks for b in c.expert_parallel_buffers for u in b.buckets]),
        }
        actual: dict[str, Any] = {}
        for who in ("upstream", "here"):
            engine.optimizer.prepare_grads()
            with CollectiveRecorder() as recorder:
                engine.optimizer.step_with_ready_grads() if who == "upstream" else step(engine.optimizer, chunks)
            for kind, (group, of_kind) in buckets.items():
                actual[f"{kind} {who}"] = len(recorder.of(group, "all_gather")) / len(of_kind)
        return actual


def construction(*, ranks: int) -> dict[str, float]:
    """Seconds and groups that joining a world takes."""

    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.layout import ParallelLayout

    _join_fake_world(ranks - 1, ranks)
    try:
        layout = ParallelLayout(world_size=ranks, tp=8, pp=8, ep=8, etp=1, sequence_parallel=True)
        began = time.process_time()
        process_groups.initialize(layout, accelerator=accelerator, timeout_s=60.0)
        return {"seconds": time.process_time() - began, "groups": len(dist.distributed_c10d._world.pg_map)}
    finally:
        process_groups.destroy()


def everything(rank: int, root: str) -> dict[str, Any]:
    """All numbers of test_growth_laws.py."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    return {
        "dp": {d: data_parallel(root, ranks=d) for d in (2, 8, 64, 512, 4096)},
        "dp last": data_parallel(root, ranks=512, rank=509),
        "dp bf16": data_parallel(root, ranks=64, dtype="bf16"),
        "micro-batches": {m: data_parallel(root, ranks=8, rows=m) for m in (1, 16)},
        "model": {m: data_parallel(root, ranks=8, model=m) for m in ("2 layers", "16 layers")},
        "buckets": {
            size: data_parallel(root, ranks=8, model="16 layers", bucket_size=size, overlap=True, steps=2)
            for size in (60_000, 240_000)
        },
        "fsdp": {d: fsdp(root, ranks=d) for d in (2, 4, 8)},
        "fsdp once": {m: fsdp(root, ranks=8, rows=m, reduce_every_microbatch=False) for m in (1, 8)},
        "fsdp kept": fsdp(root, ranks=8, reshard_after_forward=False),
        "fsdp copies": fsdp(root, ranks=64, shard_ranks=8),
        "tp": {t: [tensor_parallel(root, tp=t, model=m) for m in ("2 layers", "4 layers")] for t in (2, 4, 8)},
        "pp": {at: pipeline(root, pp=at[0], rank=at[1], rows=16) for at in ((2, 0), (2, 1), (8, 3), (16, 0), (16, 15))},
        "pp micro-batches": {m: pipeline(root, pp=4, rank=0, rows=m) for m in (4, 16)},
        "ep": {e: experts(root, ep=e) for e in (2, 8, 64)},
        "mixtures": mixtures(root, ranks=8),
        "groups": {ranks: construction(ranks=ranks) for ranks in (256, 4096)},
    }
