"""Megatron-Core DistributedDataParallel around a model's chunks, and gradient finalisation with sum semantics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from mega_rl.config.schema import DataParallelConfig
from mega_rl.ddp import megatron_fsdp, torch_fsdp2
from mega_rl.ddp.bucket_groups import finalize_sums, gather_outdated, use_summing_groups
from mega_rl.ddp.reduce_scatter import Scratch


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
    """
    wrapped: list[Any]
    if ddp.name == "ddp":
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
        _choose_collectives(wrapped, ddp)
    else:
        shard = torch_fsdp2.shard_chunks if ddp.name == "torch_fsdp2" else megatron_fsdp.shard_chunks
        device = next(chunks[0].parameters()).device
        wrapped = [*shard(chunks, config=config, ddp=ddp, collection=collection, device=device)]
    config.finalize_model_grads_func = finalize_sums
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    if ddp.name == "ddp" and len(wrapped) > 1:
        # All stages start a chunk's collectives at the same point of the schedule: on a slow link the ranks of one
        # stage would otherwise hold up the others' pipeline messages.
        if ddp.overlap_grad_reduce:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
        if ddp.overlap_param_gather:
            config.param_sync_func = [partial(gather_outdated, chunk) for chunk in wrapped]
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


def _choose_collectives(wrapped: Sequence[DistributedDataParallel], ddp: DataParallelConfig) -> None:
    """Choose sums in FP32 and rank order if set, and on gloo, where they are faster."""
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    if not ddp.reduce_scatter_fp32_accumulation and not all(
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
