"""Index maps between Hugging Face tensors and the parameters of every rank.

Every tensor is seen as a matrix (a vector is one column wide). A family's rule gives a parameter of the whole model as
a list of affine blocks, each a run of consecutive rows of one Hugging Face tensor, and says how tensor parallelism cuts
it. A rank's shard is the intersection of the two: a list of `Copy`, rectangle to rectangle. Read forwards the copies
load a model, read backwards they export it; two layouts composed, they reshard one. All of it is interval arithmetic on
a few numbers per tensor; nothing here touches an element, and nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.blocks import Block, Copy, GlobalParam, global_param, param_name, shard, source_shape
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.rules import Rule, Source
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

Head = Literal["lm", "value"]
Spec = Literal["local", "te"]
# What a parameter's copies read: tensors of a Hugging Face checkpoint, or whole parameters under canonical names.
Origin = Literal["disk", "canonical"]

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


@dataclass(frozen=True)
class Sharding:
    """A model and how it is cut: everything that a plan depends on but the rank."""

    hf: HFConfig
    layout: ParallelLayout = ParallelLayout()  # noqa: RUF009  immutable
    spec: Spec = "local"  # whose parameter names the live chunks have
    head: Head = "lm"
    padded_vocab: int | None = None  # rows of the embedding; None: the smallest multiple of tp

    @property
    def vocab(self) -> int:
        """Rows of the embedding over all ranks."""
        if self.padded_vocab is not None:
            return self.padded_vocab
        return padded_vocab_size(self.hf.vocab_size, self.layout.tp)

    def check(self) -> None:
        """Raises UserErrors with every reason why the model cannot be cut this way."""
        problems = check_layout(self.hf, self.layout, padded_vocab=self.padded_vocab)
        if problems:
            raise UserErrors(problems)


class Part(NamedTuple):
    """One parameter of the model: its rule, its layer and its expert, counted over the whole model."""

    rule: Rule
    layer: int = 0
    expert: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from every other parameter."""
        return self.rule.param, self.layer, self.expert


class HFTensor(NamedTuple):
    """What the model asks of a tensor on disk."""

    shape: tuple[int, ...]
    optional: bool
    float32: bool  # stays float32 whatever the other weights are


@dataclass(frozen=True)
class ParamPlan:
    """How one rank fills one parameter."""

    name: str  # in the live model chunk: under its spec, layers and experts numbered within the chunk
    canonical: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    replicated: bool  # every rank of the group that could cut it holds the same
    replica: bool  # a second home of the embedding
    optional: bool
    float32: bool
    of_expert: bool  # held by the ranks with this ep_rank, cut over etp; else by all, cut over tp


class Piece(NamedTuple):
    """A rectangle of one rank's parameter on its way back into a Hugging Face tensor."""

    member: int  # rank in the group that gathers the unit
    param: int  # position in the unit
    copy: Copy  # src is the Hugging Face side, dst the parameter's, as when loading


class ExportParam(NamedTuple):
    """A parameter of an export unit: its name in the live chunk and the shape of one rank's part."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExportUnit:
    """Parameters that are gathered together, and the Hugging Face tensors that come out of them.

    The members that gather are the tensor-parallel ranks, for experts the etp x ep ranks that hold all experts between
    them (etp fastest): each holds parameters of these names and shapes, of experts of its own.
    """

    pp_rank: int
    vp_stage: int
    of_experts: bool
    float32: bool
    params: tuple[ExportParam, ...]
    tensors: tuple[tuple[str, tuple[int, ...], tuple[Piece, ...]], ...]  # (Hugging Face name, full shape, pieces)

    @property
    def numel(self) -> int:
        """Elements of one rank's part."""
        return sum(prod(param.shape) for param in self.params)


