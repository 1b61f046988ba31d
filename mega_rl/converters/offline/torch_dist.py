"""Distributed checkpoints of Megatron-Core (format torch_dist): their chunks, read and written without a model.

`.metadata` says in which file and byte range each chunk of each tensor lies; a chunk is a file of torch.save. torch and
Megatron-Core unpickle `.metadata` without limits, so it is read here by an unpickler that knows only the names that
belong there. Chunks are opened with `weights_only` on the meta device: only their descriptions are read.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import _create_file_view

from mega_rl.converters.safetensors.reader import DTYPE_NAMES
from mega_rl.errors import UserError, UserErrors
from mega_rl.untrusted import is_plain_path, shorten

METADATA_FILE, CONFIG_FILE, COMMON_FILE = ".metadata", "metadata.json", "common.pt"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
MAX_METADATA_BYTES = 1 << 30


class Chunk(NamedTuple):
    """A box of a tensor and the bytes of the file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class DistTensor(NamedTuple):
    """A tensor that is stored in boxes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> tuple[dict[str, DistTensor], tuple[str, ...]]:
    """Return (tensors by key, keys of other objects) of a checkpoint.

    Raises UserError when the folder is no such checkpoint or its metadata is damaged or holds anything but metadata,
    UserErrors listing every tensor with a wrong chunk.
    """
    with _naming(folder / CONFIG_FILE):
        backend = json.loads((folder / CONFIG_FILE).read_bytes())["sharded_backend"]
    if backend != "torch_dist":
        raise UserError(
            f"{folder / CONFIG_FILE}: sharded_backend={backend!r}, only torch_dist can be read; save it in that format"
        )
    path = folder / METADATA_FILE
    tensors, others, problems = {}, [], []
    size_of = cache(lambda file: file.stat().st_size if file.is_file() else None)
    with _naming(path), path.open("rb") as file:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"more than {MAX_METADATA_BYTES} bytes")
        metadata = _MetadataUnpickler(file).load()
        # The index of an object that is not a tensor has no offset.
        places = {(i.fqn, tuple(vars(i).get("offset") or ())): place for i, place in metadata.storage_data.items()}
        for key, entry in metadata.state_dict_metadata.items():
            if type(entry).__name__ == "BytesStorageMetadata":
                others.append(str(key))
                continue
            try:
                tensors[str(key)] = _tensor_of(key, entry, places, folder, size_of)
            except ValueError as error:
                problems.append(f"{path}: {key}: {error}; save the checkpoint again")
    if problems:
        raise UserErrors(problems)
    return tensors, tuple(others)


@contextmanager
def _naming(where: Path | str) -> Iterator[None]:
    """Turn what reading a damaged file raises into UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); is the checkpoint complete?") from error
    except Exception as error:
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 600)
        raise UserError(f"{where}: damaged ({reason}); save the checkpoint again") from error


