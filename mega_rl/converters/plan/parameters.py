"""Parameters of a model in order and by stage, and their tensors on disk.

Derived from the family's rules and the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from mega_rl.config.schema import AdapterConfig
from mega_rl.converters.architecture import Adapter, DiskTensor, HFConfig, OwnTable, is_delta_net, is_moe
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.rules import LAYER_KINDS, Rule, Source
from mega_rl.converters.plan.adapters import PART, WEIGHT, A, B, read_adapter_config, uncut, with_adapters
from mega_rl.converters.plan.blocks import Copy, source_shape
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


# Names of a critic's or reward model's head on disk, most usual first; a row of the vocabulary's head is the last.
VALUE_HEADS = (
    "score.weight",
    "v_head.weight",
    "v_head.summary.weight",
    "value_head.weight",
    "reward_head.weight",
    "lm_head.weight",
)
# transformers (5.x) holds all experts of a layer in two tensors and calls every mixture `mlp`.
FUSED_GATE_UP, FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class Part(NamedTuple):
    """A parameter: its rule, layer and expert, counted over the whole model."""

    rule: Rule
    layer: int = 0
    expert: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Return (parameter, layer, expert), unique in the model."""
        return self.rule.param, self.layer, self.expert


class HFTensor(NamedTuple):
    """Requirements of the model on a tensor on disk."""

    shape: tuple[int, ...]
    optional: bool
    float32: bool  # stays float32 whatever the other weights are


