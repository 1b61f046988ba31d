"""Weights, gradients and optimizer state of one model on one rank, in bytes, exact for DDP, torch_fsdp2 and FSDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mega_rl.config.schema import DdpConfig, MegatronOptimizerConfig
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state.buffers import Buffer, lay_out
from mega_rl.plan.state.fsdp import Rows, fsdp_state, sharded_state
from mega_rl.plan.state.parameters import Parameter, chunk_parameters
from mega_rl.plan.state.sizes import StateBytes

FP32 = 4
_SMALLEST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements (megatron-core 0.16.1, DistributedDataParallel)


@dataclass(frozen=True)
class GroupPlace:
    """A rank's place among the ranks that share a buffer."""

    size: int
    index: int


@dataclass(frozen=True)
class Training:
    """The settings that decide how much state a model has."""

    itemsize: int
    trainable: bool
    frozen: tuple[str, ...]
    ddp: DdpConfig
    optimizer: MegatronOptimizerConfig


def state_of(setup: RunSetup, model: PlannedModel, rank: int) -> StateBytes:
    """Return the bytes of a model on a global rank."""
    if setup.config.engine.backend == "fsdp":
        return fsdp_state(setup, model, rank)
    return _state(setup.sharding(model), training_of(setup, model), rank)


def training_of(setup: RunSetup, model: PlannedModel) -> Training:
    """Return how a model of Megatron-Core's engine trains."""
    par = setup.config.engine.megatron
    frozen = tuple(setup.config.model.frozen) if model.trainable else ()
    return Training(setup.itemsize, model.trainable, frozen, par.ddp, par.optimizer)


@lru_cache(maxsize=1024)
def _state(sharding: Sharding, training: Training, rank: int) -> StateBytes:
    total = StateBytes()
    for stage in range(sharding.layout.vpp):
        total += _chunk_state(sharding, training, rank, stage)
    return total


def parameters_of(sharding: Sharding, training: Training, rank: int, stage: int) -> tuple[Parameter, ...]:
    """Return the parameters of one chunk of a model on a global rank."""
    at = sharding.layout.coordinates(rank)
    # Ranks that differ in data or context parallelism hold the same.
    at = RankCoordinates(at.tp_rank, 0, 0, at.pp_rank, at.ep_rank, at.etp_rank)
    return chunk_parameters(sharding, at, stage, itemsize=training.itemsize, frozen=training.frozen)


def _chunk_state(sharding: Sharding, training: Training, rank: int, stage: int) -> StateBytes:
    parameters = parameters_of(sharding, training, rank, stage)
    if not training.trainable:
        return StateBytes(weights=_nbytes(parameters))
    if training.ddp.implementation == "torch_fsdp2":
        place = dense_place(sharding.layout, training.ddp, rank)
        rows = [Rows("", parameter.rows, parameter.width, parameter.trained) for parameter in parameters]
        return sharded_state(rows, ranks=place.size, index=place.index)
    if training.ddp.implementation == "megatron_fsdp":
        return _megatron_fsdp_state(sharding, training, parameters)
    frozen = _nbytes([parameter for parameter in parameters if not parameter.trained])
    total = StateBytes(weights=frozen)
    for buffer, place in chunk_buffers(sharding, training, rank, stage):
        total += _buffer_state(training, buffer, place)
    return total


def _megatron_fsdp_state(sharding: Sharding, training: Training, parameters: Sequence[Parameter]) -> StateBytes:
    """Return the bytes of Megatron FSDP, without the padding of its own buffers: a few elements per parameter."""
    layout, ddp, b = sharding.layout, training.ddp, training.itemsize
    numel = sum(parameter.numel for parameter in parameters)
    mine = -(-numel // (layout.dp * layout.cp // ddp.optimizer_instances))
    gradient = FP32 if ddp.grad_reduce_in_fp32 else b
    return StateBytes(
        weights=(mine if ddp.fsdp_sharding == "optim_grads_params" else numel) * b,
        gradients=(numel if ddp.fsdp_sharding == "optim" else mine) * gradient,
        optimizer=mine * (2 * FP32 + (0 if b == FP32 else FP32)),
        step=0 if gradient == FP32 else mine * FP32,
    )


def chunk_buffers(sharding: Sharding, training: Training, rank: int, stage: int) -> list[tuple[Buffer, GroupPlace]]:
    """Return the buffers of a chunk's trained parameters, dense ones first, with this rank's place in their groups."""
    layout, ddp = sharding.layout, training.ddp
    parameters = parameters_of(sharding, training, rank, stage)
    size = bucket_size(ddp, layout, stage=stage, pp_rank=layout.coordinates(rank).pp_rank)
    buffers = []
    for of_expert, place in ((False, dense_place(layout, ddp, rank)), (True, expert_place(layout, ddp, rank))):
        members = tuple(each for each in parameters if each.trained and each.of_expert == of_expert)
        distributed = training.optimizer.distributed
        for buffer in lay_out(members, ranks=place.size, distributed=distributed, bucket_size=size):
            buffers.append((buffer, place))
    return buffers


def bucket_size(ddp: DdpConfig, layout: ParallelLayout, *, stage: int, pp_rank: int) -> int | None:
    """Return the elements from which on a bucket is full; None for one bucket.

    Buckets are cut only where reduction overlaps with the backward, on the first pipeline rank and in its first chunk.
    """
    if not ddp.overlap_grad_reduce or stage > 0 or pp_rank > 0:
        return None
    return ddp.bucket_size or max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * layout.dp)


def dense_place(layout: ParallelLayout, ddp: DdpConfig, rank: int) -> GroupPlace:
    """Return the place among the ranks that share the buffers of everything but experts: data and context parallel."""
    at, size = layout.coordinates(rank), layout.dp * layout.cp // ddp.optimizer_instances
    return GroupPlace(size, (at.dp_rank * layout.cp + at.cp_rank) % size)


def expert_place(layout: ParallelLayout, ddp: DdpConfig, rank: int) -> GroupPlace:
    """Return the place among the ranks that share the buffers of the same experts."""
    size = layout.stage_size // (layout.ep * layout.etp) // ddp.optimizer_instances
    return GroupPlace(size, rank % layout.stage_size // (layout.ep * layout.etp) % size)


def _buffer_state(training: Training, buffer: Buffer, place: GroupPlace) -> StateBytes:
    """Return the bytes of one buffer: with the distributed optimizer padded weights, and state of a share alone."""
    optimizer, owned = training.optimizer, buffer.owned(place.index)
    distributed = optimizer.distributed
    gradient = FP32 if training.ddp.grad_reduce_in_fp32 else buffer.itemsize
    moments = owned * 2 * (2 if optimizer.precision_aware and optimizer.moment_dtype == "bf16" else FP32)
    # FP32 weights are their own main parameters; a precision-aware optimizer keeps the other 16 bits of bf16 ones.
    main = 0 if buffer.itemsize == FP32 else owned * (2 if optimizer.precision_aware else FP32)
    on_host = round(moments * optimizer.cpu_offload)
    return StateBytes(
        weights=(buffer.numel if distributed else buffer.trained) * buffer.itemsize,
        gradients=buffer.numel * gradient,
        optimizer=main + moments - on_host,
        host=on_host,
        # Gradients of main parameters: a view of FP32 gradients, else a copy from `prepare_grads` to the next step.
        step=0 if gradient == FP32 or optimizer.precision_aware else owned * FP32,
    )


def _nbytes(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel * parameter.itemsize for parameter in parameters)
