"""Index maps between Hugging Face tensors and the parameters of every rank.

Every tensor is seen as a matrix (a vector is one column wide). A family's rule gives a parameter of the whole model as
a list of affine blocks, each a run of consecutive rows of one Hugging Face tensor, and says how tensor parallelism cuts
it. A rank's shard is the intersection of the two: a list of `Copy`, rectangle to rectangle. Read forwards the copies
load a model, read backwards they export it. All of it is interval arithmetic on a few numbers per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import Copy, global_param, param_name, shard
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, rules_of, stage_experts, stage_parts
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates


@dataclass(frozen=True)
class ParamPlan:
    """The copies by which one rank fills one parameter."""

    name: str  # in the live model chunk: under its spec, layers and experts numbered within the chunk
    canonical: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    replicated: bool  # every rank of the group that could cut it holds the same
    replica: bool  # a second home of the embedding
    optional: bool
    float32: bool
    of_expert: bool  # held by the ranks with this ep_rank, cut over etp; else by all, cut over tp


def build_plan(sharding: Sharding, at: RankCoordinates, *, vp_stage: int = 0) -> tuple[ParamPlan, ...]:
    """Return a rank's plan to fill each parameter of a model chunk, common part and experts.

    Raises UserErrors when the model cannot be cut this way.
    """
    common = common_plan(sharding, at.tp_rank, at.pp_rank, vp_stage)
    return common + expert_plan(sharding, at.ep_rank, at.etp_rank, at.pp_rank, vp_stage)


def common_plan(sharding: Sharding, tp_rank: int, pp_rank: int, vp_stage: int = 0) -> tuple[ParamPlan, ...]:
    """Return the part of a chunk that is cut over tensor parallelism: everything but experts."""
    sharding.check()
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    parts = stage_parts(sharding, pp_rank, vp_stage)
    return tuple(_cut(sharding, parts, sharding.layout.tp, tp_rank, layers.start, first_stage=pp_rank == vp_stage == 0))


def expert_plan(
    sharding: Sharding, ep_rank: int, etp_rank: int, pp_rank: int, vp_stage: int = 0
) -> tuple[ParamPlan, ...]:
    """Return the experts of a chunk on one expert-parallel rank, cut over the experts' tensor parallelism."""
    sharding.check()
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    held = experts_of(sharding.hf, sharding.layout, ep_rank)
    parts = stage_experts(sharding, pp_rank, vp_stage, held)
    return tuple(_cut(sharding, parts, sharding.layout.etp, etp_rank, layers.start, first_expert=held.start))


def _cut(
    sharding: Sharding,
    parts: Iterable[Part],
    count: int,
    index: int,
    first_layer: int,
    *,
    first_expert: int = 0,
    first_stage: bool = True,
) -> Iterator[ParamPlan]:
    """Yield how the rank `index` of `count` fills each of these parameters.

    A rule cuts all layers and experts alike, except for the place of an expert in a tensor that holds all of them. So
    each rule is cut once; for the other layers and experts only names change.
    """
    hf = sharding.hf
    embedding = next((rule.sources for rule in rules_of(hf, sharding.head) if rule.param == EMBEDDING), ())
    # (parameter, when, expert or -1) -> (whether it is whole, names on disk of the first one cut, shape, copies)
    cuts: dict[tuple[Any, ...], tuple[bool, list[str], tuple[int, ...], tuple[Copy, ...]]] = {}
    for part in parts:
        rule, layer, expert = part
        tied = rule.param == OUTPUT and not rule.sources
        key = rule.param, rule.when, expert if any(source.stacked for source in rule.sources) else -1
        names = [source.name.format(layer=layer, expert=expert) for source in rule.sources]
        if key not in cuts:
            made = replace(rule, sources=embedding) if tied else rule
            param = global_param(made, hf, padded_vocab=sharding.vocab, layer=layer, expert=expert)
            cuts[key] = (param.cut == "none", names, *shard(param, count, index))
        whole, first_names, shape, copies = cuts[key]
        if first_names != names:
            renamed = dict(zip(first_names, names, strict=True))
            copies = tuple([Copy(renamed[c[0]], *c[1:]) for c in copies])  # type: ignore[index]
        local = layer - first_layer if rule.scope == "layer" else layer
        name = param_name(rule, hf, layer=local, expert=expert - first_expert, spec=sharding.spec)
        canonical = param_name(rule, hf, layer=layer, expert=expert)
        replica = tied or (rule.param == EMBEDDING and not first_stage)
        yield ParamPlan(name, canonical, shape, copies, whole, replica, rule.optional, rule.float32, rule.per_expert)


def experts_of(hf: HFConfig, layout: ParallelLayout, ep_rank: int) -> range:
    """Return the global indices of the experts that an expert-parallel rank holds."""
    count = hf.moe.num_experts // layout.ep if hf.moe is not None else 0
    return range(ep_rank * count, (ep_rank + 1) * count)
