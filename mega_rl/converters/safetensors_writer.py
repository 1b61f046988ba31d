"""Writes a sharded safetensors checkpoint from a stream of tensors; complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.converters.safetensors_io import DTYPES, INDEX_FILE, SINGLE_FILE
from mega_rl.errors import UserError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_checkpoint(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 5 << 30,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, Path] | None = None,
) -> Path:
    """Writes `directory` and returns it; holds at most one shard in memory.

    A shard is closed before it would pass `shard_bytes`. One shard is written as model.safetensors, several with an
    index. `files` (name -> source) are copied beside the weights byte for byte. Everything is made in a temporary
    sibling folder, the index last, and renamed at the end, so an interrupted run leaves no half checkpoint.

    Raises UserError when the directory exists and is not empty, or a tensor's name occurs twice.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists and is not empty; choose another directory or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        for name, source in (files or {}).items():
            shutil.copyfile(source, work / name)
        _write_shards(work, tensors, shard_bytes, {"format": "pt", **(metadata or {})})
        _sync(work)
        # rename replaces an empty directory, and fails on one that was filled in the meantime.
        work.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _write_shards(
    work: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, metadata: Mapping[str, str]
) -> None:
    """All shards, named once their number is known, and then the index."""
    weight_map: dict[str, int] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        repeated = [name for name in shard if name in weight_map]
        if repeated:
            raise UserError(f"{work}: {repeated[0]} is written twice")
        weight_map.update(dict.fromkeys(shard, number))
        total += sum(t.nbytes for t in shard.values())
        _write_file(work / f"{number}.partial", shard, metadata)
    count = max(weight_map.values(), default=-1) + 1
    if count == 0:
        raise UserError(f"{work}: there are no tensors to write")
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE_FILE for i in range(count)]
    for number, name in enumerate(names):
        (work / f"{number}.partial").rename(work / name)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[i] for name, i in sorted(weight_map.items())},
        }
        (work / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Groups of consecutive tensors of at most `shard_bytes` (a larger tensor is alone)."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        if name in shard:
            raise UserError(f"{name} is written twice")
        shard[name] = tensor.detach().to("cpu")
        size += tensor.nbytes
    if shard:
        yield shard


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, wide types first so that every tensor is aligned to its type."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
