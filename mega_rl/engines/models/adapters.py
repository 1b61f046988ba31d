"""Low-rank adapters on Megatron-Core's linear layers (arXiv:2106.09685), cut as the layers are.

The products with A are `rank` wide, and only they travel: gathered over the sequence behind the A of a column-parallel
layer, summed behind the A of a row-parallel one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from mega_rl.converters.architecture import Adapter, HFConfig
from mega_rl.converters.plan.adapters import PART, A, B
from mega_rl.converters.plan.parameters import HFTensor, hf_tensors
from mega_rl.converters.plan.ranks import ParamPlan
from mega_rl.converters.plan.sharding import Head
from mega_rl.engines.models.heads import ValueHead
from mega_rl.parallel.groups import Groups

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Cut = Literal["rows", "columns", "none"]  # cut of the layer's weight, over tensor parallelism


class LayerAdapter(nn.Module):
    """The adapter of a layer."""

    enabled: ClassVar[bool] = True  # whether the outputs of layers have theirs, in this process


class LinearAdapter(LayerAdapter):
    """The adapter of a linear layer of transformers: adds scale B A x to its output."""

    def __init__(self, layer: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        self.scale = adapter.scale
        self.a = nn.Parameter(torch.empty(adapter.rank, layer.in_features))
        self.b = nn.Parameter(torch.empty(layer.out_features, adapter.rank))
        layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + self.scale * linear(linear(inputs[0], self.a), self.b) if self.enabled else output


class LowRank(LayerAdapter):
    """The adapter of one linear layer: gives scale B A x.

    a: for each module on disk, [rank, in]. b: for each source of the weight that has one, [rows, rank].
    """

    def __init__(
        self, weight: ParamPlan, parts: Mapping[str, ParamPlan], shapes: Mapping[str, HFTensor], *, scale: float
    ) -> None:
        """weight: of the layer. parts: by their names here. shapes: of all tensors on disk."""
        super().__init__()
        self.scale = scale
        of_a, of_b = ({n[2:]: plan for n, plan in parts.items() if n.startswith(kind)} for kind in ("a.", "b."))
        names = {number: _disk_name(plan) for number, plan in of_a.items()}
        by_module = {name.removesuffix(A): number for number, name in names.items()}
        self._a_of = {number: by_module[_disk_name(plan).removesuffix(B)] for number, plan in of_b.items()}
        self.a = nn.ParameterDict({n: nn.Parameter(_part_of_a(p, shapes[names[n]].shape)) for n, p in of_a.items()})
        self.b = nn.ParameterDict({n: nn.Parameter(torch.zeros(p.shape)) for n, p in of_b.items()})
        whole_a, whole_b = (all(plan.replicated for plan in of.values()) for of in (of_a, of_b))
        self.cut: Cut = "columns" if not whole_a else "none" if whole_b else "rows"
        self._rows, self._turns = _rows_of_sources(weight, {n: len(b) for n, b in self.b.items()})
        self.group: ProcessGroup | None = None
        self.sequence_parallel = False

    def join(self, group: ProcessGroup, *, sequence_parallel: bool) -> None:
        """Mark what tensor parallelism cuts, and what is whole and sees a part of the sequence."""
        self.group, self.sequence_parallel = group, sequence_parallel
        for part, cut, dim in ((self.a, "columns", 1), (self.b, "rows", 0)):
            for parameter in part.values():
                if self.cut == cut:
                    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
                else:
                    parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of the layer's input [..., in]."""
        products = self._across(linear(x, torch.cat([*self.a.values()])))
        of_module = dict(zip(self.a, products.chunk(len(self.a), dim=-1), strict=True))
        parts = [
            linear(of_module[self._a_of[n]], self.b[n])
            if n in self.b
            else products.new_zeros(*products.shape[:-1], rows)
            for n, rows in self._rows.items()
        ]
        turns = torch.cat([part.unflatten(-1, (self._turns, -1)) for part in parts], dim=-1)
        return turns.flatten(-2) * self.scale

    def _across(self, products: Tensor) -> Tensor:
        """Return A x of the tokens that B reads here, equal on all tensor-parallel ranks."""
        group = self.group
        if group is None or group.size() == 1 or self.cut == "none":
            return products
        if self.cut == "rows":
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(products, group=group)
            return copy_to_tensor_model_parallel_region(products, group=group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(products, group=group)
        return reduce_from_tensor_model_parallel_region(products, group=group)


def _rows_of_sources(weight: ParamPlan, held: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return (rows of each source in a layer's output here, number of turns that they take).

    held: rows of the sources that have a B.
    """
    names = list(dict.fromkeys(copy.hf_name for copy in weight.copies))
    if len(names) == 1:
        rows = dict(held)
    else:
        rows = {str(i): sum(c.rows for c in weight.copies if c.hf_name == name) for i, name in enumerate(names)}
    turns = (
        sum(copy.hf_name == names[0] for copy in weight.copies) if len(names) > 1 else len(weight.copies) // len(rows)
    )
    return rows, turns


def _disk_name(plan: ParamPlan) -> str:
    return str(plan.copies[0].hf_name)


def first_a(module: str, shape: tuple[int, ...]) -> Tensor:
    """Return a new A [rank, in] of a module on disk, uniform within 1 / sqrt(in).

    It depends on nothing but the module's name, so it is the same on every layout.
    """
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:7], "little")
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    return uniform * shape[1] ** -0.5


def _part_of_a(plan: ParamPlan, shape: tuple[int, ...]) -> Tensor:
    (copy,) = plan.copies
    whole = first_a(_disk_name(plan).removesuffix(A), shape)
    return whole[copy.src_row : copy.src_row + copy.rows, copy.src_col : copy.src_col + copy.cols]


def attach(chunk: GPTModel, plan: Sequence[ParamPlan], *, hf: HFConfig, head: Head, groups: Groups) -> None:
    """Give the linear layers of a chunk the adapters that its plan has.

    Only they and a value head then train.
    """
    assert hf.adapter is not None
    kind, layout = chunk.config.params_dtype, groups.layout
    shapes, weights = hf_tensors(hf, head=head), {param.name: param for param in plan}
    parts: dict[str, dict[str, ParamPlan]] = defaultdict(dict)
    for param in plan:
        name, is_part, part = param.name.partition(PART)
        if is_part:
            parts[name][part] = param
    for name, of_layer in parts.items():
        layer, weight = chunk.get_submodule(name), weights[f"{name}.weight"]
        adapter = LowRank(weight, of_layer, shapes, scale=hf.adapter.scale).to(kind)
        if not weight.of_expert:  # each expert's tensor-parallel ranks are one
            adapter.join(groups.tp, sequence_parallel=layout.sequence_parallel)
        layer.adapter = adapter
        layer.register_forward_hook(_add)
    for name, parameter in chunk.named_parameters():
        is_head = isinstance(chunk.get_submodule(name.rpartition(".")[0]), ValueHead)
        parameter.requires_grad_(PART in name or is_head)


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the adapter's output to a layer's (output, bias)."""
    adapter = layer.adapter
    assert isinstance(adapter, LowRank)
    return (output[0] + adapter(inputs[0]).to(output[0].dtype), output[1]) if adapter.enabled else output


def without_adapters(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that computes models without their adapters."""

    def of_base(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        LayerAdapter.enabled = False
        try:
            return function(*args, **kwargs)
        finally:
            LayerAdapter.enabled = True

    return of_base
