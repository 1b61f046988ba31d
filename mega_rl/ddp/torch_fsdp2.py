"""FSDP2 of PyTorch around Megatron-Core's modules: parameters, gradients and optimizer state are sharded.

Megatron-Core's own `TorchFullyShardedDataParallel` (0.16.1) is no option: it cannot finish a gradient synchronisation
(`finalize_model_grads` passes `force_all_reduce`, which its method does not take), averages gradients, adds bf16
gradients of micro-batches up in bf16, shards a column-parallel layer twice under the default `transformer_impl`, and
fails on a tied embedding. Here the shards are the FP32 main parameters, layers compute in the model's dtype, and
gradients are summed in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mega_rl.config.schema import DataParallelConfig


class TorchFsdp(_BaseDataParallel):
    """One model chunk whose parameters are DTensors, FP32, sharded by rows over `group`.

    Each of `units` is gathered just before it runs and freed after it; the root keeps the rest, norms and what is
    tied, gathered from the forward to the end of the backward. Gradients are sums over `group` and over micro-batches,
    in `.grad`, FP32 (`grad_reduce_in_fp32`; else they travel in the model's dtype and are added up in FP32).
    """

    def __init__(
        self,
        config: TransformerConfig,
        chunk: GPTModel,
        *,
        group: ProcessGroup,
        device: torch.device,
        grad_reduce_in_fp32: bool,
    ) -> None:
        super().__init__(config=config, module=chunk)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=grad_reduce_in_fp32)
        self.process_group = group
        mesh = DeviceMesh.from_group(group, device.type)
        attributes = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
        self.dtypes = {name: parameter.dtype for name, parameter in chunk.named_parameters()}
        plan = [(module, dtype_of(module) or config.params_dtype) for module in units(chunk)]
        chunk.float()
        # A value head computes in FP32 in a bf16 model too.
        for module, dtype in [*plan, (chunk, config.params_dtype)]:
            mixed = MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch.float32 if grad_reduce_in_fp32 else dtype,
                cast_forward_inputs=False,
            )
            sharded = fully_shard(module, mesh=mesh, mp_policy=mixed)
            # Without the explicit sum, a factor of 1 would be sent as an operation that only NCCL knows.
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
        for name, parameter in chunk.named_parameters():
            # Sharding makes new parameters, and Megatron-Core keeps on them what is cut by tensor parallelism.
            vars(parameter).update(attributes[name])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Change nothing: gradients are reduced after every micro-batch, since no rank can store them whole."""
        yield

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing: the backward has waited for its reductions."""

    def zero_grad_buffer(self) -> None:
        """Drop all gradients; called before each mini-batch."""
        for parameter in self.module.parameters():
            parameter.grad = None


def units(chunk: GPTModel) -> list[torch.nn.Module]:
    """Return a chunk's modules that are gathered separately: layers, and untied embedding and head."""
    layers: list[torch.nn.Module] = [m for m in chunk.modules() if isinstance(m, TransformerLayer)]
    if chunk.share_embeddings_and_output_weights:
        return layers  # the embedding is read at both ends, so it stays gathered
    ends = [getattr(chunk, name, None) for name in ("embedding", "output_layer")]
    return layers + [end for end in ends if end is not None]


def dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's parameters, which must be one; None without parameters."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    assert len(dtypes) <= 1, f"{type(module).__name__} has parameters of several dtypes: {dtypes}"
    return dtypes.pop() if dtypes else None


def shard_chunks(
    chunks: Sequence[GPTModel],
    *,
    config: TransformerConfig,
    ddp: DataParallelConfig,
    collection: ProcessGroupCollection,
    device: torch.device,
) -> list[TorchFsdp]:
    """Shard the chunks over data and context parallelism."""
    return [
        TorchFsdp(config, chunk, group=collection.dp_cp, device=device, grad_reduce_in_fp32=ddp.grad_reduce_in_fp32)
        for chunk in chunks
    ]
