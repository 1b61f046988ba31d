"""Distributed checkpoints of Megatron-Core (format torch_dist): their chunks, read and written without a model.

A checkpoint is a folder of PyTorch's distributed format: `.metadata` says in which file and byte range each chunk of
each tensor lies, and every chunk is a file of torch.save in itself. Chunks are not unpickled as tensors: once their
description is checked, their bytes are read like any other file's.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp

from mega_rl.converters.offline.dist_metadata import (
    CONFIG_FILE,
    DTYPE_GLOBALS,
    METADATA_FILE,
    Chunk,
    DistTensor,
    SafeUnpickler,
    allowed,
    is_sizes,
)
from mega_rl.errors import UserError
from mega_rl.storage.safetensors_reader import TensorInfo

COMMON_FILE = "common.pt"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class Written(NamedTuple):
    """Place of a written chunk, for `.metadata`."""

    key: str
    place: tuple[int, ...]  # of the parameter in the leading dimensions
    file: str
    offset: int
    length: int


def chunk_info(name: str, tensor: DistTensor, chunk: Chunk, *, as_vector: bool) -> TensorInfo:
    """Return the place of a chunk's elements, as a matrix [all but the last dimension, last dimension] or vector.

    Raises UserError when the bytes are no contiguous tensor of the size and type that the metadata gives.
    """
    where = f"{chunk.file}: {tensor.key} at byte {chunk.offset}"
    try:
        with chunk.file.open("rb") as file:
            view = _Slice(file, chunk.offset, chunk.length)
            start = _data_start(view, tensor.dtype, chunk.sizes, where)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged archive raises anything
        raise UserError(f"{where}: damaged ({type(error).__name__}: {error}); save the checkpoint again") from error
    numel = prod(chunk.sizes)
    shape = (numel,) if as_vector else (prod(chunk.sizes[:-1]), chunk.sizes[-1])
    return TensorInfo(
        name=name,
        dtype=tensor.dtype,
        shape=shape,
        file=chunk.file,
        offset=chunk.offset + start,
        nbytes=numel * tensor.dtype.itemsize,
    )


class _Slice(io.RawIOBase):
    """A byte range of a file, as a file object."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _data_start(view: _Slice, dtype: torch.dtype, sizes: tuple[int, ...], where: str) -> int:
    """Return the first byte of the elements in a torch.save file of one contiguous tensor of this dtype and size."""
    with zipfile.ZipFile(view) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if names["data.pkl"].file_size > 1 << 16:
            raise ValueError("the description is too long for one tensor")
        stored = _TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"])), where).load()
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise ValueError("not in little-endian byte order")
    if not isinstance(stored, _StoredTensor):
        raise ValueError("holds no tensor")
    expected = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
    strides = [(a, b) for a, b, n in zip(stored.stride, expected, sizes, strict=True) if n > 1]
    if stored.dtype != dtype or tuple(stored.size) != sizes or any(a != b for a, b in strides):
        raise ValueError(f"holds {stored}, the metadata says {dtype} {list(sizes)}")
    data = names[f"data/{stored.storage}"]
    nbytes = prod(sizes) * dtype.itemsize
    skipped = stored.storage_offset * dtype.itemsize
    if data.compress_type != zipfile.ZIP_STORED or data.file_size < skipped + nbytes:
        raise ValueError("the elements are compressed or too few")
    view.seek(data.header_offset)
    header = view.read(30)
    if header is None or len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError("the archive's entries are not where its directory says")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start: int = data.header_offset + 30 + name_length + extra_length + skipped
    if start + nbytes > view.seek(0, io.SEEK_END):
        raise ValueError("the elements reach past the end")
    return start


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _StoredTensor(NamedTuple):
    """Description of a tensor in a torch.save file."""

    dtype: torch.dtype
    storage: str
    storage_offset: int
    size: Sequence[int]
    stride: Sequence[int]


