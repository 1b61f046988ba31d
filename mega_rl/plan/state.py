"""Exact bytes of a model's weights, gradients and optimizer per rank under DDP, torch_fsdp2 and FSDP.

Buffers follow the rules of `megatron.core.distributed.param_and_grad_buffer` (0.16.1): parameters from last to first,
each beginning at a multiple of 64 elements, and each bucket rounded up to the least common multiple of 128 and the
ranks. All of this applies only under the distributed optimizer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from mega_rl.config.schema import Config, DataParallelConfig, MegatronOptimizerConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import global_param, param_name, shard, source_shape
from mega_rl.converters.plan.matrices import matrix_blocks
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, stage_experts, stage_parts
from mega_rl.converters.plan.ranks import experts_of
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from mega_rl.plan.setup import PlannedModel, RunSetup

_START, _END = 64, 128  # elements
_SMALLEST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements (megatron-core 0.16.1, DistributedDataParallel)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay from step to step, and bytes of the optimizer's step."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # FP32 main parameters and moments on the device
    host: int = 0  # optimizer state in host memory
    step: int = 0  # more, from the preparation of gradients to the next mini-batch

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Training:
    """The settings that decide how much state a model of Megatron-Core's engine has."""

    itemsize: int
    trainable: bool
    frozen: tuple[str, ...]
    ddp: DataParallelConfig
    optimizer: MegatronOptimizerConfig
    muon: bool


@dataclass(frozen=True)
class Buffer:
    """One buffer: parameters of one dtype that one group of ranks reduces."""

    itemsize: int  # bytes of a parameter's element
    ranks: int  # number that share it
    distributed: bool  # under the distributed optimizer
    spans: tuple[tuple[int, int], ...]  # first and last + 1 element of each parameter
    buckets: tuple[tuple[int, int], ...]
    of_experts: bool = False
    matrices: tuple[tuple[int, int], ...] = ()  # spans of parameters that Muon keeps one moment of

    @property
    def numel(self) -> int:
        """Return the elements with padding."""
        return self.buckets[-1][1]

    @property
    def trained(self) -> int:
        """Return the elements without padding."""
        return sum(end - first for first, end in self.spans)

    def owned(self, index: int, spans: tuple[tuple[int, int], ...] | None = None) -> int:
        """Return the elements of `spans`, or all, whose optimizer state rank `index` of the group holds."""
        spans = self.spans if spans is None else spans
        if not self.distributed:
            return sum(end - first for first, end in spans)
        starts, total = [first for first, _ in spans], 0
        for begin, stop in self.buckets:
            size = (stop - begin) // self.ranks
            first, end = begin + index * size, begin + (index + 1) * size
            inside = spans[max(bisect_right(starts, first) - 1, 0) : bisect_right(starts, end - 1)]
            total += sum(max(0, min(one_end, end) - max(one_first, first)) for one_first, one_end in inside)
        return total


@lru_cache(maxsize=64)
def lay_out(
    parameters: tuple[Parameter, ...], *, ranks: int, distributed: bool, bucket_size: int | None
) -> tuple[Buffer, ...]:
    """Return the buffers of trained parameters that `ranks` ranks share, one for each dtype."""
    buffers = []
    for itemsize in dict.fromkeys(parameter.itemsize for parameter in parameters):
        members = [parameter for parameter in parameters if parameter.itemsize == itemsize]
        spans, buckets = _spans(members, math.lcm(ranks, _END) if distributed else 1, distributed, bucket_size)
        matrices = tuple(span for span, each in zip(spans, reversed(members), strict=True) if each.matrix)
        buffers.append(Buffer(itemsize, ranks, distributed, spans, buckets, members[0].of_expert, matrices))
    return tuple(buffers)