def as_on_disk(hf: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> HFConfig:
    """Return the config with the spellings of the tensors: fused experts, the value head."""
    moe_layer = hf.moe.layers.index(True) if hf.moe is not None and any(hf.moe.layers) else None
    if moe_layer is not None:
        fused = {
            source.name.format(layer=moe_layer)
            for rule in FAMILIES[hf.family].rules
            for source in rule.sources
            if rule.per_expert and source.stacked
        }
        hf = replace(hf, fused_experts=any(name in shapes for name in fused))
    heads = [name for name in VALUE_HEADS if name in shapes and shapes[name] == (1, hf.hidden_size)]
    return replace(hf, value_head=heads[0]) if heads else hf


def hf_tensors(hf: HFConfig, *, head: Head) -> dict[str, HFTensor]:
    """Return every tensor of the model by its name on disk, in the model's order."""
    return {
        source.name.format(layer=part.layer, expert=part.expert): HFTensor(
            source_shape(source, hf), part.rule.optional, part.rule.float32
        )
        for part in in_model_order(hf, head)
        for source in part.rule.sources
    }


def num_elements(hf: HFConfig, head: Head = "lm") -> int:
    """Return the number of elements of all weights."""
    return sum(prod(tensor.shape) for tensor in hf_tensors(hf, head=head).values())


def ignored_tensors(hf: HFConfig, *, head: Head) -> frozenset[str]:
    """Return names that a checkpoint may hold and that the model does not need.

    They are buffers of old versions, the head that is not used, multi-token prediction layers that are not loaded, and
    the copies of embedding and head that some checkpoints repeat in such layers.
    """
    if hf.own is not None:
        return frozenset(hf.own.tied) | {name for name, _ in _own_heads(hf) if head == "value"}
    family = FAMILIES[hf.family]
    names = {name.format(layer=layer) for name in family.ignored for layer in range(hf.num_layers)}
    if head == "value" or hf.tied:
        names |= {"lm_head.weight"}
    if hf.mtp_layers:
        layers = range(hf.num_layers, hf.num_layers + hf.mtp_layers)
        names |= {name.format(layer=layer) for name in (*family.ignored, *family.mtp_ignored) for layer in layers}
        if hf.mtp == "drop":
            names |= set(mtp_tensors(hf))
    return frozenset(names)


def mtp_tensors(hf: HFConfig) -> dict[str, HFTensor]:
    """Return only the tensors of the multi-token prediction layers."""
    loaded = hf_tensors(replace(hf, mtp="load"), head="lm")
    rest = hf_tensors(replace(hf, mtp="drop"), head="lm")
    return {name: tensor for name, tensor in loaded.items() if name not in rest}


def kept_tensors(hf: HFConfig, head: Head, names: Collection[str]) -> dict[str, bool]:
    """Return which of `names` are left-out prediction layers, each with whether it is float32.

    An export takes them over from the model's source.
    """
    if hf.mtp == "load" or not hf.mtp_layers or head != "lm":
        return {}
    known = mtp_tensors(hf)
    layers = ignored_tensors(hf, head="lm") - ignored_tensors(replace(hf, mtp_layers=0), head="lm")
    return {name: name in known and known[name].float32 for name in sorted(layers.intersection(names))}


def outside(hf: HFConfig, names: Iterable[str], others: Iterable[str]) -> frozenset[str]:
    """Return a checkpoint's tensors outside the language model; an export keeps their bytes.

    Those that transformers' class says it ignores and, in a model of images and text, `others`, whose names do not
    begin as the language model's.
    """
    unread = FAMILIES[hf.family].unread if hf.own is None else hf.own.unread
    ignored = (name for name in names if any(re.search(pattern, name) for pattern in unread))
    return frozenset(ignored).union(others if hf.wrapper is not None else ())


def _own_heads(hf: HFConfig) -> Iterator[tuple[str, DiskTensor]]:
    """Yield (name on disk, tensor) of the output head of a model without a table."""
    assert hf.own is not None
    for name, disk in hf.own.tensors:
        if not name.startswith(f"{hf.own.body}."):
            yield from ((tensor.name, tensor) for tensor in disk)


def _own_rules(hf: HFConfig, head: Head) -> list[Rule]:
    """Return a rule per tensor on disk of a model without a table."""
    assert hf.own is not None
    heads = dict(_own_heads(hf)) if head == "value" else {}
    rules = [
        Rule(disk.name, "copy", (Source(disk.name, tuple(map(str, disk.shape))),), float32=name in hf.own.float32)
        for name, tensors in hf.own.tensors
        for disk in tensors
        if disk.name not in heads
    ]
    return [*rules, _value_head(hf)] if head == "value" else rules


def _value_head(hf: HFConfig) -> Rule:
    return Rule(OUTPUT, "copy", (Source(hf.value_head, ("one", "hidden")),), optional=True, float32=True)


def rules_of(hf: HFConfig, head: Head) -> list[Rule]:
    """Return the rules in force, with the model's output head; a tied one has no tensor."""
    if hf.own is not None:
        return with_adapters(_own_rules(hf, head), hf.adapter)
    rules = []
    for rule in FAMILIES[hf.family].rules:
        if not hf.switches.issuperset(set(rule.when) - LAYER_KINDS):
            continue
        if rule.param == OUTPUT:
            if head == "value":
                rule = _value_head(hf)
            elif hf.tied:
                rule = replace(rule, sources=())
        rules.append(rule)
    return with_adapters(rules, hf.adapter)


def adapted(hf: HFConfig, settings: AdapterConfig, head: Head) -> HFConfig:
    """Return a model with the adapters of `model.adapter`; rank 0: as it is.

    Raises UserErrors: `path`, which is a policy's, holds another adapter than the settings describe.
    """
    if not settings.rank:
        return hf
    path = settings.path if head == "lm" else ""
    if path:
        stored = asdict(read_adapter_config(Path(settings.path)))
        given = asdict(settings) | {"path": "", "targets": sorted(set(settings.targets))}
        different = [name for name in stored if stored[name] != given[name]]
        if different:
            problem = "model.adapter.{}={}: the adapter in {} has {}; set that"
            raise UserErrors([problem.format(n, given[n], settings.path, stored[n]) for n in different])
    rank, alpha, targets = settings.rank, settings.alpha, tuple(settings.targets)
    return replace(hf, adapter=Adapter(rank, alpha, targets, settings.rs, path))


def adapter_problems(hf: HFConfig, layout: ParallelLayout) -> list[str]:
    """Return why the adapters of a model cannot be made, or cut this way."""
    try:
        return [] if hf.adapter is None else list(dict.fromkeys(uncut(rules_of(hf, "lm"), hf, layout)))
    except UserError as error:
        return [str(error)]


def _layer_parts(rules: Iterable[Rule], hf: HFConfig, layer: int, *, experts: Iterable[int] | None) -> Iterator[Part]:
    """Yield the parameters of one layer: the common ones (`experts` None), or these experts'."""
    others = {"dense" if is_moe(hf, layer) else "moe", "attention" if is_delta_net(hf, layer) else "delta"}
    held = [rule for rule in rules if rule.per_expert == (experts is not None) and others.isdisjoint(rule.when)]
    if experts is None:
        yield from (Part(rule, layer) for rule in held)
    else:
        yield from (Part(rule, layer, expert) for expert in experts for rule in held)


def in_model_order(hf: HFConfig, head: Head) -> Iterator[Part]:
    """Yield all parameters: before the layers, layer by layer, after the layers, multi-token prediction layers last."""
    rules = rules_of(hf, head)
    first = next((i for i, rule in enumerate(rules) if rule.scope != "model"), len(rules))
    everyone = range(hf.moe.num_experts) if hf.moe is not None else range(0)
    decoder, ahead = ([rule for rule in rules if rule.scope == scope] for scope in ("layer", "mtp"))
    layers = [(decoder, layer) for layer in range(hf.num_layers)]
    mtp_layers = [(ahead, hf.num_layers + i) for i in range(hf.mtp_layers)] if ahead else []
    yield from (Part(rule) for rule in rules[:first])
    for inside, layer in layers:
        yield from _layer_parts(inside, hf, layer, experts=None)
        yield from _layer_parts(inside, hf, layer, experts=everyone)
    yield from (Part(rule) for rule in rules[first:] if rule.scope == "model")
    for inside, layer in mtp_layers:
        yield from _layer_parts(inside, hf, layer, experts=None)
        yield from _layer_parts(inside, hf, layer, experts=everyone)


def _stage_layers(sharding: Sharding, pp_rank: int, vp_stage: int) -> Iterator[tuple[list[Rule], int]]:
    """Yield (rules, layer) of every layer of one stage; multi-token prediction layers are on the last."""
    hf = sharding.hf
    rules = rules_of(hf, sharding.head)
    inside = [rule for rule in rules if rule.scope == "layer"]
    yield from ((inside, layer) for layer in sharding.layout.layers_of(pp_rank, hf.num_layers, vp_stage))
    ahead = [rule for rule in rules if rule.scope == "mtp"]
    if ahead and _is_last(sharding.layout, pp_rank, vp_stage):
        yield from ((ahead, layer) for layer in range(hf.num_layers, hf.num_layers + hf.mtp_layers))


def stage_parts(sharding: Sharding, pp_rank: int, vp_stage: int) -> Iterator[Part]:
    """Yield every parameter that one stage holds, except experts."""
    first, last = (pp_rank, vp_stage) == (0, 0), _is_last(sharding.layout, pp_rank, vp_stage)
    mtp = "mtp" in sharding.hf.switches
    for rule in rules_of(sharding.hf, sharding.head):
        if rule.scope != "model":
            continue
        if rule.param.startswith("embedding."):
            # Multi-token prediction embeds tokens too, with a copy of the embedding on stages without it.
            if first or (last and mtp):
                yield Part(rule)
        elif last and (rule.sources or not (first or mtp)):
            # Megatron-Core gives a tied model a separate output layer only on stages without the embedding.
            yield Part(rule)
    for rules, layer in _stage_layers(sharding, pp_rank, vp_stage):
        yield from _layer_parts(rules, sharding.hf, layer, experts=None)


def stage_experts(sharding: Sharding, pp_rank: int, vp_stage: int, held: range) -> Iterator[Part]:
    """Yield the parameters of these experts in every layer of one stage."""
    for rules, layer in _stage_layers(sharding, pp_rank, vp_stage):
        yield from _layer_parts(rules, sharding.hf, layer, experts=held)


def _is_last(layout: ParallelLayout, pp_rank: int, vp_stage: int) -> bool:
    return (pp_rank, vp_stage) == (layout.pp - 1, layout.vpp - 1)


def disk_tensors(
    model_type: str, name: str, shape: tuple[int, ...], own: OwnTable | None = None
) -> Iterator[DiskTensor]:
    """Yield the tensors on disk that make tensor `name` of a transformers model.

    own: table of a model that no family describes.
    """
    layer, is_adapter, part = name.partition(PART)
    if is_adapter:
        (weight,) = disk_tensors(model_type, f"{layer}.weight", shape, own)
        yield DiskTensor(weight.name.removesuffix(WEIGHT) + (A if part == "a" else B), shape, 0)
        return
    if own is not None:
        yield from own.on_disk.get(name, (DiskTensor(name, shape, 0),))  # a head of our own
        return
    if FAMILIES[model_type].fused_experts:
        yield DiskTensor(name, shape, 0)
        return
    names = FAMILIES[model_type].expert_names
    prefix = name.rpartition(".")[0].replace(".mlp.", f".{names.block}.")
    if name.endswith(FUSED_GATE_UP):
        experts, width, hidden = shape[0], shape[1] // 2, shape[2]  # the gate's rows, then the up projection's
        for expert in range(experts):
            row = 2 * expert * width
            yield DiskTensor(f"{prefix}.{expert}.{names.gate}.weight", (width, hidden), row)
            yield DiskTensor(f"{prefix}.{expert}.{names.up}.weight", (width, hidden), row + width)
    elif name.endswith(FUSED_DOWN):
        experts, hidden, width = shape
        for expert in range(experts):
            yield DiskTensor(f"{prefix}.{expert}.{names.down}.weight", (hidden, width), expert * hidden)
    else:
        yield DiskTensor(names.on_disk(name), shape, 0)


def row_copies(disk: Iterable[DiskTensor], offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
    """Yield the copies that make rows of a tensor, `shape` from `offset` on, from the tensors on disk that make it.

    The rows are cut from the first dimension only.
    """
    low = offset[0] * prod(shape[1:-1]) if offset else 0
    high = low + matrix_shape(shape)[0]
    for tensor in disk:
        first, end = max(tensor.row, low), min(tensor.row + tensor.rows, high)
        if first < end:
            columns = matrix_shape(tensor.shape)[1]
            yield Copy(tensor.name, first - tensor.row, 0, first - low, 0, end - first, columns)
