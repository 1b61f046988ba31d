"""Access to a model's chunks under any data-parallel wrapper: models, weights, their names, freezing, and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mega_rl.ddp import megatron_fsdp
from mega_rl.ddp.bucket_groups import finish_param_sync
from mega_rl.ddp.torch_fsdp2 import TorchFsdp
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import Box
from mega_rl.protocols import Ranks

EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
# One expert's weights: a separate module, or a parameter of a grouped matrix product.
_EXPERT = re.compile(r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")


class Whole:
    """A sharded parameter that `detach` gathers; shape and dtype are those of the whole; collective."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, gather: Callable[[], Tensor]
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._gather = gather

    def numel(self) -> int:
        """Return the number of elements of the whole tensor."""
        return self.shape.numel()

    def detach(self) -> Tensor:
        """Return the whole parameter as a new tensor."""
        return self._gather()


class WholeChunk(torch.nn.Module):
    """A sharded model for the exporter: whole parameters by name, gathered one by one, and buffers."""

    def __init__(self, parameters: Mapping[str, Whole], buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._whole, self._held = parameters, buffers

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, whole parameter)."""
        yield from self._whole.items()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, which are whole on every rank."""
        yield from self._held.items()


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """The model inside every wrapper."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def exportable(chunk: torch.nn.Module) -> torch.nn.Module:
    """The chunk with whole parameters in the dtype it computes in."""
    if isinstance(chunk, TorchFsdp):
        whole = {}
        for name, p in chunk.module.named_parameters():
            read = partial(whole_tensor, p, chunk.dtypes[name], p.device)
            whole[name] = Whole(p.shape, chunk.dtypes[name], p.device, read)
        return WholeChunk(whole, dict(chunk.module.named_buffers()))
    if isinstance(chunk, FullyShardedDataParallel):
        whole = {
            name: Whole(p.shape, p.dtype, p.device, read) for name, p, read in megatron_fsdp.whole_parameters(chunk)
        }
        return WholeChunk(whole, dict(unwrapped(chunk).named_buffers()))
    return unwrapped(chunk)


def finish_traffic(chunks: Sequence[torch.nn.Module]) -> None:
    """Wait until no message is on its way into the memory of parameters; collective."""
    finish_param_sync(chunks)
    for chunk in chunks:
        if isinstance(chunk, FullyShardedDataParallel):
            megatron_fsdp.finish_gathering(chunk)


def parameter_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """This rank's tensors of every parameter; several may share their memory."""
    for chunk in chunks:
        if isinstance(chunk, FullyShardedDataParallel):
            yield from megatron_fsdp.parameter_buffers(chunk)
        yield from (local(parameter) for parameter in chunk.parameters())
        if isinstance(chunk, DistributedDataParallel):
            buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
            yield from (buffer.param_data for buffer in buffers if buffer.param_data is not None)


def gradient_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """Return this rank's gradients."""
    for chunk in chunks:
        if isinstance(chunk, FullyShardedDataParallel):
            yield from megatron_fsdp.gradient_buffers(chunk)
        if isinstance(chunk, DistributedDataParallel):
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
        yield from (local(p.grad) for p in chunk.parameters() if p.grad is not None)


def main_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the gradients of this rank's main parameters, which each mini-batch makes anew."""
    for group in optimizer.param_groups:
        yield from (local(parameter.grad) for parameter in group["params"] if parameter.grad is not None)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """This rank's main parameters, and what the optimizer keeps of each of them."""
    for group in optimizer.param_groups:
        yield from (local(parameter) for parameter in group["params"])
    for state in optimizer.state.values():
        yield from (local(value) for value in state.values() if isinstance(value, Tensor) and value.dim())


def whole_tensor(source: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new whole tensor; collective for a parameter."""
    if not isinstance(source, DTensor):
        return source.detach().to(device=device, dtype=dtype, copy=True)
    # Cast before it travels, and not as a DTensor: what torch remembers of such casts may name a group of the past.
    rows = source.to_local().detach().to(device=device, dtype=dtype)
    mesh, placements = source.device_mesh, source.placements
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=source.shape, stride=source.stride()
    ).full_tensor()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, a view."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def rows_here(parameter: DTensor) -> Box:
    """Return the place of this rank's rows in the whole; empty beyond the last row."""
    place = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(*reversed(place))


def freeze(named: Iterable[tuple[str, torch.nn.Parameter]], patterns: Sequence[str], *, everyone: Ranks) -> None:
    """Take the weights that a pattern names out of training; collective over the model's ranks.

    Patterns are those of the shell. What is frozen before the model is wrapped for data parallelism has neither
    gradient nor optimizer state.

    Raises UserError: on all ranks alike, a pattern names no weight of the model, or nothing is left to train.
    """
    parameters = list(named)
    matches = [[fnmatchcase(name, pattern) for name, _ in parameters] for pattern in patterns]
    frozen = {i for row in matches for i, matched in enumerate(row) if matched}
    flags = [any(row) for row in matches] + [len(frozen) < len(parameters)]
    *used, trains = everyone.max(torch.tensor(flags, dtype=torch.int64)).tolist()
    idle = [pattern for pattern, matches_any in zip(patterns, used, strict=True) if not matches_any]
    if idle:
        raise UserError(
            f"model.frozen={idle}: no weight of the model has such a name; names are like "
            f"{', '.join(name for name, _ in parameters[:3])}"
        )
    if not trains:
        raise UserError(f"model.frozen={list(patterns)} freezes every weight: nothing is left to train")
    for i in frozen:
        parameters[i][1].requires_grad_(False)


def named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter) by Megatron-Core's names, which do not depend on the layout here.

    Layers and experts are numbered over the whole model from 0 ("decoder.layers.3.mlp.experts.local_experts.7..."),
    and the last stage's copy of a tied embedding has the embedding's name.
    """
    for chunk in chunks:
        layers = chunk.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        ep = chunk.pg_collection.ep
        first_expert = ep.rank() * ((chunk.config.num_moe_experts or 0) // ep.size())
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = EMBEDDING
            name = _LAYER.sub(partial(_shifted, by=first), name)
            yield _EXPERT.sub(partial(_shifted, by=first_expert), name), parameter


def _shifted(match: re.Match[str], *, by: int) -> str:
    """Return the matched (text, number) with `by` added to the number."""
    return f"{match[1]}{int(match[2]) + by}"


def let_gradients_through(chunk: GPTModel) -> None:
    """Make a frozen embedding's output require a gradient where layers behind it are recomputed.

    A recomputed block takes part in the backward only if one of its inputs requires a gradient; otherwise its own
    weights would get none.
    """
    if chunk.config.recompute_granularity is None or not chunk.pre_process:
        return
    if not any(parameter.requires_grad for parameter in chunk.embedding.parameters()):
        chunk.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )
