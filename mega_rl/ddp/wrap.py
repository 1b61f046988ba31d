"""Megatron-Core DistributedDataParallel around a model's chunks, and gradient finalisation with sum semantics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from mega_rl.config.schema import DdpConfig


def wrap_chunks(
    chunks: Sequence[MegatronModule],
    *,
    config: TransformerConfig,
    ddp: DdpConfig,
    distributed_optimizer: bool,
    collection: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """The chunks in DDP, with gradient finalisation and synchronisation hooked into `config`.

    Chunks are built in their training dtype, so Megatron-Core's Float16Module has nothing to convert; leaving it out
    also spares its fp32 copy of the logits.

    Gradients are summed over data parallel, not averaged: every token's loss already carries its weight in the global
    mean (`config.calculate_per_token_loss`).
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=distributed_optimizer,
        num_distributed_optimizer_instances=ddp.optimizer_instances,
        bucket_size=ddp.bucket_size or None,
        average_in_collective=ddp.average_in_collective,
    )
    wrapped = [
        DistributedDataParallel(
            config,
            ddp_config,
            chunk,
            disable_bucketing=stage > 0,
            pg_collection=collection,
        )
        for stage, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_sums
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def finalize_sums(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron-Core's `finalize_model_grads` without its division by a token count: our weights are global already."""
    kwargs: dict[str, Any] = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    finalize_model_grads(model, None, **kwargs)