def _rebuild(storage: Any, storage_offset: Any, size: Any, stride: Any, *rest: Any) -> _StoredTensor:
    """Replace torch._utils._rebuild_tensor_v2: return the description, make no tensor."""
    if not isinstance(storage, _Storage) or not is_sizes([storage_offset]) or not is_sizes(size):
        raise ValueError("describes no plain tensor")
    if not is_sizes(stride) or len(stride) != len(size):
        raise ValueError("describes no plain tensor")
    return _StoredTensor(storage.dtype, storage.key, storage_offset, size, stride)


def _rebuild_other(storage: Any, storage_offset: Any, size: Any, stride: Any, grad: Any, dtype: Any) -> _StoredTensor:
    """Replace torch._utils._rebuild_tensor_v3, for dtypes without a storage class."""
    stored = _rebuild(storage, storage_offset, size, stride)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("describes no plain tensor")
    return stored._replace(dtype=dtype)


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _StorageType(NamedTuple):
    dtype: torch.dtype


_TENSOR_NAMES: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_other,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **DTYPE_GLOBALS,
}


class _TensorUnpickler(SafeUnpickler):
    """Unpickler of the description of one tensor; any other name is a UserError."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of an allowed name."""
        return allowed(_TENSOR_NAMES, module, name, self._where)

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a tensor's storage from ("storage", type, key, device, number of elements)."""
        kind, storage_type, key, _, _ = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise ValueError("refers to something that is no storage")
        return _Storage(storage_type.dtype, key)


class ChunkFile:
    """Writer of chunks one after the other into a file of a checkpoint."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._file = (folder / name).open("xb")

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, key: str, place: tuple[int, ...], tensor: Tensor) -> Written:
        """Append one parameter, to become `key`[place]; holds no second copy of it."""
        start = self._file.tell()
        torch.save(tensor.view((1,) * len(place) + tuple(tensor.shape)), self._file)
        return Written(key, place, self.name, start, self._file.tell() - start)

    def write_nothing(self) -> Written:
        """Append the content of an empty extra state."""
        start = self._file.tell()
        torch.save([None], self._file)
        return Written("", (), self.name, start, self._file.tell() - start)


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    written: Sequence[Written],
    extra_states: Iterable[str],
    nothing: Written,
) -> None:
    """Write the metadata that makes the files of a folder a checkpoint; `.metadata` last, which completes it.

    `tensors` are (dtype, global shape) by key; `extra_states` all have the content `nothing`.
    """
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[dcp.MetadataIndex, dcp_filesystem._StorageInfo] = {}
    # One object per name: what came from another process must not change the pickle's bytes.
    names = {name: name for name in (*tensors, *sorted({item.file for item in written}))}
    for item in sorted(written):
        key, shape = names[item.key], tensors[item.key][1]
        rest = len(shape) - len(item.place)
        offsets = torch.Size((*item.place, *(0,) * rest))
        sizes = torch.Size((*(1,) * len(item.place), *shape[len(item.place) :]))
        chunks[key].append(dcp.ChunkStorageMetadata(offsets, sizes))
        index = dcp.MetadataIndex(key, offsets)
        storage[index] = dcp_filesystem._StorageInfo(names[item.file], item.offset, item.length)
    state: dict[str, Any] = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), chunks[key])
        for key, (dtype, shape) in sorted(tensors.items())
    }
    for key in extra_states:
        state[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = dcp_filesystem._StorageInfo(nothing.file, nothing.offset, nothing.length)
    torch.save({}, folder / COMMON_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG), encoding="utf-8")
    with (folder / METADATA_FILE).open("xb") as file:
        pickle.dump(dcp.Metadata(state_dict_metadata=state, storage_data=storage), file)
        file.flush()
        os.fsync(file.fileno())


def chunks_by_slab(tensor: DistTensor, num_lead: int) -> dict[tuple[int, ...], list[tuple[Chunk, int]]]:
    """Return for every index into the leading dimensions the chunks that hold it, with its position in each."""
    chunks: dict[tuple[int, ...], list[tuple[Chunk, int]]] = {}
    for chunk in tensor.chunks:
        ranges = [range(low, low + n) for low, n in zip(chunk.offsets, chunk.sizes, strict=True)][:num_lead]
        for position, index in enumerate(product(*ranges)):
            chunks.setdefault(index, []).append((chunk, position))
    return chunks