def _spans(
    parameters: list[Parameter], multiple: int, distributed: bool, bucket_size: int | None
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the spans of parameters and the buckets, whose ends are multiples of `multiple`."""
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    is_open = False  # the bucket that begins at `begin` holds a parameter

    def close() -> None:
        nonlocal begin, at, is_open
        at = -(-at // multiple) * multiple
        buckets.append((begin, at))
        begin, is_open = at, False

    for parameter in reversed(parameters):
        at = -(-at // _START) * _START if distributed else at
        has_own_bucket = parameter.shared_embedding and distributed
        if has_own_bucket and is_open:
            close()
        spans.append((at, at + parameter.numel))
        at, is_open = at + parameter.numel, True
        if has_own_bucket or (bucket_size is not None and at - begin >= bucket_size):
            close()
    if is_open:
        close()
    return tuple(spans), tuple(buckets)


def state_of(setup: RunSetup, model: PlannedModel, rank: int) -> StateBytes:
    """Return the bytes of a model on a global rank, once gradients exist."""
    if setup.config.engine.backend == "fsdp":
        return _fsdp_state(setup, model, rank)
    return _state(setup.sharding(model), training_of(setup, model), rank)


def _fsdp_state(setup: RunSetup, model: PlannedModel, rank: int) -> StateBytes:
    ranks, fsdp = shard_ranks(setup.config, setup.machine.world_size), setup.config.engine.fsdp
    frozen = tuple(setup.config.model.frozen) if model.trainable else ("*",)
    parameters = transformers_parameters(model.hf, model.head, frozen)
    state = _sharded_state(parameters, ranks=ranks, index=rank % ranks, muon=setup.config.optim.name == "muon")
    if not fsdp.reduce_every_microbatch:
        state += StateBytes(gradients=FP32 * sum(parameter.numel for parameter in parameters if parameter.trained))
    return StateBytes(host=state.weights + state.gradients + state.optimizer) if fsdp.cpu_offload else state


def _sharded_state(parameters: Iterable[Parameter], *, ranks: int, index: int, muon: bool) -> StateBytes:
    """Return the bytes of FP32 shards: padded weights and gradients, moments of this rank's rows."""
    weights = gradients = moments = 0
    for parameter in parameters:
        padded = parameter.padded(ranks)
        weights += padded
        if parameter.trained:
            gradients += padded
            moments += (2 - (muon and parameter.matrix)) * parameter.held(ranks, index)
    return StateBytes(weights * FP32, gradients * FP32, moments * FP32)


def shard_ranks(config: Config, world_size: int) -> int:
    """Return the ranks that share one copy of weights and optimizer state."""
    return config.engine.fsdp.shard_ranks or world_size


def training_of(setup: RunSetup, model: PlannedModel) -> Training:
    """Return how a model of Megatron-Core's engine trains."""
    par = setup.config.engine.megatron
    frozen = tuple(setup.config.model.frozen) if model.trainable else ()
    return Training(setup.itemsize, model.trainable, frozen, par.ddp, par.optimizer, setup.config.optim.name == "muon")


@lru_cache(maxsize=1024)
def _state(sharding: Sharding, training: Training, rank: int) -> StateBytes:
    chunks = (_chunk_state(sharding, training, rank, stage) for stage in range(sharding.layout.vpp))
    return sum(chunks, StateBytes())


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
    if training.ddp.name == "torch_fsdp2":
        size, index = _dense_place(sharding.layout, training.ddp, rank)
        return _sharded_state(parameters, ranks=size, index=index, muon=training.muon)
    if training.ddp.name == "megatron_fsdp":
        return _megatron_fsdp_state(sharding.layout, training, sum(parameter.numel for parameter in parameters))
    total = StateBytes(weights=_nbytes(parameter for parameter in parameters if not parameter.trained))
    for buffer, index in chunk_buffers(sharding, training, rank, stage):
        total += _buffer_state(training, buffer, index)
    return total


def _nbytes(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel * parameter.itemsize for parameter in parameters)


def _megatron_fsdp_state(layout: ParallelLayout, training: Training, numel: int) -> StateBytes:
    """Return the bytes of Megatron FSDP, without padding: a few elements per parameter."""
    ddp, b = training.ddp, training.itemsize
    mine = -(-numel // (layout.dp * layout.cp // ddp.optimizer_instances))
    gradient = FP32 if ddp.grad_reduce_in_fp32 else b
    return StateBytes(
        weights=(mine if ddp.fsdp_sharding == "optim_grads_params" else numel) * b,
        gradients=(numel if ddp.fsdp_sharding == "optim" else mine) * gradient,
        optimizer=mine * (2 * FP32 + (0 if b == FP32 else FP32)),
        step=0 if gradient == FP32 else mine * FP32,
    )


def _buffer_state(training: Training, buffer: Buffer, index: int) -> StateBytes:
    """Return a buffer's bytes; the distributed optimizer pads weights and keeps state only for owned elements."""
    optimizer, owned = training.optimizer, buffer.owned(index)
    gradient = FP32 if training.ddp.grad_reduce_in_fp32 else buffer.itemsize
    count = 2 * owned - (buffer.owned(index, buffer.matrices) if training.muon else 0)
    moments = count * (2 if optimizer.precision_aware and optimizer.moment_dtype == "bf16" else FP32)
    # FP32 weights are their own main parameters; a precision-aware optimizer keeps the other 16 bits of bf16 ones.
    main = 0 if buffer.itemsize == FP32 else owned * (2 if optimizer.precision_aware else FP32)
    on_host = round(moments * optimizer.cpu_offload)
    return StateBytes(
        weights=(buffer.numel if optimizer.distributed else buffer.trained) * buffer.itemsize,
        gradients=buffer.numel * gradient,
        optimizer=main + moments - on_host,
        host=on_host,
        # Gradients of main parameters: a view of FP32 gradients, else a copy from `prepare_grads` to the next step.
        step=0 if gradient == FP32 or optimizer.precision_aware else owned * FP32,
    )


def chunk_buffers(sharding: Sharding, training: Training, rank: int, stage: int) -> list[tuple[Buffer, int]]:
    """Return a chunk's buffers, dense ones first, each with this rank's index in its group."""
    layout, ddp, distributed = sharding.layout, training.ddp, training.optimizer.distributed
    parameters = parameters_of(sharding, training, rank, stage)
    # Buckets are cut only where reduction overlaps with the backward: on the first pipeline rank, in its first chunk.
    bucket_size = None
    if ddp.overlap_grad_reduce and stage == 0 and layout.coordinates(rank).pp_rank == 0:
        bucket_size = ddp.bucket_size or max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * layout.dp)
    expert_ranks = layout.ep * layout.etp
    expert_size = layout.stage_size // expert_ranks // ddp.optimizer_instances
    expert_place = expert_size, rank % layout.stage_size // expert_ranks % expert_size
    buffers = []
    for of_expert, (size, index) in ((False, _dense_place(layout, ddp, rank)), (True, expert_place)):
        members = tuple(each for each in parameters if each.trained and each.of_expert == of_expert)
        for buffer in lay_out(members, ranks=size, distributed=distributed, bucket_size=bucket_size):
            buffers.append((buffer, index))
    return buffers


def _dense_place(layout: ParallelLayout, ddp: DataParallelConfig, rank: int) -> tuple[int, int]:
    """Return (size, index) of the data- and context-parallel ranks that share buffers of dense weights."""
    at, size = layout.coordinates(rank), layout.dp * layout.cp // ddp.optimizer_instances
    return size, (at.dp_rank * layout.cp + at.cp_rank) % size


# Modules of a layer in the order of registration (megatron-core 0.16.1: TransformerLayer, SelfAttention,
# MLASelfAttention, MoELayer; DecoderLayer adds the last two).
_IN_LAYER = (
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts",
    "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1", "mlp.linear_fc2", "post_self_attn_layernorm", "post_mlp_layernorm",
)  # fmt: skip
_IN_MODEL = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "mtp.", "output_layer.")
_BUFFERS = ("mlp.router.expert_bias",)  # buffers of modules, not parameters
FP32 = 4


