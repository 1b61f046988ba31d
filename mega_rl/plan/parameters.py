"""Parameters of a model on a rank, in the order of DDP's buffers or as FSDP2 cuts them.

Sizes come from the families' tables, as loading does; the order within a layer is that of Megatron-Core's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import global_param, param_name, shard, source_shape
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, stage_experts, stage_parts
from mega_rl.converters.plan.ranks import experts_of
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

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
    """One parameter as a rank holds it, or as FSDP2 cuts it: into rows of equal width."""

    rows: int
    width: int  # elements of a row
    itemsize: int  # bytes of an element
    of_expert: bool = False
    shared_embedding: bool = False  # a tied embedding on two pipeline stages, which has its own bucket
    trained: bool = True
    summed_over_tp: bool = False  # whole on tensor-parallel ranks that see parts of its gradient
    unit: str = ""  # FSDP2's unit: a layer, or the parameter itself

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

    def made(part: Part) -> Parameter:
        rule, key = part.rule, id(part.rule)
        if key not in cut:
            cut[key] = _shape(part, sharding, at)
            summed[key] = _is_summed_over_tp(part, sharding, cut[key])
        dtype = FP32 if rule.float32 else itemsize
        trained = not any(fnmatchcase(_name(part, sharding), pattern) for pattern in frozen)
        is_shared = shared and rule.param in (EMBEDDING, OUTPUT)
        return Parameter(*cut[key], dtype, rule.per_expert, is_shared, trained, summed[key])

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
    """Return the sort key of a parameter: part of the model, layer, module, expert, bias after weight."""
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
    """Return the FP32 parameters of transformers' model: tensors as on disk, but all experts of a layer in one."""
    whole = Sharding(hf, ParallelLayout(), spec="hf", head=head)
    parameters: dict[str, Parameter] = {}
    for part in _parameters([*stage_parts(whole, 0, 0), *stage_experts(whole, 0, 0, range(1))]):
        for name, shape in _tensors(part, hf):
            trained = not any(fnmatchcase(name, pattern) for pattern in frozen)
            unit = f"layer {part.layer}" if part.rule.scope == "layer" else name
            parameters.setdefault(name, Parameter(shape[0], prod(shape[1:]), FP32, trained=trained, unit=unit))
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
