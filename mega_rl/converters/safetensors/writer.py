"""Writer of sharded safetensors checkpoints.

A file's header comes first, so its tensors are known beforehand and their bytes may then come in any order and from any
thread, each exactly once. The index is written last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl import disk
from mega_rl.converters.safetensors.header import INDEX_FILE, METADATA, SINGLE_FILE, encode_header, matrix_shape
from mega_rl.converters.safetensors.output_folder import copy_files, name_file, output_folder, require_space, write_json
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, as_bytes
from mega_rl.errors import UserError
from mega_rl.tracking import progress

SHARD_BYTES = 5 << 30


class TensorSpec(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the tensor takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """Writer of one safetensors file: header from `specs`, then each of their bytes exactly once.

    Calls may come from several threads. The file is flushed to disk by the call that writes its last byte. As a context
    manager it is closed at the end, unchecked after an exception. Raises UserError, with the file and the free space of
    its disk, when a write fails.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._written: dict[str, list[tuple[int, int]]] = {}  # row intervals by tensor
        self._specs: dict[str, TensorSpec] = {}
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {METADATA: {"format": "pt"}}
        at = 0
        # Wide types first: every tensor is then aligned to its type.
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            if spec.name in self._specs or spec.name == METADATA:
                raise UserError(f"{path}: {spec.name} is written twice")
            self._specs[spec.name], self._offsets[spec.name], self._written[spec.name] = spec, at, []
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        encoded = encode_header(header)
        self._start, self._missing = len(encoded), at
        with name_file(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            disk.write_at(self._fd, 0, [memoryview(encoded)])
            if at == 0:
                os.fsync(self._fd)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            os.close(self._fd)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor of any device."""
        spec = self._specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == spec[1:], f"{name}: {tensor.dtype} {list(tensor.shape)}, {spec}"
        self.write_rows(name, 0, [tensor.detach().reshape(matrix_shape(spec.shape))])

    def write_rows(self, name: str, row: int, parts: Sequence[Tensor]) -> None:
        """Write parts [rows_i, columns] in turn from `row` on; contiguous parts are not copied."""
        spec = self._specs[name]
        columns = matrix_shape(spec.shape)[1]
        parts = [part for part in parts if part.numel()]
        assert all(part.dtype == spec.dtype and part.shape[1] == columns for part in parts), (spec, parts)
        rows = sum(len(part) for part in parts)
        assert 0 <= row <= matrix_shape(spec.shape)[0] - rows, (spec, row, rows)
        position = self._start + self._offsets[name] + row * columns * spec.dtype.itemsize
        buffers = [as_bytes(part.detach().to("cpu").contiguous()).reshape(-1).data for part in parts]
        count = sum(len(buffer) for buffer in buffers)
        with name_file(self.path):
            disk.write_at(self._fd, position, buffers)
            with self._lock:
                self._written[name].append((row, row + rows))
                self._missing -= count
                complete = self._missing == 0 and count > 0
            if complete:
                os.fsync(self._fd)

    def close(self) -> None:
        """Close the file after asserting that every byte was written exactly once."""
        os.close(self._fd)
        for name, spec in self._specs.items():
            at, rows = 0, matrix_shape(spec.shape)[0] if spec.nbytes else 0
            for low, high in sorted(self._written[name]):
                assert spec.nbytes == 0 or low == at, f"{self.path}: {name} has rows {at} and {low} missing or twice"
                at = high
            assert at == rows or spec.nbytes == 0, f"{self.path}: {name} has {at} of {rows} rows"


class CheckpointWriter:
    """Writer of a checkpoint's weights into a folder: one file, or shards and their index.

    `specs` are all tensors in the order of the files; `write` and `write_rows` are those of `SafetensorsFile`. As a
    context manager it checks at the end that nothing is missing and writes the index. Raises UserError when a name
    occurs twice, there is nothing to write, or the disk has no room for it.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if not specs:
            raise UserError(f"{folder}: there are no tensors to write")
        self.folder = folder
        self._total = sum(spec.nbytes for spec in specs)
        self._advance = progress.counter(self._total)
        require_space(folder, self._total)
        shards = plan_shards(specs, shard_bytes)
        self.files = [SafetensorsFile(folder / _shard_name(i, len(shards)), shard) for i, shard in enumerate(shards)]
        self._file_of: dict[str, SafetensorsFile] = {}
        for file, shard in zip(self.files, shards, strict=True):
            for spec in shard:
                if spec.name in self._file_of:
                    raise UserError(f"{folder}: {spec.name} is written twice")
                self._file_of[spec.name] = file

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for file in self.files:
            file.__exit__(kind)
        if kind is None and len(self.files) > 1:
            weight_map = {name: file.path.name for name, file in self._file_of.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.folder / INDEX_FILE, index)

    def file_of(self, name: str) -> SafetensorsFile:
        """Return a tensor's file: threads that write different files do not wait for each other."""
        return self._file_of[name]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor of any device."""
        self._file_of[name].write(name, tensor)
        self._advance(tensor.nbytes)

    def write_rows(self, name: str, row: int, parts: Sequence[Tensor]) -> None:
        """Write rows from `row` on, one part [rows_i, columns] after the other."""
        self._file_of[name].write_rows(name, row, parts)
        self._advance(sum(part.nbytes for part in parts))


def plan_shards(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Group consecutive tensors into shards of at most `shard_bytes`; a larger tensor gets its own."""
    shards: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not shards or (size and size + spec.nbytes > shard_bytes):
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    """Return the file name of shard `index` (from 0) of `count`."""
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_checkpoint(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, Path] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write all tensors, which are held in memory, into `directory` and return it.

    `files` (name -> source) are copied next to the weights byte for byte. Raises UserError when the directory exists
    and is not empty, or a tensor's name occurs twice.
    """
    held = list(tensors)
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held]
    with output_folder(directory, overwrite=overwrite) as work:
        copy_files(work, files or {})
        with CheckpointWriter(work, specs, shard_bytes=shard_bytes) as writer:
            for name, tensor in held:
                writer.write(name, tensor)
    return Path(directory)
