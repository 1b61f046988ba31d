"""Parameters of one model chunk in the order in which its modules register them, which is that of DDP's buffers.

Sizes come from the families' tables, as loading does; the order within a layer is that of Megatron-Core's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from mega_rl.converters.families.rules import Rule
from mega_rl.converters.plan.blocks import global_param, param_name, shard
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, stage_experts, stage_parts
from mega_rl.converters.plan.ranks import experts_of
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import RankCoordinates

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
_BUFFERS = ("mlp.router.expert_bias",)  # state of a module that is no parameter
FP32 = 4


class Parameter(NamedTuple):
    """One parameter of a chunk as this rank holds it."""

    rows: int  # first dimension, which FSDP2 cuts
    width: int  # elements of a row
    itemsize: int  # bytes of an element
    of_expert: bool = False
    shared_embedding: bool = False  # a tied embedding on two pipeline stages, which has a bucket to itself
    trained: bool = True
    summed_over_tp: bool = False  # whole on tensor-parallel ranks that see parts of its gradient

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.width


@lru_cache(maxsize=256)
def chunk_parameters(
    sharding: Sharding, at: RankCoordinates, vp_stage: int, *, itemsize: int, frozen: tuple[str, ...] = ()
) -> tuple[Parameter, ...]:
    """Return the parameters of one of a rank's chunks, in the order of its modules.

    itemsize: bytes of an element; parameters that are float32 in every model have 4. frozen: `model.frozen`.
    """
    make = _Maker(sharding, at, itemsize, frozen)
    common = sorted(_parameters_alone(stage_parts(sharding, at.pp_rank, vp_stage)), key=_place)
    # All experts of a layer are alike, so the table is read for one of them.
    one = list(_parameters_alone(stage_experts(sharding, at.pp_rank, vp_stage, range(1))))
    experts = {layer: sorted(parts, key=_place) for layer, parts in groupby(one, key=lambda part: part.layer)}
    held = experts_of(sharding.hf, sharding.layout, at.ep_rank)
    parameters: list[Parameter] = []
    for part in common:
        if part.layer in experts and _place(part) > _place(experts[part.layer][0]):
            parameters += make.experts(experts.pop(part.layer), held)
        parameters.append(make(part))
    for layer in list(experts):
        parameters += make.experts(experts.pop(layer), held)
    return tuple(parameters)


class _Maker:
    """Makes the parameters of one rank from parts of the tables; a rule cuts all layers and experts alike."""

    def __init__(self, sharding: Sharding, at: RankCoordinates, itemsize: int, frozen: tuple[str, ...]) -> None:
        self._sharding, self._at, self._itemsize, self._frozen = sharding, at, itemsize, frozen
        self._shapes: dict[int, tuple[int, int]] = {}
        self._summed: dict[int, bool] = {}
        self._shared = sharding.hf.tied and sharding.head == "lm" and sharding.layout.pp > 1

    def __call__(self, part: Part) -> Parameter:
        """Return the parameter of a part."""
        rule = part.rule
        if id(rule) not in self._shapes:
            self._shapes[id(rule)] = _shape(part, self._sharding, self._at)
            self._summed[id(rule)] = self._is_summed_over_tp(part)
        return Parameter(
            *self._shapes[id(rule)],
            FP32 if rule.float32 else self._itemsize,
            rule.per_expert,
            self._shared and rule.param in (EMBEDDING, OUTPUT),
            not self._frozen or not _matches(_name(part, self._sharding), self._frozen),
            self._summed[id(rule)],
        )

    def _is_summed_over_tp(self, part: Part) -> bool:
        """Return whether Megatron-Core adds up a parameter's gradient over tensor parallelism.

        Under sequence parallelism that of all that is not cut, since each rank sees its tokens; without it that of
        norms over single heads, since each rank sees its heads.
        """
        layout = self._sharding.layout
        if layout.tp == 1 or part.rule.per_expert or not part.rule.sources:
            return False
        if layout.sequence_parallel:
            return _shape(part, self._sharding, RankCoordinates(), parts=1) == self._shapes[id(part.rule)]
        return self._sharding.hf.qk_norm and part.rule.param.endswith(("q_layernorm.weight", "k_layernorm.weight"))

    def experts(self, parts: Sequence[Part], held: range) -> list[Parameter]:
        """Return the parameters of all held experts of a layer from those of one."""
        if not self._frozen:
            return [self(part) for part in parts] * len(held)
        return [self(part._replace(expert=expert)) for expert in held for part in parts]


def _parameters_alone(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts that are parameters and no state of a module."""
    return (part for part in parts if not part.rule.param.endswith(_BUFFERS))


def _shape(part: Part, sharding: Sharding, at: RankCoordinates, *, parts: int | None = None) -> tuple[int, int]:
    """Return rows and their width of a parameter on this rank; all layers and experts of a rule are cut alike.

    parts: tensor-parallel ranks; None: those of the layout.
    """
    rule, layout = part.rule, sharding.layout
    if not rule.sources:  # a tied output layer: the embedding once more
        embedding = next(r for r in _rules(sharding) if r.param == EMBEDDING)
        part = Part(embedding, part.layer, part.expert)
    size, index = (layout.etp, at.etp_rank) if rule.per_expert else (layout.tp, at.tp_rank)
    param = global_param(part.rule, sharding.hf, padded_vocab=sharding.vocab, layer=part.layer, expert=part.expert)
    rows, *others = shard(param, parts or size, index)[0]
    return rows, prod(others)


def _rules(sharding: Sharding) -> Iterable[Rule]:
    return (part.rule for part in stage_parts(sharding, 0, 0))


def _place(part: Part) -> tuple[int, int, int, int, int]:
    """Return the sort key of a parameter: part of the model, layer, module, expert, bias behind weight."""
    name = part.rule.param
    where = next(i for i, prefix in enumerate(_IN_MODEL) if name.startswith(prefix))
    inside = next((i for i, module in enumerate(_IN_LAYER) if f".{module}" in name), -1)
    second = 2 * ("linear_fc2" in name and part.rule.per_expert) + name.endswith("bias")
    return where, part.layer, inside, part.expert, second


def _name(part: Part, sharding: Sharding) -> str:
    """Return the parameter's name over the whole model, as `model.frozen` has it."""
    if not part.rule.sources:
        return EMBEDDING
    return param_name(part.rule, sharding.hf, layer=part.layer, expert=part.expert, spec=sharding.spec)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
