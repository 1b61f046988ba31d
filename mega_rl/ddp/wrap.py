"""Megatron-Core DistributedDataParallel around a model's chunks, and gradient finalisation with sum semantics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from mega_rl.config.schema import DataParallelConfig
from mega_rl.ddp import megatron_fsdp, torch_fsdp2
from mega_rl.ddp.bucket_groups import finalize_sums, gather_outdated, use_summing_groups
from mega_rl.ddp.reduce_scatter import Scratch
from mega_rl.errors import UserError, UserErrors


def wrap_chunks(
    chunks: Sequence[MegatronModule],
    *,
    config: TransformerConfig,
    ddp: DataParallelConfig,
    distributed_optimizer: bool,
    collection: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """The chunks in DDP, with gradient finalisation and synchronisation hooked into `config`.

    Chunks are built in their training dtype, so Megatron-Core's Float16Module has nothing to convert; leaving it out
    also spares its fp32 copy of the logits.

    Gradients are summed over data parallel, not averaged: every token's loss already carries its weight in the global
    mean (`config.calculate_per_token_loss`). With `average_in_collective` DDP divides by dp x cp and the schedule
    by the number of micro-batches; the engine multiplies every loss by both.

    Raises UserError: FP32 accumulation of gradients that travel in FP32.
    """
    if ddp.name != "ddp":
        check_fsdp(ddp, chunks=chunks, collection=collection)
        shard = torch_fsdp2.shard_chunks if ddp.name == "torch_fsdp2" else megatron_fsdp.shard_chunks
        device = next(chunks[0].parameters()).device
        return list(shard(chunks, config=config, ddp=ddp, collection=collection, device=device))
    if ddp.reduce_scatter_fp32_accumulation and ddp.grad_reduce_in_fp32:
        raise UserError(
            "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true: gradients are added in FP32 from bf16 "
            "messages, but engine.megatron.ddp.grad_reduce_in_fp32=true sends FP32; set "
            "engine.megatron.ddp.grad_reduce_in_fp32=false or leave the former out"
        )
    wrapped = [
        DistributedDataParallel(
            config,
            _ddp_config(ddp, distributed_optimizer=distributed_optimizer, interleaved=len(chunks) > 1),
            chunk,
            disable_bucketing=stage > 0,
            pg_collection=collection,
        )
        for stage, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        _count_padding(chunk)
    _choose_collectives(wrapped, ddp)
    _hook_into_schedule(config, wrapped, ddp)
    return wrapped


def _ddp_config(
    ddp: DataParallelConfig, *, distributed_optimizer: bool, interleaved: bool
) -> DistributedDataParallelConfig:
    """Return Megatron-Core's DDP settings of one chunk, which Megatron-Core modifies."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        align_param_gather=ddp.overlap_param_gather and interleaved,
        use_distributed_optimizer=distributed_optimizer,
        num_distributed_optimizer_instances=ddp.optimizer_instances,
        bucket_size=ddp.bucket_size or None,
        average_in_collective=ddp.average_in_collective,
    )


