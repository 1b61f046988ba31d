"""Index maps between Hugging Face tensors and the parameters of every rank.

Every tensor is seen as a matrix (a vector is one column wide). A family's rule gives a parameter of the whole model as
a list of affine blocks, each a run of consecutive rows of one Hugging Face tensor, and says how tensor parallelism cuts
it. A rank's shard is the intersection of the two: a list of `Copy`, rectangle to rectangle. Read forwards the copies
load a model, read backwards they export it; two layouts composed, they reshard one. All of it is interval arithmetic on
a few numbers per tensor; nothing here touches an element, and nothing imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.rules import Source
from mega_rl.converters.plan.blocks import Block, Copy, GlobalParam, global_param, param_name, shard
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, Part, stage_experts, stage_parts
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

# Source of a parameter's copies: tensors of a Hugging Face checkpoint, or whole parameters under canonical names.
Origin = Literal["disk", "canonical"]


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


def build_plan(
    sharding: Sharding, at: RankCoordinates, *, vp_stage: int = 0, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """Return how one rank fills each parameter of one of its model chunks: the common part and its experts.

    Raises UserErrors when the model cannot be cut this way.
    """
    common = common_plan(sharding, at.tp_rank, at.pp_rank, vp_stage, origin=origin)
    return common + expert_plan(sharding, at.ep_rank, at.etp_rank, at.pp_rank, vp_stage, origin=origin)


def common_plan(
    sharding: Sharding, tp_rank: int, pp_rank: int, vp_stage: int = 0, *, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """Return the part of a chunk that is cut over tensor parallelism: everything but experts."""
    cut = _Cutter(sharding, sharding.layout.tp, tp_rank, origin)
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
    sharding: Sharding, ep_rank: int, etp_rank: int, pp_rank: int, vp_stage: int = 0, *, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """Return the experts of a chunk on one expert-parallel rank, cut over the experts' tensor parallelism."""
    cut = _Cutter(sharding, sharding.layout.etp, etp_rank, origin)
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    held = experts_of(sharding.hf, sharding.layout, ep_rank)
    plans = []
    for part in stage_experts(sharding, pp_rank, vp_stage, held):
        local = part.layer - layers.start if part.rule.scope == "layer" else part.layer
        expert = part.expert - held.start
        plans.append(cut.plan(part, param_name(part.rule, sharding.hf, layer=local, expert=expert, spec=sharding.spec)))
    return tuple(plans)


class _CutKey(NamedTuple):
    """Parameters of one key are cut alike."""

    param: str
    when: tuple[str, ...]
    expert: int  # -1: any; else its place in the tensor that holds all experts


class _Cut(NamedTuple):
    """A parameter cut for one rank, under the names of the first layer and expert that asked for it."""

    param: GlobalParam
    names: list[str]  # of the tensors that its copies read
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


class _Cutter:
    """Cuts parameters for one rank.

    A rule cuts all layers and experts alike, but for the place of an expert where one tensor holds them all. So each
    is cut once; for the others only names change.
    """

    def __init__(self, sharding: Sharding, parts: int, index: int, origin: Origin) -> None:
        sharding.check()
        self._sharding, self._parts, self._index, self._origin = sharding, parts, index, origin
        self._cuts: dict[_CutKey, _Cut] = {}

    def plan(self, part: Part, name: str, replica: bool = False) -> ParamPlan:
        """Return how this rank fills a parameter that its chunk knows as `name`."""
        rule = part.rule
        stacked = any(source.stacked for source in rule.sources)
        key = _CutKey(rule.param, rule.when, part.expert if stacked else -1)
        names = _origin_names(part, self._sharding.hf, self._origin)
        if key not in self._cuts:
            param = _parameter(part, self._sharding.hf, self._sharding.vocab, self._origin, replica=replica)
            self._cuts[key] = _Cut(param, names, *shard(param, self._parts, self._index))
        param, first_names, shape, copies = self._cuts[key]
        if first_names != names:
            renamed = dict(zip(first_names, names, strict=True))
            copies = tuple([Copy(renamed[c[0]], *c[1:]) for c in copies])  # type: ignore[index]
        canonical = param_name(rule, self._sharding.hf, layer=part.layer, expert=part.expert)
        whole = param.cut == "none"
        return ParamPlan(
            name, canonical, shape, copies, whole, param.replica, param.optional, rule.float32, rule.per_expert
        )


def _origin_names(part: Part, hf: HFConfig, origin: Origin) -> list[str]:
    """Return the names of the tensors that a part's copies read."""
    if origin == "canonical":
        return [param_name(part.rule, hf, layer=part.layer, expert=part.expert)]
    return [source.name.format(layer=part.layer, expert=part.expert) for source in part.rule.sources]


def experts_of(hf: HFConfig, layout: ParallelLayout, ep_rank: int) -> range:
    """Return the global indices of the experts that an expert-parallel rank holds."""
    count = hf.moe.num_experts // layout.ep if hf.moe is not None else 0
    return range(ep_rank * count, (ep_rank + 1) * count)


def _parameter(part: Part, hf: HFConfig, vocab: int, origin: Origin, *, replica: bool = False) -> GlobalParam:
    """Return the whole parameter, made of tensors on disk or, with origin "canonical", of itself."""
    rule = part.rule
    if rule.param == OUTPUT and not rule.sources:
        rule = replace(rule, sources=(_embedding_source(hf),))
    param = global_param(rule, hf, padded_vocab=vocab, layer=part.layer, expert=part.expert, replica=replica)
    if origin == "disk":
        return param
    # A tied output layer is the embedding here too.
    name = EMBEDDING if not part.rule.sources else param.name
    padding = sum(block.rows for block in param.blocks if block.hf_name is None)
    rows = sum(param.sections) - padding
    blocks = [Block(name, 0, rows)] + ([Block(None, rows, padding)] if padding else [])
    return replace(param, blocks=tuple(blocks))


def _embedding_source(hf: HFConfig) -> Source:
    return next(rule for rule in FAMILIES[hf.family].rules if rule.param == EMBEDDING).sources[0]