def padded_vocab_size(vocab: int, tp: int) -> int:
    """The smallest multiple of `tp` that holds `vocab` rows."""
    return -(-vocab // tp) * tp


def check_layout(hf: HFConfig, layout: ParallelLayout, *, padded_vocab: int | None = None) -> list[str]:
    """The reasons, one line each, why a model cannot be cut this way; empty when it can."""
    tp = layout.tp
    vocab = padded_vocab_size(hf.vocab_size, tp) if padded_vocab is None else padded_vocab
    problems = []
    sizes = {"num_attention_heads": hf.num_heads, "padded vocabulary": vocab}
    if hf.moe is None or not all(hf.moe.layers):
        sizes["intermediate_size"] = hf.ffn_hidden_size
    if hf.moe is not None and hf.moe.shared_ffn_hidden_size:
        sizes["the shared experts' intermediate size"] = hf.moe.shared_ffn_hidden_size
    if "mtp" in hf.switches:
        sizes["hidden_size"] = hf.hidden_size  # rows of the projection of multi-token prediction
    problems += [f"tp={tp} does not divide {name}={size}" for name, size in sizes.items() if size % tp]
    if hf.mla is None:
        if hf.num_kv_heads % tp and tp % hf.num_kv_heads:
            problems.append(f"tp={tp} must divide num_key_value_heads={hf.num_kv_heads} or be a multiple of it")
        if hf.qk_norm_joint and hf.num_kv_heads % tp:
            problems.append(f"tp={tp} does not divide num_key_value_heads={hf.num_kv_heads}, normed all together")
        qkv_rows = hf.dims["q"] + 2 * hf.dims["kv"]
        if qkv_rows % tp:
            problems.append(f"tp={tp} does not divide the {qkv_rows} rows of q, k and v")
    problems += _check_experts(hf, layout)
    try:
        layout.layers_of(0, hf.num_layers)
    except ValueError:
        if layout.pipeline is None:
            stages = f"pp*vpp={layout.pp}*{layout.vpp}={layout.num_stages}"
            problems.append(f"{stages} does not divide num_hidden_layers={hf.num_layers}")
        else:
            split = f"pipeline {'+'.join(map(str, layout.pipeline))}={sum(layout.pipeline)}"
            problems.append(f"{split} must be num_hidden_layers={hf.num_layers}")
    if vocab < hf.vocab_size:
        problems.append(f"padded vocabulary {vocab} is smaller than vocab_size={hf.vocab_size}")
    return problems


def _check_experts(hf: HFConfig, layout: ParallelLayout) -> list[str]:
    if hf.moe is None:
        return [f"ep={layout.ep}: model_type={hf.model_type} has no experts"] if layout.ep > 1 else []
    problems = []
    if hf.moe.num_experts % layout.ep:
        problems.append(f"ep={layout.ep} does not divide the number of experts {hf.moe.num_experts}")
    if hf.moe.ffn_hidden_size % layout.etp:
        problems.append(f"etp={layout.etp} does not divide the experts' intermediate size {hf.moe.ffn_hidden_size}")
    if layout.etp > 1 and hf.linear_bias:
        problems.append(f"etp={layout.etp}: Megatron-Core does not cut experts that have biases; set etp to 1")
    return problems


def as_on_disk(hf: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> HFConfig:
    """The config with the spellings that a checkpoint's tensor names show: fused or single experts, the value head."""
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
    """Every tensor the model is made of by its name on disk, in the order of the model."""
    return {
        source.name.format(layer=part.layer, expert=part.expert): HFTensor(
            source_shape(source, hf), part.rule.optional, part.rule.float32
        )
        for part in _in_model_order(hf, head)
        for source in part.rule.sources
    }


def ignored_tensors(hf: HFConfig, *, head: Head) -> frozenset[str]:
    """Names that a checkpoint may hold and that are left aside.

    Buffers of old versions, the head that is not used, multi-token prediction layers that are not loaded, and the
    copies of embedding and head that some checkpoints repeat in those.
    """
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
    """The tensors of the multi-token prediction layers alone."""
    loaded = hf_tensors(replace(hf, mtp="load"), head="lm")
    rest = hf_tensors(replace(hf, mtp="drop"), head="lm")
    return {name: tensor for name, tensor in loaded.items() if name not in rest}


def build_plan(
    sharding: Sharding, at: RankCoordinates, *, vp_stage: int = 0, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """How one rank fills each parameter of one of its model chunks: the common part and its experts.

    Raises UserErrors when the model cannot be cut this way.
    """
    common = common_plan(sharding, at.tp_rank, at.pp_rank, vp_stage, origin=origin)
    return common + expert_plan(sharding, at.ep_rank, at.etp_rank, at.pp_rank, vp_stage, origin=origin)


def common_plan(
    sharding: Sharding, tp_rank: int, pp_rank: int, vp_stage: int = 0, *, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """The part of a chunk that is cut over tensor parallelism: everything but experts."""
    cut = _Cutter(sharding, sharding.layout.tp, tp_rank, origin)
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    first_stage = (pp_rank, vp_stage) == (0, 0)
    plans = []
    for part in _stage_parts(sharding, pp_rank, vp_stage):
        tied = part.rule.param == OUTPUT and not part.rule.sources
        replica = tied or (part.rule.param == EMBEDDING and not first_stage)
        local = part.layer - layers.start if part.rule.scope == "layer" else part.layer
        plans.append(cut.plan(part, param_name(part.rule, sharding.hf, layer=local, spec=sharding.spec), replica))
    return tuple(plans)


def expert_plan(
    sharding: Sharding, ep_rank: int, etp_rank: int, pp_rank: int, vp_stage: int = 0, *, origin: Origin = "disk"
) -> tuple[ParamPlan, ...]:
    """The experts of a chunk that one expert-parallel rank holds, cut over the experts' tensor parallelism."""
    cut = _Cutter(sharding, sharding.layout.etp, etp_rank, origin)
    layers = sharding.layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage)
    held = experts_of(sharding.hf, sharding.layout, ep_rank)
    plans = []
    for part in _stage_experts(sharding, pp_rank, vp_stage, held):
        local = part.layer - layers.start if part.rule.scope == "layer" else part.layer
        expert = part.expert - held.start
        plans.append(cut.plan(part, param_name(part.rule, sharding.hf, layer=local, expert=expert, spec=sharding.spec)))
    return tuple(plans)


class _Cutter:
    """Cuts parameters for one rank.

    A rule cuts all layers and experts alike, but for the place of an expert where one tensor holds them all. So each
    is cut once; for the others only names change.
    """

    def __init__(self, sharding: Sharding, parts: int, index: int, origin: Origin) -> None:
        sharding.check()
        self._sharding, self._parts, self._index, self._origin = sharding, parts, index, origin
        self._done: dict[
            tuple[str, tuple[str, ...], int], tuple[GlobalParam, list[str], tuple[int, ...], tuple[Copy, ...]]
        ] = {}

    def plan(self, part: Part, name: str, replica: bool = False) -> ParamPlan:
        """How this rank fills a parameter that its chunk knows as `name`."""
        rule = part.rule
        stacked = any(source.stacked for source in rule.sources)
        key = rule.param, rule.when, part.expert if stacked else -1
        names = _origin_names(part, self._sharding.hf, self._origin)
        if key not in self._done:
            param = _parameter(part, self._sharding.hf, self._sharding.vocab, self._origin, replica=replica)
            self._done[key] = (param, names, *shard(param, self._parts, self._index))
        param, like, shape, copies = self._done[key]
        if like != names:
            renamed = dict(zip(like, names, strict=True))
            copies = tuple([Copy(renamed[c[0]], *c[1:]) for c in copies])  # type: ignore[index]
        canonical = param_name(rule, self._sharding.hf, layer=part.layer, expert=part.expert)
        whole = param.cut == "none"
        return ParamPlan(
            name, canonical, shape, copies, whole, param.replica, param.optional, rule.float32, rule.per_expert
        )


def _origin_names(part: Part, hf: HFConfig, origin: Origin) -> list[str]:
    """Names of the tensors that a part's copies read."""
    if origin == "canonical":
        return [param_name(part.rule, hf, layer=part.layer, expert=part.expert)]
    return [source.name.format(layer=part.layer, expert=part.expert) for source in part.rule.sources]


def experts_of(hf: HFConfig, layout: ParallelLayout, ep_rank: int) -> range:
    """Global indices of the experts that an expert-parallel rank holds."""
    count = hf.moe.num_experts // layout.ep if hf.moe is not None else 0
    return range(ep_rank * count, (ep_rank + 1) * count)


@lru_cache(maxsize=8)
def export_plan(sharding: Sharding) -> tuple[ExportUnit, ...]:
    """The inverse over all ranks of a replica: every parameter once, layer by layer.

    The order depends on the model and on `ep` alone, so every rank exports the same sequence. Cached, because a run
    asks for it at each weight sync.
    """
    layout = sharding.layout
    shapes = hf_tensors(sharding.hf, head=sharding.head)
    order = {part.key: i for i, part in enumerate(_in_model_order(sharding.hf, sharding.head))}
    units: list[tuple[int, ExportUnit]] = []
    for pp_rank, vp_stage in layout.stages():
        by_rank = [common_plan(sharding, tp_rank, pp_rank, vp_stage) for tp_rank in range(layout.tp)]
        columns = zip(_stage_parts(sharding, pp_rank, vp_stage), zip(*by_rank, strict=True), strict=True)
        owned = [(part, plans) for part, plans in columns if not plans[0].replica]
        for _, group in groupby(owned, key=lambda column: _bucket_key(column[0])):
            members = list(group)
            unit = _unit([plans for _, plans in members], shapes, pp_rank, vp_stage, of_experts=False)
            units.append((order[members[0][0].key], unit))
        units += _expert_units(sharding, pp_rank, vp_stage, shapes, order)
    units.sort(key=lambda item: item[0])
    return tuple(unit for _, unit in units)


def _expert_units(
    sharding: Sharding,
    pp_rank: int,
    vp_stage: int,
    shapes: Mapping[str, HFTensor],
    order: Mapping[tuple[str, int, int], int],
) -> Iterator[tuple[int, ExportUnit]]:
    """(place in the order, unit) of a stage's experts.

    A unit is one expert of each expert-parallel rank, or all experts where one tensor on disk holds them all.
    """
    hf, layout = sharding.hf, sharding.layout
    if hf.moe is None:
        return
    by_member = [
        expert_plan(sharding, ep_rank, etp_rank, pp_rank, vp_stage)
        for ep_rank in range(layout.ep)
        for etp_rank in range(layout.etp)
    ]
    parts = _stage_experts(sharding, pp_rank, vp_stage, experts_of(hf, layout, 0))
    groups: dict[tuple[int, object], list[tuple[Part, tuple[ParamPlan, ...]]]] = {}
    for part, plans in zip(parts, zip(*by_member, strict=True), strict=True):
        key = part.rule.param if hf.fused_experts else part.expert
        groups.setdefault((part.layer, key), []).append((part, plans))
    for group in groups.values():
        unit = _unit([plans for _, plans in group], shapes, pp_rank, vp_stage, of_experts=True)
        yield order[group[0][0].key], unit


def _bucket_key(part: Part) -> tuple[int, str]:
    """Consecutive parameters with one key are one unit."""
    return part.layer, part.rule.together or part.rule.param


def _unit(
    params: list[tuple[ParamPlan, ...]],
    shapes: Mapping[str, HFTensor],
    pp_rank: int,
    vp_stage: int,
    *,
    of_experts: bool,
) -> ExportUnit:
    """A unit from its parameters, each as every member holds it."""
    pieces: dict[str, list[Piece]] = {}
    for position, plans in enumerate(params):
        seen: set[str] = set()
        for member, plan in enumerate(plans):
            # What several members hold whole is taken from the first of them.
            if plan.replicated and plan.canonical in seen:
                continue
            seen.add(plan.canonical)
            for copy in plan.copies:
                if copy.hf_name is not None:
                    pieces.setdefault(copy.hf_name, []).append(Piece(member, position, copy))
    return ExportUnit(
        pp_rank,
        vp_stage,
        of_experts,
        params[0][0].float32,
        tuple(ExportParam(plans[0].name, plans[0].shape) for plans in params),
        tuple((name, shapes[name].shape, tuple(found)) for name, found in pieces.items()),
    )


def _parameter(part: Part, hf: HFConfig, vocab: int, origin: Origin, *, replica: bool = False) -> GlobalParam:
    """The whole parameter, made of tensors on disk or, with origin "canonical", of itself."""
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


def _rules(hf: HFConfig, head: Head) -> list[Rule]:
    """The rules in force, with the output head that the model has; a tied head has no tensor of its own."""
    rules = []
    for rule in FAMILIES[hf.family].rules:
        if not all(name in hf.switches for name in rule.when if name not in ("dense", "moe")):
            continue
        if rule.param == OUTPUT:
            if head == "value":
                rule = Rule(OUTPUT, "copy", (Source(hf.value_head, ("one", "hidden")),), optional=True, float32=True)
            elif hf.tied:
                rule = replace(rule, sources=())
        rules.append(rule)
    return rules


def _holds(rule: Rule, hf: HFConfig, layer: int) -> bool:
    """Whether a rule holds in a layer, by the kind of its MLP."""
    return ("moe" not in rule.when or hf.is_moe(layer)) and ("dense" not in rule.when or not hf.is_moe(layer))


def _layer_parts(rules: Iterable[Rule], hf: HFConfig, layer: int, *, experts: Iterable[int] | None) -> Iterator[Part]:
    """The parameters of one layer: the common ones (`experts` None), or these experts, one after the other."""
    held = [rule for rule in rules if rule.per_expert == (experts is not None) and _holds(rule, hf, layer)]
    if experts is None:
        yield from (Part(rule, layer) for rule in held)
    else:
        yield from (Part(rule, layer, expert) for expert in experts for rule in held)


def _in_model_order(hf: HFConfig, head: Head) -> Iterator[Part]:
    """All parameters: before the layers, layer by layer, after the layers, multi-token prediction layers last."""
    rules = _rules(hf, head)
    first = next(i for i, rule in enumerate(rules) if rule.scope != "model")
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
    """(rules, layer) of every layer of one stage; multi-token prediction layers are on the last."""
    hf = sharding.hf
    rules = _rules(hf, sharding.head)
    inside = [rule for rule in rules if rule.scope == "layer"]
    yield from ((inside, layer) for layer in sharding.layout.layers_of(pp_rank, hf.num_layers, vp_stage))
    ahead = [rule for rule in rules if rule.scope == "mtp"]
    if ahead and _is_last(sharding.layout, pp_rank, vp_stage):
        yield from ((ahead, layer) for layer in range(hf.num_layers, hf.num_layers + hf.mtp_layers))


def _stage_parts(sharding: Sharding, pp_rank: int, vp_stage: int) -> Iterator[Part]:
    """Every parameter that one stage holds, experts aside."""
    first, last = (pp_rank, vp_stage) == (0, 0), _is_last(sharding.layout, pp_rank, vp_stage)
    mtp = "mtp" in sharding.hf.switches
    for rule in _rules(sharding.hf, sharding.head):
        if rule.scope != "model":
            continue
        if rule.param.startswith("embedding."):
            # Multi-token prediction embeds tokens too, with a copy of the embedding where it is not at hand.
            if first or (last and mtp):
                yield Part(rule)
        elif last and (rule.sources or not (first or mtp)):
            # Megatron-Core gives a tied model an output layer of its own only where the embedding is not at hand.
            yield Part(rule)
    for rules, layer in _stage_layers(sharding, pp_rank, vp_stage):
        yield from _layer_parts(rules, sharding.hf, layer, experts=None)


def _stage_experts(sharding: Sharding, pp_rank: int, vp_stage: int, held: range) -> Iterator[Part]:
    """These experts of every layer of one stage."""
    for rules, layer in _stage_layers(sharding, pp_rank, vp_stage):
        yield from _layer_parts(rules, sharding.hf, layer, experts=held)


def _is_last(layout: ParallelLayout, pp_rank: int, vp_stage: int) -> bool:
    return (pp_rank, vp_stage) == (layout.pp - 1, layout.vpp - 1)


def _embedding_source(hf: HFConfig) -> Source:
    return next(rule for rule in FAMILIES[hf.family].rules if rule.param == EMBEDDING).sources[0]
