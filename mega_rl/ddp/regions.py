"""Regions of a rank's parameters and buffers within the tensors of the whole model, from `sharded_state_dict`.

Meta tensors replace the parameters, each as large as the parameter is whole over data parallelism. The views that
Megatron-Core's modules make of them show which elements go where, for any wrapper and place of the memory, without a
copy.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.converters.plan.adapters import PART
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import Box


@dataclass(frozen=True)
class Region:
    """A box of a local tensor that is one piece of a whole model's tensor."""

    key: str  # the whole tensor's; layers are numbered over the whole model: "decoder.layers.3.mlp.linear_fc1.weight"
    global_shape: tuple[int, ...]  # first the axes that the local tensor lacks: experts are cut over such a one
    global_offset: tuple[int, ...]
    local: Box  # within the local tensor
    # Number of this copy of the elements: (pipeline, tensor, data parallel), all 0 for the first.
    replica: tuple[int, int, int]
    resizable: bool  # rows are padded by what tensor parallelism needs: a vocabulary

    @property
    def added_axes(self) -> int:
        """Leading axes of the whole that the local tensor lacks."""
        return len(self.global_shape) - len(self.local.shape)


def find_regions(
    model: GPTModel, shapes: Mapping[str, tuple[int, ...]], *, dp_cp_group: ProcessGroup
) -> dict[str, list[Region]]:
    """Return the regions of a chunk's parameters and persistent buffers, by their names in the chunk.

    `shapes` are those of the parameters, whole over data parallelism and cut by tensor and expert parallelism.

    Raises UserError: a module has state that is not a tensor, as Transformer Engine's FP8 has.
    """
    with _stand_ins(model, shapes) as names:
        # Keys with the number of the layer do not depend on the pipeline, and may lack optimizer state one by one.
        sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": True, "dp_cp_group": dp_cp_group})
        apply_factories(sharded)
    regions: dict[str, list[Region]] = {}
    for value in nested_values(sharded):
        if isinstance(value, ShardedObject):
            _check_empty(value)
            continue
        assert isinstance(value, ShardedTensor), value
        name, shape = names[_memory(value.data)]
        region = _region(value, shape)
        if value.data.numel() and region not in regions.setdefault(name, []):
            regions[name].append(region)
    for name, parameter in model.named_parameters():
        if PART in name:
            regions[name] = [_of_adapter(name, parameter, shapes[name], regions, model)]
    return regions


def _of_adapter(
    name: str, parameter: Tensor, shape: tuple[int, ...], regions: Mapping[str, list[Region]], model: GPTModel
) -> Region:
    """Return the region of a part of an adapter, which lies where its layer's weight lies."""
    layer, _, part = name.partition(PART)
    weight = regions[f"{layer}.weight"][0]
    group = model.get_submodule(f"{layer}.adapter").group
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
    whole = tuple(length * ranks if axis == cut else length for axis, length in enumerate(shape))
    offset = tuple(length * rank if axis == cut else 0 for axis, length in enumerate(shape))
    axes = weight.added_axes
    return Region(
        key=f"{weight.key.removesuffix('.weight')}{PART}{part}",
        global_shape=(*weight.global_shape[:axes], *whole),
        global_offset=(*weight.global_offset[:axes], *offset),
        local=Box((0,) * len(shape), shape),
        replica=(weight.replica[0], rank if cut is None else 0, weight.replica[2]),
        resizable=False,
    )


@contextmanager
def _stand_ins(
    model: GPTModel, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[int, tuple[str, tuple[int, ...]]]]:
    """Replace parameters and buffers by meta tensors in the block; yield memory -> (name, shape)."""
    names: dict[int, tuple[str, tuple[int, ...]]] = {}
    stand_ins: dict[int, Tensor] = {}
    kept = [
        (table, leaf, f"{path}.{leaf}" if path else leaf, tensor)
        for path, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for leaf, tensor in table.items()
        if tensor is not None
    ]
    try:
        for table, leaf, name, tensor in kept:
            if id(tensor) not in stand_ins:  # a tensor of two modules has the name of the first, like named_parameters
                shape = tuple(shapes.get(name, tensor.shape))
                stand_ins[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device="meta")
                names[_memory(stand_ins[id(tensor)])] = name, shape
            table[leaf] = stand_ins[id(tensor)]
        yield names
    finally:
        for table, leaf, _, tensor in kept:
            table[leaf] = tensor


def _memory(tensor: Any) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _region(sharded: ShardedTensor, shape: tuple[int, ...]) -> Region:
    """Return the region of a meta tensor's view from its offset and strides; `shape`: the tensor's."""
    data = sharded.data
    assert isinstance(data, Tensor)
    strides = torch.empty(shape, device="meta").stride()
    same = data.dim() == len(shape) and all(
        stride == expected
        for stride, expected, length in zip(data.stride(), strides, data.shape, strict=True)
        if length > 1
    )
    assert same, f"{sharded.key}: shape {tuple(data.shape)}, strides {data.stride()} are no box of a tensor {shape}"
    rest, offset = int(data.storage_offset()), []
    for stride in strides:
        offset.append(rest // stride)
        rest %= stride
    replica = sharded.replica_id
    assert isinstance(replica, tuple), f"{sharded.key}: copy {replica}"
    pipeline_copy, tensor_copy, data_copy = replica
    return Region(
        key=sharded.key,
        global_shape=tuple(sharded.global_shape),
        global_offset=tuple(sharded.global_offset),
        local=Box(tuple(offset), tuple(data.shape)),
        replica=(pipeline_copy, tensor_copy, data_copy),
        resizable=sharded.allow_shape_mismatch,
    )


def _check_empty(state: ShardedObject) -> None:
    data: Any = state.data
    size = data.getbuffer().nbytes if isinstance(data, io.BytesIO) else 0 if data is None else len(data)
    if size:
        raise UserError(
            f"{state.key.removesuffix('._extra_state')}: has state that is not a tensor ({size} bytes; Transformer "
            "Engine's FP8 has such), which checkpoints cannot keep; train without FP8, or set "
            "checkpoint.save_interval=0, checkpoint.save_final=false and checkpoint.resume=never"
        )
