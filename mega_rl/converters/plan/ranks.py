"""Index maps between Hugging Face tensors and the parameters of every rank.

Every tensor is seen as a matrix (a vector is one column wide). A family's rule gives a parameter of the whole model as
a list of affine blocks, each a run of consecutive rows of one Hugging Face tensor, and says how tensor parallelism cuts
it. A rank's shard is the intersection of the two: a list of `Copy`, rectangle to rectangle. Read forwards the copies
load a model, read backwards they export it; two layouts composed, they reshard one. All of it is interval arithmetic on
a few numbers per tensor; nothing here touches an element, and nothing imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.rules import Source
from mega_rl.converters.plan.blocks import Copy, global_param, param_name, shard
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, stage_experts, stage_parts
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
    """Return how one rank fills each parameter of one of its model chunks: the common part and its experts.

    Raises UserErrors when the model cannot be cut this way.
    """
    common = common_plan(sharding, at.tp_rank, at.pp_rank, vp_stage)
    return common + expert_plan(sharding, at.ep_rank, at.etp_rank, at.pp_rank, vp_stage)


def common_plan(sharding: Sharding, tp_rank: int, pp_rank: int, vp_stage: int = 0) -> tuple[ParamPlan, ...]:
    """Return the part of a chunk that is cut over tensor parallelism: everything but experts."""
    cut = _Cutter(sharding, sharding.layout.tp, tp_rank)
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    first_stage = (pp_rank, vp_stage) == (0, 0)
    plans = []
    for part in stage_parts(sharding, pp_rank, vp_stage):
        tied = part.rule.param == OUTPUT and not part.rule.sources
        replica = tied or (part.rule.param == EMBEDDING and not first_stage)
        local = part.layer - layers.start if part.rule.scope == "layer" else part.layer
        plans.append(cut.plan(part, param_name(part.rule, sharding.hf, layer=local, spec=sharding.spec), replica))
    return tuple(plans)


def expert_plan(
    sharding: Sharding, ep_rank: int, etp_rank: int, pp_rank: int, vp_stage: int = 0
) -> tuple[ParamPlan, ...]:
    """Return the experts of a chunk on one expert-parallel rank, cut over the experts' tensor parallelism."""
    cut = _Cutter(sharding, sharding.layout.etp, etp_rank)
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    held = experts_of(sharding.hf, sharding.layout, ep_rank)
    plans = []
    for part in stage_experts(sharding, pp_rank, vp_stage, held):
        local = part.layer - layers.start if part.rule.scope == "layer" else part.layer
        expert = part.expert - held.start
        plans.append(cut.plan(part, param_name(part.rule, sharding.hf, layer=local, expert=expert, spec=sharding.spec)))
    return tuple(plans)


class _Cutter:
    """Cuts parameters for one rank.

    A rule cuts all layers and experts alike, except for the place of an expert in a tensor that holds all of them. So
    each rule is cut once; for the other layers and experts only names change.
    """

    def __init__(self, sharding: Sharding, parts: int, index: int) -> None:
        sharding.check()
        self._sharding, self._parts, self._index = sharding, parts, index
        # (parameter, when, expert or -1) -> (whether it is whole, names on disk of the first one cut, shape, copies)
        self._cuts: dict[tuple[Any, ...], tuple[bool, list[str], tuple[int, ...], tuple[Copy, ...]]] = {}

    def plan(self, part: Part, name: str, replica: bool = False) -> ParamPlan:
        """Return how this rank fills a parameter that its chunk knows as `name`."""
        rule, hf = part.rule, self._sharding.hf
        stacked = any(source.stacked for source in rule.sources)
        key = rule.param, rule.when, part.expert if stacked else -1
        names = [source.name.format(layer=part.layer, expert=part.expert) for source in rule.sources]
        if key not in self._cuts:
            made = replace(rule, sources=(_embedding_source(hf),)) if rule.param == OUTPUT and not names else rule
            vocab = self._sharding.vocab
            param = global_param(made, hf, padded_vocab=vocab, layer=part.layer, expert=part.expert)
            self._cuts[key] = (param.cut == "none", names, *shard(param, self._parts, self._index))
        whole, first_names, shape, copies = self._cuts[key]
        if first_names != names:
            renamed = dict(zip(first_names, names, strict=True))
            copies = tuple([Copy(renamed[c[0]], *c[1:]) for c in copies])  # type: ignore[index]
        canonical = param_name(rule, hf, layer=part.layer, expert=part.expert)
        return ParamPlan(name, canonical, shape, copies, whole, replica, rule.optional, rule.float32, rule.per_expert)


def experts_of(hf: HFConfig, layout: ParallelLayout, ep_rank: int) -> range:
    """Return the global indices of the experts that an expert-parallel rank holds."""
    count = hf.moe.num_experts // layout.ep if hf.moe is not None else 0
    return range(ep_rank * count, (ep_rank + 1) * count)


def _embedding_source(hf: HFConfig) -> Source:
    return next(rule for rule in FAMILIES[hf.family].rules if rule.param == EMBEDDING).sources[0]
