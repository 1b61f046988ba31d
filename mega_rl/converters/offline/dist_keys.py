"""Names in a Megatron-Core distributed checkpoint: the slab of a global tensor that holds a parameter.

A checkpoint stacks parameters of equal shape: where all layers are alike a tensor's first dimension is the layer, and
experts of a layer are always stacked. Norms carry Transformer Engine's names whatever the spec, so a checkpoint loads
under both. Pure arithmetic, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.ranks import Origin, ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+)\.local_experts\.(\d+)\.(.+)")

# What a training run stores beside the model: optimizer and scheduler state, random-number states, and from
# Megatron-Core 0.19 on what earlier releases write into common.pt.
FOREIGN_PREFIXES = (
    "optimizer.", "chained_", "opt_param_scheduler", "lr_scheduler", "rng_state", "rerun_state_machine", "common_state/"
)  # fmt: skip
EXTRA_STATE = "._extra_state/"


class Slab(NamedTuple):
    """A parameter's place: `tensor[place]`, where the leading dimensions have the sizes `lead`."""

    key: str
    place: tuple[int, ...]
    lead: tuple[int, ...]


def whole_model(sharding: Sharding, *, origin: Origin = "disk") -> tuple[ParamPlan, ...]:
    """Return the plans of one rank that holds the whole model, under Transformer Engine's names."""
    whole = replace(sharding, layout=ParallelLayout(), spec="te", padded_vocab=sharding.vocab)
    plans = build_plan(whole, RankCoordinates(), origin=origin)
    assert not any(plan.replica for plan in plans), "one rank has no use for a second copy"
    return plans


def is_stacked(hf: HFConfig) -> bool:
    """Return whether Megatron-Core stacks the layers; it does not for mixtures of experts."""
    return hf.moe is None


def slab_of(plan: ParamPlan, hf: HFConfig) -> Slab:
    """Return the slab to which a parameter of `whole_model` is written."""
    return next(_slabs(plan, hf, plan.name, stacked=is_stacked(hf)))


def possible_slabs(plan: ParamPlan, hf: HFConfig) -> Iterator[Slab]:
    """Yield the slabs that may hold a parameter, most usual first: stacked or not, under the names of either spec."""
    names = [plan.name, plan.canonical]
    if plan.canonical.endswith("pre_mlp_layernorm.weight"):
        # Upstream's local spec renames this norm in front of mixtures too, its Transformer Engine spec does not.
        names.append(plan.canonical.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
    for name in dict.fromkeys(names):
        for stacked in (is_stacked(hf), not is_stacked(hf)):
            yield from _slabs(plan, hf, name, stacked=stacked)


def _slabs(plan: ParamPlan, hf: HFConfig, name: str, *, stacked: bool) -> Iterator[Slab]:
    """Yield the slab of a parameter under one of its names; for an expert also its place as a separate tensor."""
    key = name
    place: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    expert = _EXPERT.fullmatch(plan.canonical)
    if expert is not None:
        key = f"{expert[1]}.experts.{expert[3]}"
    layer = _LAYER.fullmatch(key)
    if stacked and layer is not None:
        key, place, lead = f"decoder.layers.{layer[2]}", (int(layer[1]),), (hf.num_layers,)
    if expert is None:
        yield Slab(key, place, lead)
        return
    assert hf.moe is not None
    yield Slab(key, (*place, int(expert[2])), (*lead, hf.moe.num_experts))
    yield Slab(key.replace(".experts.experts.", f".experts.experts.{expert[2]}."), place, lead)


def extra_state_keys(slabs: Iterable[Slab]) -> list[str]:
    """Names of the empty extra states that modules with these parameters ask for when they are loaded.

    Which modules have one depends on the spec; a state that no module asks for is skipped by Megatron-Core.
    """
    keys = set()
    for slab in slabs:
        module = slab.key.rpartition(".")[0]
        modules = [module]
        if module.endswith(".linear_proj"):
            modules.append(module.removesuffix("linear_proj") + "core_attention")
        place, lead = slab.place or (0,), slab.lead or (1,)
        shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, lead))}"
        keys |= {f"{name}{EXTRA_STATE}{shard}" for name in modules}
    return sorted(keys)
