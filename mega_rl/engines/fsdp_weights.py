"""Loading of a sharded Hugging Face model, every rank its rows, and export of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mega_rl.converters.architecture import DiskTensor
from mega_rl.converters.live.adapters import add_stored
from mega_rl.converters.live.copying import fill_all
from mega_rl.converters.live.load import LoadReport, check_tensors
from mega_rl.converters.plan.adapters import A
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.parameters import as_on_disk, disk_tensors, row_copies
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.ddp.access import Whole, WholeChunk, rows_here, whole_tensor
from mega_rl.engines.fsdp_model import TokenClassifier, sharded_parameters
from mega_rl.engines.models.adapters import first_a

EXPERT_TENSORS = 2  # a layer's: gate and up projection, down projection; exported expert by expert
FLOAT32 = (".e_score_correction_bias", TokenClassifier.HEAD)


def is_first_copy(parameter: DTensor) -> bool:
    """Return whether this rank's rows are the first of their copies."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        isinstance(placement, Shard) or at == 0 for placement, at in zip(parameter.placements, coordinate, strict=True)
    )


def disk_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints hold, by transformers' name; whole on every rank."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


@torch.no_grad()
def load_rows(model: nn.Module, path: Path, *, sharding: Sharding) -> LoadReport:
    """Copy this rank's rows of a checkpoint into the shards, and return a report. No collectives.

    A head that the checkpoint does not have starts at zero.

    Raises UserErrors: the same on every rank and before any weight is read, with every tensor that is missing,
    unexpected or of another shape.
    """
    start = perf_counter()
    kept: list[str] = []
    with CheckpointReader(path) as reader:
        hf = as_on_disk(sharding.hf, {name: info.shape for name, info in reader.tensors.items()})
        add_stored(reader, hf.adapter)
        ignored, absent = check_tensors(reader, hf, sharding.head)
        renamed = {TokenClassifier.HEAD: hf.value_head}
        jobs: list[tuple[Tensor, list[Copy]]] = []
        for name, parameter in sharded_parameters(model).items():
            local = parameter.to_local()
            own = disk_tensors(hf.family, name, parameter.shape, hf.own)
            disk = [tensor._replace(name=renamed.get(tensor.name, tensor.name)) for tensor in own]
            if any(tensor.name in absent for tensor in disk):
                local.copy_(_first_rows(disk[0].name, parameter))
                kept.append(name)
            elif local.numel():
                jobs.append((local, list(row_copies(disk, *rows_here(parameter)))))
        for name, buffer in disk_buffers(model).items():
            disk = list(disk_tensors(hf.family, name, tuple(buffer.shape), hf.own))
            jobs.append((buffer, list(row_copies(disk, (), tuple(buffer.shape)))))
        written = fill_all(jobs, reader)
        expected = sum(target.numel() for target, _ in jobs)
        assert written == expected, f"{written} elements were written, the shards have {expected}"
        return LoadReport(reader.bytes_read, tuple(kept), ignored, perf_counter() - start)


def _first_rows(name: str, parameter: DTensor) -> Tensor:
    """Return this rank's rows of a tensor that is new: zeros, except for an adapter's A."""
    box = rows_here(parameter)
    if not name.endswith(A):
        return torch.zeros(box.shape)
    return first_a(name.removesuffix(A), tuple(parameter.shape))[box.offset[0] : box.offset[0] + box.shape[0]]


def whole_model(model: nn.Module, *, sharding: Sharding, dtype: torch.dtype, device: torch.device) -> WholeChunk:
    """Return a sharded model for exporters: the tensors of its checkpoint, gathered one by one; collective.

    dtype: of the tensors that are not float32 in every model.
    """
    hf = sharding.hf
    in_fp32 = hf.own.float32 if hf.own is not None else ()
    kept: dict[str, Tensor] = {}  # the parameters gathered last, to cut experts out one by one

    def read(name: str, source: Tensor, disk: DiskTensor, kind: torch.dtype) -> Tensor:
        if tuple(source.shape) == disk.shape:
            return whole_tensor(source, kind, device)
        if name not in kept:
            for old in list(kept)[: len(kept) + 1 - EXPERT_TENSORS]:
                del kept[old]
            kept[name] = whole_tensor(source, kind, device)
        matrix = kept[name].view(matrix_shape(tuple(source.shape)))
        return matrix[disk.row : disk.row + disk.rows].view(disk.shape)

    tensors: dict[str, Whole] = {}
    sources: Mapping[str, Tensor] = {**sharded_parameters(model), **disk_buffers(model)}
    for name, source in sources.items():
        kind = torch.float32 if name.endswith(FLOAT32) or name in in_fp32 else dtype
        for disk in disk_tensors(hf.family, name, tuple(source.shape), hf.own):
            on_disk = hf.value_head if disk.name == TokenClassifier.HEAD else disk.name
            tensors[on_disk] = Whole(disk.shape, kind, device, partial(read, name, source, disk, kind))
    return WholeChunk(tensors, {})
