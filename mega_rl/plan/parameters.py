"""Parameters of one model chunk in the order in which its modules register them, which is that of DDP's buffers.

Sizes come from the families' tables, as loading does; the order within a layer is that of Megatron-Core's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
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


class Parameter(NamedTuple):
    """One parameter of a chunk as this rank holds it."""

    rows: int  # first dimension, which FSDP2 cuts
    width: int  # elements of a row
    itemsize: int  # bytes of an element
    of_expert: bool = False
    shared_embedding: bool = False  # a tied embedding on two pipeline stages, which has a bucket to itself
    trained: bool = True

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.width


def chunk_parameters(
    sharding: Sharding, at: RankCoordinates, vp_stage: int, *, itemsize: int, frozen: Sequence[str] = ()
) -> list[Parameter]:
    """Return the parameters of one of a rank's chunks, in the order of its modules.

    itemsize: bytes of an element; parameters that are float32 in every model have 4. frozen: `model.frozen`.
    """
    layout, hf = sharding.layout, sharding.hf
    held = experts_of(hf, layout, at.ep_rank)
    parts = [*stage_parts(sharding, at.pp_rank, vp_stage), *stage_experts(sharding, at.pp_rank, vp_stage, held)]
    shapes: dict[int, tuple[int, int]] = {}
    shared = hf.tied and sharding.head == "lm" and layout.pp > 1
    parameters = []
    for part in sorted((part for part in parts if not _is_buffer(part.rule)), key=_place):
        rule = part.rule
        if id(rule) not in shapes:
            shapes[id(rule)] = _shape(part, sharding, at)
        parameters.append(
            Parameter(
                *shapes[id(rule)],
                4 if rule.float32 else itemsize,
                rule.per_expert,
                shared and rule.param in (EMBEDDING, OUTPUT),
                not frozen or not _matches(_name(part, sharding), frozen),
            )
        )
    return parameters


def _shape(part: Part, sharding: Sharding, at: RankCoordinates) -> tuple[int, int]:
    """Return rows and their width of a parameter on this rank; all layers and experts of a rule are cut alike."""
    rule, layout = part.rule, sharding.layout
    if not rule.sources:  # a tied output layer: the embedding once more
        embedding = next(r for r in _rules(sharding) if r.param == EMBEDDING)
        part = Part(embedding, part.layer, part.expert)
    parts, index = (layout.etp, at.etp_rank) if rule.per_expert else (layout.tp, at.tp_rank)
    param = global_param(part.rule, sharding.hf, padded_vocab=sharding.vocab, layer=part.layer, expert=part.expert)
    rows, *others = shard(param, parts, index)[0]
    return rows, prod(others)


def _rules(sharding: Sharding) -> Iterable[Rule]:
    return (part.rule for part in stage_parts(sharding, 0, 0))


def _is_buffer(rule: Rule) -> bool:
    return rule.param.endswith(_BUFFERS)


def _place(part: Part) -> tuple[int, int, int, int, bool]:
    """Return the sort key of a parameter: part of the model, layer, module, expert, bias behind weight."""
    name = part.rule.param
    where = next(i for i, prefix in enumerate(_IN_MODEL) if name.startswith(prefix))
    inside = next((i for i, module in enumerate(_IN_LAYER) if f".{module}" in name), -1)
    second = 2 * ("linear_fc2" in name and part.rule.per_expert) + name.endswith("bias")
    return where, part.layer, inside, part.expert, second  # type: ignore[return-value]


def _name(part: Part, sharding: Sharding) -> str:
    """Return the parameter's name over the whole model, as `model.frozen` has it."""
    if not part.rule.sources:
        return EMBEDDING
    return param_name(part.rule, sharding.hf, layer=part.layer, expert=part.expert, spec=sharding.spec)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