def _count_padding(chunk: DistributedDataParallel) -> None:
    """Let the padding at the end of each bucket count as part of it.

    Megatron-Core (0.16.1, `DistributedOptimizer.get_parameter_state_dp_zero`) leaves it out when it joins the buckets'
    optimizer state, and `sharded_param_state_fully_reshardable` then cuts parameters out by offsets that include it:
    a checkpoint of several buckets had the wrong numbers from the second on.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def _choose_collectives(wrapped: Sequence[DistributedDataParallel], ddp: DataParallelConfig) -> None:
    """Choose sums in FP32 and rank order if set, and on gloo, where they are faster than its reduce-scatter."""
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    if ddp.reduce_scatter_fp32_accumulation:
        if buffers and all(buffer.grad_dtype == torch.float32 for buffer in buffers):
            raise UserError(
                "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true: this model's gradients are FP32 and travel "
                "as such; set model.dtype=bf16 or engine.megatron.ddp.reduce_scatter_fp32_accumulation=false"
            )
    elif not all(
        buffer.ddp_config.use_distributed_optimizer
        and buffer.grad_dtype == torch.float32
        and dist.get_backend(buffer.data_parallel_group) == "gloo"
        for buffer in buffers
    ):
        return
    sizes = [bucket.grad_data.nbytes for buffer in buffers for bucket in buffer.buckets]
    scratch = Scratch(max(sizes, default=0))
    for chunk in wrapped:
        use_summing_groups(chunk, scratch=scratch)


def _hook_into_schedule(
    config: TransformerConfig, wrapped: Sequence[DistributedDataParallel], ddp: DataParallelConfig
) -> None:
    """Set the schedule's hooks: finalisation of gradients, no_sync and, interleaved, the start of chunks' traffic."""
    config.finalize_model_grads_func = finalize_sums
    if len(wrapped) == 1:
        config.no_sync_func = wrapped[0].no_sync
        return
    config.no_sync_func = [chunk.no_sync for chunk in wrapped]
    # All stages start a chunk's collectives at the same point of the schedule: on a slow link the ranks of one stage
    # would otherwise hold up the others' pipeline messages.
    if ddp.overlap_grad_reduce:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    if ddp.overlap_param_gather:
        config.param_sync_func = [partial(gather_outdated, chunk) for chunk in wrapped]


def check_fsdp(
    ddp: DataParallelConfig, *, chunks: Sequence[torch.nn.Module], collection: ProcessGroupCollection
) -> None:
    """Refuse layouts and settings under which sharded data parallelism of megatron-core 0.16.1 is wrong or undone.

    Raises UserErrors: on all ranks alike.
    """
    problems = list(_both(ddp, chunks))
    if ddp.name == "megatron_fsdp":
        problems += _megatron(ddp, collection)
        if any(not p.requires_grad for chunk in chunks for p in chunk.parameters()):
            problems.append(
                "model.frozen with engine.megatron.ddp=megatron_fsdp: Megatron-Core waits for a "
                "gradient of every parameter; use engine.megatron.ddp=torch_fsdp2 or ddp"
            )
    if problems:
        raise UserErrors(problems)


def _both(ddp: DataParallelConfig, chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    if any(not getattr(p, "allreduce", True) for chunk in chunks for p in chunk.parameters()):
        yield (
            f"engine.megatron.ddp={ddp.name} with experts that are not on every rank "
            "(engine.megatron.ep, etp): gradients would be summed over ranks with other experts; use "
            "engine.megatron.ep=1 and etp=0, or engine.megatron.ddp=ddp"
        )


def _megatron(ddp: DataParallelConfig, collection: ProcessGroupCollection) -> Iterator[str]:
    plain = ddp.fsdp_sharding == "optim"
    if collection.pp.size() > 1:
        yield (
            f"engine.megatron.ddp=megatron_fsdp with engine.megatron.pp={collection.pp.size()}: "
            "Megatron-Core's sharding has no place for pipelines; use engine.megatron.pp=1, or "
            "engine.megatron.ddp=torch_fsdp2 or ddp"
        )
    if collection.dp_cp.size() == 1:
        yield (
            "engine.megatron.ddp=megatron_fsdp with one data-parallel rank: there is nothing to shard, "
            "and Megatron-Core adds gradients up wrongly; use more ranks or engine.megatron.ddp=ddp"
        )
    if plain and ddp.overlap_grad_reduce:
        # Each reduced shard is added to the local gradient, which the unsharded buffer still holds.
        yield (
            "engine.megatron.ddp.fsdp_sharding=optim with engine.megatron.ddp.overlap_grad_reduce=true: Megatron-Core "
            "counts a rank's own gradients twice; set engine.megatron.ddp.overlap_grad_reduce=false or "
            "engine.megatron.ddp.fsdp_sharding=optim_grads"
        )
    if plain and ddp.optimizer_instances > 1:
        yield (
            "engine.megatron.ddp.fsdp_sharding=optim with "
            f"engine.megatron.ddp.optimizer_instances={ddp.optimizer_instances}: Megatron-Core reduces gradients "
            "within an instance only; set engine.megatron.ddp.optimizer_instances=1 or "
            "engine.megatron.ddp.fsdp_sharding=optim_grads"
        )
