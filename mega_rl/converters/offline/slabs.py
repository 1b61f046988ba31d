"""Names in a Megatron-Core distributed checkpoint: the slab of a stored tensor that holds a parameter.

A checkpoint stacks parameters of equal shape: if all layers are alike, a tensor's first dimension is the layer, and
experts of a layer are always stacked. Norms carry Transformer Engine's names whatever the spec, so a checkpoint loads
under both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.offline.torch_dist import Chunk, DistTensor
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import Home, rows_of
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT
from mega_rl.converters.plan.ranks import ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import TensorInfo
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+)\.local_experts\.(\d+)\.(.+)")

# Content that a training run stores next to the model: optimizer and scheduler state, random-number states, and from
# Megatron-Core 0.19 on the content of earlier releases' common.pt.
FOREIGN_PREFIXES = (
    "optimizer.", "chained_", "opt_param_scheduler", "lr_scheduler", "rng_state", "rerun_state_machine", "common_state/"
)  # fmt: skip
# Parts of a delta net's projections, which such a checkpoint holds one by one, and their rows.
QKV = (("query", "delta_keys"), ("key", "delta_keys"), ("value", "delta_values"))
DELTA_PARTS = {
    "in_proj.weight": (*QKV, ("z", "delta_values"), ("beta", "delta_heads"), ("alpha", "delta_heads")),
    "conv1d.weight": QKV,
}
EXTRA_STATE = "._extra_state/"


class Slab(NamedTuple):
    """A parameter's place: `tensor[place]`, where the leading dimensions have the sizes `lead`."""

    key: str
    place: tuple[int, ...]
    lead: tuple[int, ...]


def whole_model(sharding: Sharding) -> tuple[ParamPlan, ...]:
    """Return a single rank's plans of the whole model, under Transformer Engine's names, without padding."""
    return build_plan(replace(sharding, layout=ParallelLayout(), spec="te"), RankCoordinates())


def parts_of(plan: ParamPlan, hf: HFConfig) -> list[tuple[int, ParamPlan]]:
    """Return (first row, parameter) of what Megatron-Core stores in the place of a delta net's projection.

    The list is empty for a parameter that is stored as it is.
    """
    parts: list[tuple[int, ParamPlan]] = []
    rows_by_part = DELTA_PARTS.get(plan.canonical.rpartition(".self_attention.")[2], ()) if hf.delta is not None else ()
    low = 0
    for part, symbol in rows_by_part:
        rows = hf.dims[symbol]
        copies = rows_of(plan.copies, low, low + rows)
        name, canonical, shape = f"{plan.name}.{part}", f"{plan.canonical}.{part}", (rows, *plan.shape[1:])
        parts.append((low, replace(plan, name=name, canonical=canonical, shape=shape, copies=copies)))
        low += rows
    return parts


def is_stacked(hf: HFConfig) -> bool:
    """Return whether Megatron-Core stacks the layers; it does not for mixtures of experts and delta nets."""
    return hf.moe is None and hf.delta is None


def slab_of(plan: ParamPlan, hf: HFConfig) -> Slab:
    """Return the slab to which a parameter of `whole_model` is written."""
    return next(_slabs(plan, hf, plan.name, stacked=is_stacked(hf)))


def possible_slabs(plan: ParamPlan, hf: HFConfig) -> Iterator[Slab]:
    """Yield possible slabs of a parameter, most usual first: stacked or not, by either spec's names."""
    names = [plan.name, plan.canonical]
    if plan.canonical.endswith("pre_mlp_layernorm.weight"):
        # Upstream's local spec renames this norm in front of mixtures too, its Transformer Engine spec does not.
        names.append(plan.canonical.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
    for name in dict.fromkeys(names):
        for stacked in (is_stacked(hf), not is_stacked(hf)):
            yield from _slabs(plan, hf, name, stacked=stacked)


def _slabs(plan: ParamPlan, hf: HFConfig, name: str, *, stacked: bool) -> Iterator[Slab]:
    """Yield a parameter's slab under one name; for an expert also that of a separate tensor."""
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
    """Return the keys of empty extra states that modules with these parameters ask for on loading.

    The modules that have an extra state depend on the spec; Megatron-Core skips a state that no module asks for.
    """
    keys = set()
    for slab in slabs:
        module = re.sub(r"\.[^.]+$|\.weight\.[^.]+$", "", slab.key)
        modules = [module]
        if module.endswith(".linear_proj"):
            modules.append(module.removesuffix("linear_proj") + "core_attention")
        place, lead = slab.place or (0,), slab.lead or (1,)
        shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, lead))}"
        keys |= {f"{name}{EXTRA_STATE}{shard}" for name in modules}
    return sorted(keys)