class _Record:
    """An unpickled object: the arguments and the state that the pickle gives it, no behaviour.

    `__setstate__` keeps a pickle from changing the class itself.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            self.args = state
        else:
            vars(self).update((name, value) for name, value in state.items() if isinstance(name, str))


_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo",
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "pathlib": "Path PosixPath PurePosixPath WindowsPath",
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): type(name, (_Record,), {}) for module, names in _RECORDS.items() for name in names.split()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPE_NAMES},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
}


class _MetadataUnpickler(pickle._Unpickler):
    """Build metadata and nothing else.

    It is the unpickler in Python, which is slower: the one in C lets a few bytes of a file reserve gigabytes of memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of an allowed name."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"asks for {module}.{name}, which no metadata holds and which is not loaded; "
                "use a checkpoint from a source that you trust"
            )
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references: metadata refers to nothing outside of it."""
        raise pickle.UnpicklingError("a reference to data outside of the file")


def _tensor_of(
    key: str,
    entry: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
    folder: Path,
    size_of: Callable[[Path], int | None],
) -> DistTensor:
    """Return a tensor of the metadata with its chunks. Raises ValueError for the first wrong chunk."""
    dtype, size = entry.properties.args[0], tuple(entry.size)
    if not isinstance(dtype, torch.dtype) or not _are_sizes(size):
        raise ValueError("is not a tensor")
    chunks = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        inside = _are_sizes(offsets, sizes) and len(offsets) == len(sizes) == len(size)
        if not inside or any(low + count > whole for low, count, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a chunk of offsets={offsets}, sizes={sizes} reaches outside of {list(size)}")
        if (key, offsets) not in places:
            raise ValueError(f"no file is named for the chunk at {offsets}")
        place = places[key, offsets]
        name, length = place.relative_path, place.length
        if not is_plain_path(name):
            raise ValueError(f"file {name!r} is not a relative path inside the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise ValueError("is compressed or encrypted, which is not supported")
        if not _are_sizes([place.offset, length]) or length < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{length!r} bytes at {place.offset!r} of {name} cannot hold {list(sizes)} of {dtype}")
        file_size = size_of(folder / name)
        if file_size is None or place.offset + length > file_size:
            fault = "is missing" if file_size is None else f"is truncated: {file_size} bytes"
            raise ValueError(f"{folder / name} {fault}")
        chunks.append(Chunk(offsets, sizes, folder / name, place.offset, length))
    return DistTensor(key, dtype, size, tuple(chunks))


def _are_sizes(*values: Sequence[Any]) -> bool:
    return all(type(size) is int and size >= 0 for value in values for size in value)


def start_of(tensor: DistTensor, chunk: Chunk) -> int:
    """Return the byte of the file at which a chunk's elements begin.

    Raises UserError when the bytes are no contiguous tensor of the size and type that the metadata gives.
    """
    with _naming(f"{chunk.file}: {tensor.key} at byte {chunk.offset}"), chunk.file.open("rb") as file:
        # On the meta device torch reads no element and keeps the place of the elements in the file.
        view = _create_file_view(file, chunk.offset, chunk.length)
        stored = torch.load(cast(IO[bytes], view), map_location="meta", weights_only=True)
        if (stored.dtype, stored.shape) != (tensor.dtype, chunk.sizes) or not stored.is_contiguous():
            raise ValueError(f"holds {stored}, the metadata says {tensor.dtype} {list(chunk.sizes)}")
        start: int = stored.untyped_storage()._checkpoint_offset + stored.storage_offset() * stored.itemsize
        if not 0 <= start <= chunk.length - stored.nbytes:
            raise ValueError("the elements reach past the end")
        return chunk.offset + start


class Written(NamedTuple):
    """The place of a written chunk, for `.metadata`."""

    key: str
    place: tuple[int, ...]  # the parameter's place in the leading dimensions
    file: str
    offset: int
    length: int


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, which is flushed to the disk at the end."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_chunk(file: IO[bytes], key: str, place: tuple[int, ...], content: Tensor | list[None]) -> Written:
    """Append one parameter, to become `key`[place], or another object, to a `new_file`; makes no second copy."""
    start = file.tell()
    if isinstance(content, Tensor):
        content = content.view((1,) * len(place) + tuple(content.shape))
    torch.save(content, file)
    return Written(key, place, Path(file.name).name, start, file.tell() - start)


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    written: Sequence[Written],
    extra_states: Iterable[str],
) -> None:
    """Write the metadata that makes a folder's files a checkpoint; `.metadata`, written last, completes it.

    `tensors` are (dtype, global shape) by key. The modules of `extra_states` get an empty state.
    """
    with new_file(folder / "__extra_0.distcp") as file:
        nothing = write_chunk(file, "", (), [None])
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[dcp.MetadataIndex, dcp_filesystem._StorageInfo] = {}
    # One object per name: a pickle of equal strings depends on whether they are one object.
    names = {name: name for name in (*tensors, *sorted({item.file for item in written}))}
    for item in sorted(written):
        key, shape = names[item.key], tensors[item.key][1]
        rest = shape[len(item.place) :]
        offsets = torch.Size((*item.place, *(0 for _ in rest)))
        chunks[key].append(dcp.ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in item.place), *rest))))
        storage[dcp.MetadataIndex(key, offsets)] = dcp_filesystem._StorageInfo(
            names[item.file], item.offset, item.length
        )
    state: dict[str, Any] = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), chunks[key])
        for key, (dtype, shape) in sorted(tensors.items())
    }
    for key in extra_states:
        state[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = dcp_filesystem._StorageInfo(nothing.file, nothing.offset, nothing.length)
    torch.save({}, folder / COMMON_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG), encoding="utf-8")
    with new_file(folder / METADATA_FILE) as file:
        pickle.dump(dcp.Metadata(state_dict_metadata=state, storage_data=storage), file)