class Parameter(NamedTuple):
    """One parameter as a rank holds it, or FSDP2 cuts it, in rows of equal width."""

    rows: int
    width: int  # elements of a row
    itemsize: int  # bytes of an element
    of_expert: bool = False
    shared_embedding: bool = False  # a tied embedding on two pipeline stages, which has its own bucket
    trained: bool = True
    summed_over_tp: bool = False  # whole on tensor-parallel ranks that see parts of its gradient
    unit: str = ""  # FSDP2's unit: a layer, or the parameter itself
    matrix: bool = False  # Muon keeps one moment of it

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.width

    def padded(self, ranks: int) -> int:
        """Return the elements that every one of FSDP2's ranks has room for."""
        return -(-self.rows // ranks) * self.width

    def held(self, ranks: int, index: int) -> int:
        """Return the elements that belong to one of FSDP2's ranks, as `torch.chunk` cuts."""
        each = -(-self.rows // ranks)
        return max(0, min(self.rows, (index + 1) * each) - index * each) * self.width


@lru_cache(maxsize=256)
def chunk_parameters(
    sharding: Sharding, at: RankCoordinates, vp_stage: int, *, itemsize: int, frozen: tuple[str, ...] = ()
) -> tuple[Parameter, ...]:
    """Return the parameters of one of a rank's chunks, in the order of its modules.

    itemsize: bytes of an element; parameters that are float32 in every model have 4. frozen: `model.frozen`.
    """
    shared = sharding.hf.tied and sharding.head == "lm" and sharding.layout.pp > 1
    cut: dict[int, tuple[int, int]] = {}  # rule -> shape: all its layers and experts are cut alike
    summed: dict[int, bool] = {}
    matrix: dict[int, bool] = {}

    def made(part: Part) -> Parameter:
        rule, key = part.rule, id(part.rule)
        if key not in cut:
            cut[key] = _shape(part, sharding, at)
            summed[key] = _is_summed_over_tp(part, sharding, cut[key])
            matrix[key] = bool(matrix_blocks(part, sharding.hf))
        dtype = FP32 if rule.float32 else itemsize
        trained = not (rule.frozen or any(fnmatchcase(_name(part, sharding), pattern) for pattern in frozen))
        is_shared = shared and rule.param in (EMBEDDING, OUTPUT)
        return Parameter(*cut[key], dtype, rule.per_expert, is_shared, trained, summed[key], matrix=matrix[key])

    def held_experts(layer: int) -> list[Parameter]:
        if not frozen:
            return [made(part) for part in experts.pop(layer)] * len(held)
        parts = experts.pop(layer)
        return [made(part._replace(expert=expert)) for expert in held for part in parts]

    common = sorted(_parameters(stage_parts(sharding, at.pp_rank, vp_stage)), key=_place)
    one = _parameters(stage_experts(sharding, at.pp_rank, vp_stage, range(1)))  # all experts of a layer are alike
    experts = {layer: sorted(parts, key=_place) for layer, parts in groupby(one, key=lambda part: part.layer)}
    held = experts_of(sharding.hf, sharding.layout, at.ep_rank)
    parameters: list[Parameter] = []
    for part in common:
        if part.layer in experts and _place(part) > _place(experts[part.layer][0]):
            parameters += held_experts(part.layer)
        parameters.append(made(part))
    for layer in list(experts):
        parameters += held_experts(layer)
    return tuple(parameters)


def _parameters(parts: Iterable[Part]) -> Iterator[Part]:
    return (part for part in parts if not part.rule.param.endswith(_BUFFERS))


def _is_summed_over_tp(part: Part, sharding: Sharding, shape: tuple[int, int]) -> bool:
    """Return whether Megatron-Core adds up a parameter's gradient over tensor parallelism.

    With sequence parallelism each rank sees its tokens, so all parameters that are not cut are summed. Without it each
    rank sees its heads, so norms over single heads are.
    """
    layout = sharding.layout
    if layout.tp == 1 or part.rule.per_expert or not part.rule.sources:
        return False
    if layout.sequence_parallel:
        return _shape(part, sharding, RankCoordinates(), parts=1) == shape
    return sharding.hf.qk_norm and part.rule.param.endswith(("q_layernorm.weight", "k_layernorm.weight"))


def _shape(part: Part, sharding: Sharding, at: RankCoordinates, *, parts: int | None = None) -> tuple[int, int]:
    """Return rows and their width of a parameter on this rank."""
    rule, layout = part.rule, sharding.layout
    if not rule.sources:  # a tied output layer: the embedding once more
        embedding = next(one.rule for one in stage_parts(sharding, 0, 0) if one.rule.param == EMBEDDING)
        part = Part(embedding, part.layer, part.expert)
    size, index = (layout.etp, at.etp_rank) if rule.per_expert else (layout.tp, at.tp_rank)
    param = global_param(part.rule, sharding.hf, padded_vocab=sharding.vocab, layer=part.layer, expert=part.expert)
    rows, *others = shard(param, parts or size, index)[0]
    return rows, prod(others)


def _place(part: Part) -> tuple[int, int, int, int, int]:
    """Return a parameter's sort key: part of the model, layer, module, expert, bias after weight."""
    name = part.rule.param
    where = next(i for i, prefix in enumerate(_IN_MODEL) if name.startswith(prefix))
    inside = next((i for i, module in enumerate(_IN_LAYER) if f".{module}" in name), -1)
    second = 2 * ("linear_fc2" in name and part.rule.per_expert) + name.endswith("bias")
    return where, part.layer, inside, part.expert, second


def _name(part: Part, sharding: Sharding) -> str:
    """Return the parameter's name in the whole model, as `model.frozen` has it."""
    if not part.rule.sources:
        return EMBEDDING
    return param_name(part.rule, sharding.hf, layer=part.layer, expert=part.expert, spec=sharding.spec)


@lru_cache(maxsize=64)
def transformers_parameters(hf: HFConfig, head: Head, frozen: tuple[str, ...] = ()) -> tuple[Parameter, ...]:
    """Return transformers' FP32 parameters: tensors as on disk, but a layer's experts in one."""
    whole = Sharding(hf, ParallelLayout(), spec="hf", head=head)
    parameters: dict[str, Parameter] = {}
    for part in _parameters([*stage_parts(whole, 0, 0), *stage_experts(whole, 0, 0, range(1))]):
        for name, shape in _tensors(part, hf):
            trained = not (part.rule.frozen or any(fnmatchcase(name, pattern) for pattern in frozen))
            unit = f"layer {part.layer}" if part.rule.scope == "layer" else name
            rows, width, matrix = (shape or (1,))[0], prod(shape[1:]), bool(matrix_blocks(part, hf))
            parameters.setdefault(name, Parameter(rows, width, FP32, trained=trained, unit=unit, matrix=matrix))
    return tuple(parameters.values())


def _tensors(part: Part, hf: HFConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the tensors behind a parameter, as transformers' modules hold them."""
    rule = part.rule
    if rule.per_expert and not rule.sources[0].stacked:
        # One tensor whose first dimension counts experts; it holds gate and up.
        assert hf.moe is not None
        name = "down_proj" if "linear_fc2" in rule.param else "gate_up_proj"
        size = sum(prod(source_shape(source, hf)) for source in rule.sources)
        yield f"model.layers.{part.layer}.mlp.experts.{name}", (hf.moe.num_experts, size)
        return
    for source in rule.sources:
        yield source.name.format(layer=part.layer, expert=part.expert), source_shape(source, hf)


@lru_cache(maxsize=64)
def weight_bytes(hf: HFConfig, itemsize: int) -> int:
    """Return the bytes of the whole language model."""
    return itemsize * sum(parameter.numel for parameter in transformers_parameters(hf, "lm"))
