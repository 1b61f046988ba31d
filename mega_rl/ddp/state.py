"""Checkpoint pieces of chunks and their optimizer: boxes of tensors that are equal on any layout.

    weights/KEY     the parameter, or persistent buffer, in its dtype
    main/KEY        its FP32 main parameter, where that is separate memory: of a bf16 model. A precision-aware
                    optimizer has only the lower half of its bits, int16
    exp_avg/KEY, exp_avg_sq/KEY    Adam's moments; of a matrix under Muon only the first

That is 14 bytes per trained parameter of a bf16 model and 12 of an fp32 one. Under PyTorch's FSDP2 the weights are the
FP32 main parameters, whatever dtype the model computes in, and there is no `main`.

Data-parallel ranks write what they own: the distributed optimizer's shard, or FSDP's, of weights and state alike. What
is not cut over data parallelism is written by the first replica. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mega_rl.ddp.access import local, rows_here, unwrapped
from mega_rl.ddp.optimizer import MOMENTS, Trained, parts, trained_parameters
from mega_rl.ddp.regions import Region, find_regions
from mega_rl.ddp.torch_fsdp2 import TorchFsdp
from mega_rl.parallel.boxes import Box, Piece, flat_boxes, intersection, moved, within


@dataclass(frozen=True)
class Elements:
    """Consecutive elements of a parameter in row-major order."""

    first: int
    data: Tensor  # [n], a view of live memory: elements first .. first + n

    @property
    def end(self) -> int:
        """Return the index after the last element."""
        return self.first + self.data.numel()

    def part(self, first: int, end: int) -> Elements:
        """Return the elements from `first` to `end`, both indices into the parameter."""
        return Elements(first, self.data[first - self.first : end - self.first])


@dataclass(frozen=True)
class Holding:
    """Elements of a parameter or buffer that this rank holds, with their optimizer state."""

    shape: tuple[int, ...]  # whole over data parallelism
    weights: Elements
    first: int  # this rank's share of what the data-parallel ranks own together: elements first .. end
    end: int
    divided: bool  # whether they do; else the first of them owns everything
    copy: int = 0  # this rank's copy of the shares, with several optimizer instances
    state: Mapping[str, Elements] = field(default_factory=dict)  # "main" and moments, of the share

    def owned_by(self, region: Region) -> bool:
        """Return whether this rank writes its share of a region, and not another copy of it."""
        return self.copy == 0 and not any(region.replica[:-1] if self.divided else region.replica)


def find_pieces(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, *, dp_cp_group: ProcessGroup
) -> Iterator[Piece]:
    """Yield this rank's pieces; memory of parameters and optimizer must be settled and on its device.

    Weights are listed whole, or all that FSDP leaves here of them: a rank that loads writes them all. The state of
    `optimizer` must have been created (`optimizer.create_state`).
    """
    trained = {} if optimizer is None else {id(each.parameter): each for each in trained_parameters(optimizer)}
    distributed = [] if optimizer is None else [p for p in parts(optimizer) if isinstance(p, DistributedOptimizer)]
    copy = distributed[0].distributed_optimizer_instance_id if distributed else 0
    for chunk in chunks:
        model = unwrapped(chunk)
        held = dict(_holdings(chunk, trained, sharded=bool(distributed), copy=copy))
        buffers = dict(model.named_buffers())
        shapes = {name: holding.shape for name, holding in held.items()}
        for name, regions in find_regions(model, shapes, dp_cp_group=dp_cp_group).items():
            holding = held[name] if name in held else _undivided(buffers[name])
            for region in regions:
                yield from _pieces(holding, region)


def follow_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Copy restored weights to main parameters without a piece: of FP32 weights in Megatron FSDP."""
    for chunk in chunks:
        if not isinstance(chunk, FullyShardedDataParallel):
            continue
        for group in chunk.param_and_grad_buffer.parameter_groups:
            weights, main = group.model_weight_buffer, group.main_weight_buffer
            if main is not None and weights.dtype == main.dtype:
                main.data.copy_(weights.get_shard_from_local_buffer() if main.is_data_distributed else weights.data)


def _pieces(holding: Holding, region: Region) -> Iterator[Piece]:
    """Yield one region's pieces: weights inside and outside the share, and the share's state."""
    mine = holding.owned_by(region)
    weights = holding.weights
    cuts = [weights.first, *(min(max(cut, weights.first), weights.end) for cut in (holding.first, holding.end))]
    for number, (first, end) in enumerate(zip(cuts, [*cuts[1:], weights.end], strict=True)):
        yield from _cut("weights", weights.part(first, end), holding.shape, region, owned=mine and number == 1)
    for kind, elements in holding.state.items():
        yield from _cut(kind, elements, holding.shape, region, owned=mine)


