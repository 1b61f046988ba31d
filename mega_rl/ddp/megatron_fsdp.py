"""Megatron FSDP around a model's chunks: optimizer state, gradients and parameters sharded over data parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from mega_rl.config.schema import DataParallelConfig
from mega_rl.parallel.accelerator.megatron_core import fsdp_gradient_dtypes, fsdp_instance_buffers

Read = Callable[[], torch.Tensor]


class MegatronFsdp(FullyShardedDataParallel):
    """Adapter of Megatron FSDP that also marks how tensor parallelism cuts the layers of mega_rl."""

    def _annotate_tensor_parallelism(self, root_module: torch.nn.Module) -> None:
        """Mark how tensor parallelism cuts each parameter; Megatron-Core calls this from 0.18 on.

        Upstream goes by class names and knows none of ours, so this reads each parameter's own attributes.
        """
        super()._annotate_tensor_parallelism(root_module)
        for parameter in root_module.parameters():
            dim = vars(parameter).get("partition_dim", -1) if vars(parameter).get("tensor_model_parallel") else -1
            if dim >= 0:
                vars(parameter).update(_tensor_parallel_mode=("column", "row")[dim])

    def _fix_tensor_parallel_attributes(self, module: torch.nn.Module) -> None:
        """Mark how tensor parallelism cuts each parameter; Megatron-Core calls this in 0.16.

        Dense weights carry their marks (`mark_tensor_parallel`); without Transformer Engine upstream would take a mock
        of one of its classes for the class.
        """
        if isinstance(TELinear, type):
            super()._fix_tensor_parallel_attributes(module)
            return
        for name, parameter in module.named_parameters():
            if name.endswith(".router.weight"):
                vars(parameter).update(_mcore_tp=True, _tp_duplicated=True)


def shard_chunks(
    chunks: Sequence[GPTModel],
    *,
    config: TransformerConfig,
    ddp: DataParallelConfig,
    collection: ProcessGroupCollection,
    device: torch.device,
) -> list[MegatronFsdp]:
    """Return the chunks in Megatron FSDP.

    Gradients are sums (`config.calculate_per_token_loss`). Main parameters are FP32. Each of
    `engine.megatron.ddp.optimizer_instances` groups of ranks shards by itself, and gradients are summed over all.
    """
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=ddp.fsdp_sharding,
        num_distributed_optimizer_instances=ddp.optimizer_instances,
        outer_dp_sharding_strategy="no_shard",  # instances are copies
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        bucket_size=ddp.bucket_size or None,
        gradient_reduce_div_fusion=False,  # an operation that only NCCL knows, and sums divide by nothing
        **fsdp_gradient_dtypes(in_fp32=ddp.grad_reduce_in_fp32),
    )
    wrapped = [
        MegatronFsdp(config, ddp_config, chunk, disable_bucketing=stage > 0, device=device, pg_collection=collection)
        for stage, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.no_sync = no_sync_of(chunk, ddp)
        if device.type == "cpu":
            _gather_at_once(chunk)
    return wrapped


def no_sync_of(chunk: MegatronFsdp, ddp: DataParallelConfig) -> Callable[[], AbstractContextManager[None]]:
    """Return the context that the schedule enters for all micro-batches but the last.

    Upstream's ends with a reduction inside the last backward. Where gradients are not sharded `finish_grad_sync` adds
    another, and every gradient would count twice.
    """
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext if ddp.fsdp_sharding == "optim" else chunk.no_sync
    return no_sync


def _gather_at_once(chunk: MegatronFsdp) -> None:
    """Let each parameter gathering end before its call returns: without streams nothing can hide it.

    With gatherings on their way gloo's threads write into memory during the passes, and some launches in a hundred
    ended with a corrupted heap.
    """
    pipeline = chunk.module.all_gather_pipeline
    pipeline.all_gather_params = partial(pipeline.all_gather_params, async_param_gather=False)


def whole_parameters(chunk: MegatronFsdp) -> Iterator[tuple[str, torch.nn.Parameter, Read]]:
    """Yield each (name, parameter that layers compute with, function that returns a whole copy).

    Reading is collective over dp x cp. One bucket of parameters is in memory at a time.
    """
    for name, parameter in chunk.module.raw_param.items():
        yield name, parameter, partial(_read, chunk.module, parameter)


def _read(fsdp: MegatronFSDP, parameter: torch.nn.Parameter) -> torch.Tensor:
    bucket = fsdp.param_and_grad_buffer.param_to_param_group[parameter]
    fsdp.all_gather_and_wait_parameters_ready([parameter], prefetch=False)
    value = parameter.detach().clone()
    # The next parameter is most likely of the same bucket: its memory goes when another bucket is gathered.
    fsdp.all_gather_pipeline.release_bucket(bucket, False, lazy=True)
    return value


def finish_gathering(chunk: MegatronFsdp) -> None:
    """Wait for parameters on their way, and free gathered ones; collective over dp x cp.

    A step ends by starting to gather, and memory that a message is written into must not be given away.
    """
    pipeline = chunk.module.all_gather_pipeline
    for bucket, backward in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, backward)
    chunk.module.synchronize_param_gather()


def parameter_buffers(chunk: MegatronFsdp) -> Iterator[torch.Tensor]:
    """The flat tensors that parameters and FP32 main parameters are views of, on this rank."""
    for group in chunk.param_and_grad_buffer.parameter_groups:
        yield from _data(group.model_weight_buffer, group.main_weight_buffer, fsdp_instance_buffers(group)[0])


def gradient_buffers(chunk: MegatronFsdp) -> Iterator[torch.Tensor]:
    """The flat tensors that gradients are views of, on this rank."""
    for group in chunk.param_and_grad_buffer.parameter_groups:
        yield from _data(group.main_grad_buffer, fsdp_instance_buffers(group)[1])


def _data(*buffers: Any) -> Iterator[torch.Tensor]:
    yield from (buffer.data for buffer in buffers if buffer is not None and buffer.data is not None)
