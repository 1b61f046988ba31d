"""Index maps between Hugging Face tensors and the parameters of every rank, and the proof that they are complete.

Every tensor is seen as a matrix (a vector is one column wide). A family's rule gives a parameter of the whole model as
a list of affine blocks, each a run of consecutive rows of one Hugging Face tensor, and says how tensor parallelism cuts
it. A rank's shard is the intersection of the two: a list of `Copy`, rectangle to rectangle. Read forwards the copies
load a model, read backwards they export it. All of it is interval arithmetic on a few numbers per tensor; nothing here
touches an element, and nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Literal, NamedTuple

from mega_rl.converters.blocks import Copy, GlobalParam, global_param, shard, source_shape
from mega_rl.converters.families import FAMILIES, VALUE_HEAD, Rule
from mega_rl.converters.hf_config import HFConfig
from mega_rl.converters.names import Spec, dialect_name, with_layer
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class ParamPlan:
    """How one rank fills one parameter."""

    name: str  # in the live model chunk: dialect of its spec, layers numbered within the chunk
    canonical: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    replicated: bool  # every tensor-parallel rank holds the same
    replica: bool
    optional: bool


class Piece(NamedTuple):
    """A rectangle of one rank's parameter on its way back into a Hugging Face tensor."""

    tp_rank: int
    copy: Copy  # src is the Hugging Face side, dst the parameter's, as when loading


@dataclass(frozen=True)
class ExportParam:
    """A parameter to export: who holds it, its shard's shape, and the Hugging Face tensors that come out of it."""

    name: str  # in the live chunk of its stage, under a local spec
    pp_rank: int
    vp_stage: int
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...], tuple[Piece, ...]], ...]  # (Hugging Face name, full shape, pieces)

    @property
    def numel(self) -> int:
        """Elements of one rank's shard."""
        return prod(self.shape)