def _cut(kind: str, elements: Elements, shape: tuple[int, ...], region: Region, *, owned: bool) -> Iterator[Piece]:
    """Yield the pieces of these elements of a parameter within the region, box by box."""
    position = 0
    for box in flat_boxes(shape, elements.first, elements.end):
        count = prod(box.shape)
        common = intersection(box, region.local)
        if common is not None:
            here = elements.data[position : position + count].view(box.shape)
            for axis, (offset, length) in enumerate(zip(*within(box, common), strict=True)):
                here = here.narrow(axis, offset, length)
            yield Piece(
                name=f"{kind}/{region.key}",
                global_shape=region.global_shape,
                box=_in_whole(common, region),
                data=here[(None,) * region.added_axes],
                owned=owned,
                resizable=region.resizable,
            )
        position += count


def _in_whole(box: Box, region: Region) -> Box:
    inner = within(region.local, box)
    axes = region.added_axes
    return moved(Box((0,) * axes + inner.offset, (1,) * axes + inner.shape), region.global_offset)


def _holdings(
    chunk: torch.nn.Module, trained: Mapping[int, Trained], *, sharded: bool, copy: int
) -> Iterator[tuple[str, Holding]]:
    """Yield (name, holding) of every parameter of a chunk."""
    if isinstance(chunk, TorchFsdp):
        yield from _of_torch_fsdp2(chunk, trained)
        return
    if isinstance(chunk, FullyShardedDataParallel):
        yield from _of_megatron_fsdp(chunk, trained, copy=copy)
        return
    for name, parameter in unwrapped(chunk).named_parameters():
        mine = trained.get(id(parameter))
        if not sharded or not parameter.requires_grad:
            yield name, _undivided(parameter, mine)
            continue
        shape, weights = tuple(parameter.shape), Elements(0, _flat(parameter))
        first = 0 if mine is None else mine.first  # None: all of its shares are on other ranks
        state = {} if mine is None else _state(mine, first)
        end = state["exp_avg"].end if state else first
        yield name, Holding(shape, weights, first, end, divided=True, copy=copy, state=state)


def _undivided(tensor: Tensor, trained: Trained | None = None) -> Holding:
    """Return the holding of a parameter or buffer that every data-parallel rank has whole."""
    state = {} if trained is None else _state(trained, 0)
    return Holding(tuple(tensor.shape), Elements(0, _flat(tensor)), 0, tensor.numel(), divided=False, state=state)


def _of_torch_fsdp2(chunk: TorchFsdp, trained: Mapping[int, Trained]) -> Iterator[tuple[str, Holding]]:
    """Yield the rows of every parameter, frozen ones too, as `torch.chunk` cuts them."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves gathered what the root has
    for name, parameter in chunk.module.named_parameters():
        assert isinstance(parameter, DTensor), name
        shape, weights = tuple(parameter.shape), _flat(parameter)
        first = rows_here(parameter).offset[0] * prod(shape[1:])
        assert first + weights.numel() <= prod(shape), (name, shape, first, weights.numel())
        mine = trained.get(id(parameter))
        state = {} if mine is None else _state(mine, first)
        end = first + weights.numel()
        yield name, Holding(shape, Elements(first, weights), first, end, divided=True, state=state)


def _of_megatron_fsdp(
    chunk: FullyShardedDataParallel, trained: Mapping[int, Trained], *, copy: int
) -> Iterator[tuple[str, Holding]]:
    """Yield ranges of flat buffers; FP32 weights also stand for their main parameters (see `follow_weights`)."""
    shards = {id(each.parameter.orig_param): each for each in trained.values()}  # type: ignore[attr-defined]
    buffers = chunk.param_and_grad_buffer
    for group in buffers.parameter_groups:
        weights = group.model_weight_buffer
        for item, parameter in enumerate(group.params):
            first, end = weights._get_item_slice_in_shard(item)
            held = Elements(first if weights.is_data_distributed else 0, weights.get_item(item))
            mine = shards.get(id(parameter))
            state = {} if mine is None else _state(mine, first)
            if mine is not None and parameter.dtype != torch.float32:
                state["main"] = Elements(first, _flat(mine.parameter))
            name = buffers.param_to_name[parameter]
            yield name, Holding(tuple(parameter.shape), held, first, end, divided=True, copy=copy, state=state)


def _state(trained: Trained, first: int) -> dict[str, Elements]:
    """Return main parameter and moments, whose first element is the parameter's element `first`."""
    tensors = {} if trained.main is None else {"main": trained.main}
    tensors |= {name: tensor for name, tensor in trained.state.items() if name in MOMENTS}
    return {name: Elements(first, _flat(tensor)) for name, tensor in tensors.items()}


def _flat(tensor: Tensor) -> Tensor:
    """Return this rank's part as a view [n]."""
    return local(tensor).view(-1)