class Slabs:
    """Lookup of parameters in tensors that are stored in boxes, by any layout."""

    def __init__(
        self,
        folder: Path,
        sharding: Sharding,
        tensors: Mapping[str, DistTensor],
        *,
        start_of: Callable[[DistTensor, Chunk], int],
    ) -> None:
        """start_of: returns the byte at which a chunk's elements begin in its file, or raises UserError."""
        self._folder, self._sharding, self._tensors, self._start_of = folder, sharding, tensors, start_of
        self._chunks: dict[str, dict[tuple[int, ...], list[tuple[Chunk, int]]]] = {}
        self.infos: dict[str, TensorInfo] = {}  # chunks as matrices or vectors
        self.homes: dict[str, list[Home]] = {}
        self.problems: list[str] = []

    @property
    def unused(self) -> set[str]:
        """Return the keys of tensors that hold no parameter looked up so far."""
        return self._tensors.keys() - self._chunks.keys()

    def add(self, plan: ParamPlan) -> bool:
        """Look up a parameter's chunks, or those of its parts; return False if the checkpoint lacks a tensor."""
        if self._add(plan, plan.canonical):
            return True
        parts = [self._add(part, plan.canonical, low) for low, part in parts_of(plan, self._sharding.hf)]
        return bool(parts) and all(parts)

    def _add(self, plan: ParamPlan, canonical: str, low: int = 0) -> bool:
        """Look up chunks of `canonical` from row `low` on, which `plan` describes by themselves."""
        slabs = possible_slabs(plan, self._sharding.hf)
        slab = next((slab for slab in slabs if slab.key in self._tensors), None)
        if slab is None:
            return False
        tensor, expected = self._tensors[slab.key], (*slab.lead, *plan.shape)
        fits = tensor.shape == expected
        if plan.canonical == EMBEDDING or (plan.canonical == OUTPUT and self._sharding.head == "lm"):
            # Rows below the vocabulary are padding.
            fits = len(tensor.shape) == 2 and tensor.shape[0] >= expected[0] and tensor.shape[1] == expected[1]
        if not fits:
            self._chunks[slab.key] = {}
            fault = f"{slab.key} has shape {list(tensor.shape)}, config.json asks for {list(expected)}"
            self.problems.append(f"{self._folder}: {fault}")
            return True
        if slab.key not in self._chunks:
            self._chunks[slab.key] = _by_place(tensor, len(slab.lead))
        for chunk, position in self._chunks[slab.key].get(slab.place, ()):
            row, *_, col = (*chunk.offsets[len(slab.lead) :], 0)[: max(2, len(plan.shape))]
            num_rows, *_, num_cols = (*chunk.sizes[len(slab.lead) :], 1)[: max(2, len(plan.shape))]
            rows = min(num_rows, plan.shape[0] - row)
            stored = f"{tensor.key}@{'.'.join(map(str, chunk.offsets))}"
            if rows > 0 and self._open(stored, tensor, chunk, as_vector=len(plan.shape) == 1):
                copy = Copy(canonical, low + row, col, position * num_rows, 0, rows, num_cols)
                self.homes.setdefault(canonical, []).append(Home(stored, copy))
        return True

    def _open(self, stored: str, tensor: DistTensor, chunk: Chunk, *, as_vector: bool) -> bool:
        """Enter a chunk into `infos`; return False after a problem."""
        if stored not in self.infos:
            try:
                start = self._start_of(tensor, chunk)
            except UserError as error:
                self.problems.append(str(error))
                return False
            numel = prod(chunk.sizes)
            shape = (numel,) if as_vector else (prod(chunk.sizes[:-1]), chunk.sizes[-1])
            nbytes = numel * tensor.dtype.itemsize
            self.infos[stored] = TensorInfo(stored, tensor.dtype, shape, chunk.file, start, nbytes)
        return True


def _by_place(tensor: DistTensor, num_lead: int) -> dict[tuple[int, ...], list[tuple[Chunk, int]]]:
    """Return the chunks that hold each index of the leading dimensions, with its position in each."""
    chunks: dict[tuple[int, ...], list[tuple[Chunk, int]]] = {}
    for chunk in tensor.chunks:
        ranges = [range(low, low + n) for low, n in zip(chunk.offsets, chunk.sizes, strict=True)][:num_lead]
        for position, index in enumerate(product(*ranges)):
            chunks.setdefault(index, []).append((chunk, position))
    return chunks