def padded_vocab_size(vocab: int, tp: int) -> int:
    """The smallest multiple of `tp` that holds `vocab` rows."""
    return -(-vocab // tp) * tp


def check_layout(hf: HFConfig, layout: ParallelLayout, *, padded_vocab: int | None = None) -> list[str]:
    """The reasons, one line each, why a model cannot be cut this way; empty when it can."""
    tp, stages = layout.tp, layout.pp * layout.vpp
    vocab = padded_vocab_size(hf.vocab_size, tp) if padded_vocab is None else padded_vocab
    problems = []
    sizes = {
        "num_attention_heads": hf.num_heads,
        "intermediate_size": hf.ffn_hidden_size,
        "padded vocabulary": vocab,
    }
    problems += [f"tp={tp} does not divide {name}={size}" for name, size in sizes.items() if size % tp]
    if hf.num_kv_heads % tp and tp % hf.num_kv_heads:
        problems.append(f"tp={tp} must divide num_key_value_heads={hf.num_kv_heads} or be a multiple of it")
    qkv_rows = hf.dims["q"] + 2 * hf.dims["kv"]
    if qkv_rows % tp:
        problems.append(f"tp={tp} does not divide the {qkv_rows} rows of q, k and v")
    if hf.num_layers % stages:
        problems.append(f"pp*vpp={layout.pp}*{layout.vpp}={stages} does not divide num_hidden_layers={hf.num_layers}")
    if vocab < hf.vocab_size:
        problems.append(f"padded vocabulary {vocab} is smaller than vocab_size={hf.vocab_size}")
    return problems


def hf_tensors(hf: HFConfig, *, head: Head) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Every tensor the model is made of: name on disk -> (shape, optional), in the order in which they are exported."""
    return {
        source.name.format(layer=layer): (source_shape(source, hf), rule.optional)
        for rule, layer in _in_model_order(hf, head)
        if not _tied_output(rule, hf, head)
        for source in rule.sources
    }


def ignored_tensors(hf: HFConfig, *, head: Head) -> frozenset[str]:
    """Names that a checkpoint may hold and that are left aside: buffers of old versions, the head that is not used."""
    names = {name.format(layer=layer) for name in FAMILIES[hf.family].ignored for layer in range(hf.num_layers)}
    if head == "value" or hf.tied:
        names |= {"lm_head.weight"}
    return frozenset(names)


def build_plan(
    hf: HFConfig,
    layout: ParallelLayout,
    *,
    tp_rank: int,
    pp_rank: int,
    vp_stage: int = 0,
    spec: Spec = "local",
    head: Head = "lm",
    padded_vocab: int | None = None,
) -> tuple[ParamPlan, ...]:
    """How one rank fills each parameter of one of its model chunks.

    Raises UserErrors when the model cannot be cut this way.
    """
    problems = check_layout(hf, layout, padded_vocab=padded_vocab)
    if problems:
        raise UserErrors(problems)
    vocab = padded_vocab_size(hf.vocab_size, layout.tp) if padded_vocab is None else padded_vocab
    plans = []
    for local_name, param in _stage_params(hf, layout, pp_rank, vp_stage, head, vocab):
        shape, copies = shard(param, layout.tp, tp_rank)
        plans.append(
            ParamPlan(
                name=dialect_name(local_name, spec=spec),
                canonical=param.name,
                shape=shape,
                copies=copies,
                replicated=param.cut == "none",
                replica=param.replica,
                optional=param.optional,
            )
        )
    return tuple(plans)


@lru_cache(maxsize=8)
def export_plan(
    hf: HFConfig, layout: ParallelLayout, *, head: Head = "lm", padded_vocab: int | None = None
) -> tuple[ExportParam, ...]:
    """The inverse over all ranks of a replica: every parameter once, in the order of the Hugging Face model.

    The order depends on the model alone, so every rank, and every layout, exports the same sequence. Cached, because a
    run asks for it at each weight sync.
    """
    shapes = hf_tensors(hf, head=head)
    position = {rule.param.format(layer=layer): i for i, (rule, layer) in enumerate(_in_model_order(hf, head))}
    params = []
    for pp_rank, vp_stage in stages(layout):
        plan_of = partial(
            build_plan, hf, layout, pp_rank=pp_rank, vp_stage=vp_stage, head=head, padded_vocab=padded_vocab
        )
        by_rank = [plan_of(tp_rank=rank) for rank in range(layout.tp)]
        for ranks in zip(*by_rank, strict=True):
            if ranks[0].replica:
                continue
            pieces: dict[str, list[Piece]] = {}
            for tp_rank, param in enumerate(ranks[:1] if ranks[0].replicated else ranks):
                for copy in param.copies:
                    if copy.hf_name is not None:
                        pieces.setdefault(copy.hf_name, []).append(Piece(tp_rank, copy))
            tensors = tuple((name, shapes[name][0], tuple(found)) for name, found in pieces.items())
            exported = ExportParam(ranks[0].name, pp_rank, vp_stage, ranks[0].shape, tensors)
            params.append((position[ranks[0].canonical], exported))
    params.sort(key=lambda item: item[0])
    return tuple(param for _, param in params)


def stages(layout: ParallelLayout) -> Iterator[tuple[int, int]]:
    """(pp_rank, vp_stage) of every stage in the order of the layers."""
    return ((pp_rank, vp_stage) for vp_stage in range(layout.vpp) for pp_rank in range(layout.pp))


def _rules(hf: HFConfig, head: Head) -> list[Rule]:
    """The rules in force, with the output head that the model has."""
    rules = []
    for rule in FAMILIES[hf.family].rules:
        if rule.when and not hf.switches[rule.when]:
            continue
        rules.append(VALUE_HEAD if head == "value" and rule.param == VALUE_HEAD.param else rule)
    return rules


def _tied_output(rule: Rule, hf: HFConfig, head: Head) -> bool:
    """Whether the rule's parameter is the embedding once more."""
    return hf.tied and head == "lm" and rule.param == VALUE_HEAD.param


def _in_model_order(hf: HFConfig, head: Head) -> Iterator[tuple[Rule, int]]:
    """(rule, layer) of all parameters: before the layers, layer by layer, after the layers (layer 0 outside them)."""
    rules = _rules(hf, head)
    first = next(i for i, rule in enumerate(rules) if rule.per_layer)
    yield from ((rule, 0) for rule in rules[:first])
    for layer in range(hf.num_layers):
        yield from ((rule, layer) for rule in rules if rule.per_layer)
    yield from ((rule, 0) for rule in rules[first:] if not rule.per_layer)


def _stage_params(
    hf: HFConfig, layout: ParallelLayout, pp_rank: int, vp_stage: int, head: Head, padded_vocab: int
) -> Iterator[tuple[str, GlobalParam]]:
    """(name with the layer's index in the chunk, parameter) of everything one stage holds."""
    first = pp_rank == 0 and vp_stage == 0
    last = pp_rank == layout.pp - 1 and vp_stage == layout.vpp - 1
    layers = layout.layers_of(pp_rank, hf.num_layers, vp_stage)
    for rule in _rules(hf, head):
        if rule.per_layer:
            for local, layer in enumerate(layers):
                param = global_param(rule, hf, layer=layer, padded_vocab=padded_vocab)
                yield with_layer(param.name, local), param
        elif rule.param.startswith("embedding."):
            if first:
                yield rule.param, global_param(rule, hf, padded_vocab=padded_vocab)
        elif last and _tied_output(rule, hf, head):
            # Megatron-Core gives a tied model an output layer of its own only where the embedding is not at hand.
            if not first:
                yield rule.param, _tied_param(rule, hf, padded_vocab)
        elif last:
            yield rule.param, global_param(rule, hf, padded_vocab=padded_vocab)


def _tied_param(rule: Rule, hf: HFConfig, padded_vocab: int) -> GlobalParam:
    """The output layer filled from the embedding's tensor."""
    embedding = next(r for r in FAMILIES[hf.family].rules if r.param.startswith("embedding."))
    tied = Rule(rule.param, rule.primitive, embedding.sources)
    return global_param(tied, hf, padded_vocab=padded_vocab, replica=True)
