"""The `.metadata` of a distributed checkpoint: a pickle, read without executing anything.

The unpickler knows the few names that belong there and builds plain records for them, so no class of a library is
made, changed or called; any other name is an error. Everything that the records say is then checked.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import torch

from mega_rl.errors import UserError, UserErrors
from mega_rl.storage.safetensors_reader import DTYPE_NAMES

METADATA_FILE, CONFIG_FILE = ".metadata", "metadata.json"
MAX_METADATA_BYTES = 1 << 30


class Chunk(NamedTuple):
    """A box of a tensor and the bytes of the torch.save file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class DistTensor:
    """A tensor of a distributed checkpoint."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> tuple[dict[str, DistTensor], tuple[str, ...]]:
    """Return (tensors by key, keys of other objects) of a checkpoint.

    Raises UserError when the folder is no such checkpoint or its metadata is damaged or holds anything but metadata,
    UserErrors listing every chunk whose place is wrong.
    """
    path = folder / METADATA_FILE
    _check_config(folder)
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise UserError(f"{path}: more than {MAX_METADATA_BYTES} bytes; this is not a checkpoint's metadata")
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, str(path)).load()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is the checkpoint complete?") from error
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); save the checkpoint again") from error
    return _tensors_of(metadata, folder)


def _check_config(folder: Path) -> None:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_bytes())
        backend = config["sharded_backend"]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is the checkpoint complete?") from error
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error!r}); save the checkpoint again") from error
    if backend != "torch_dist":
        raise UserError(f"{path}: sharded_backend={backend!r}, only torch_dist can be read; save it in that format")


class _Record:
    """An unpickled object: the arguments and the state that the pickle gives it, no behaviour.

    `__setstate__` keeps a pickle from changing the class itself.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update((name, value) for name, value in state.items() if isinstance(name, str))
        elif isinstance(state, tuple):
            self.args = state


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Properties(_Record):
    @property
    def dtype(self) -> Any:
        """The first of five fields that are pickled without their names."""
        return self.args[0] if self.args else None


def _layout(name: Any) -> str:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"tensor layout {name!r}")
    return "strided"


DTYPE_GLOBALS = {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPE_NAMES}
_DCP, _MCORE = "torch.distributed.checkpoint", "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: Mapping[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    **{
        (f"{_DCP}.metadata", name): _Record
        for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    **{
        (f"{_DCP}.planner", name): _Record
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
    **{(_MCORE, name): _Record for name in ("MCoreMetadata", "MCoreSavePlan")},
    **{("pathlib", name): _Record for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
    **DTYPE_GLOBALS,
}


# The unpickler in Python, a little slower: the one in C lets a few bytes of a file reserve gigabytes of memory.
SafeUnpickler = pickle._Unpickler


class _MetadataUnpickler(SafeUnpickler):
    """Builds metadata and nothing else; any other name is a UserError."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The object of an allowed name."""
        return allowed(_ALLOWED, module, name, self._where)

    def persistent_load(self, pid: Any) -> Any:
        """Metadata refers to nothing outside of it."""
        raise pickle.UnpicklingError("a reference to data outside of the file")


def allowed(names: Mapping[tuple[str, str], Any], module: str, name: str, where: str) -> Any:
    """The object of a name that a pickle asks for. Raises UserError for any name that is not listed."""
    try:
        return names[module, name]
    except KeyError:
        raise UserError(
            f"{where}: asks for {module}.{name}, which does not belong in a checkpoint's metadata and is not loaded; "
            "use a checkpoint from a source that you trust, saved by Megatron-Core"
        ) from None


def _tensors_of(metadata: Any, folder: Path) -> tuple[dict[str, DistTensor], tuple[str, ...]]:
    """Return (tensors, keys of other objects) of the unpickled metadata, each field checked."""
    path = folder / METADATA_FILE
    state = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, _Metadata) or not isinstance(state, dict) or not isinstance(storage, dict):
        raise UserError(f"{path}: damaged, lists no tensors; save the checkpoint again")
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in storage.items():
        name, offset = _field(index, "fqn"), _field(index, "offset")
        if isinstance(name, str) and is_sizes(offset):
            places[name, tuple(offset)] = info
    problems: list[str] = []
    tensors, others = {}, []
    sizes: dict[Path, int] = {}
    for key, entry in state.items():
        if not isinstance(key, str):
            problems.append(f"{path}: {key!r} is not a name")
        elif isinstance(entry, _Bytes):
            others.append(key)
        else:
            tensor = _tensor_of(key, entry, places, folder, sizes, problems)
            if tensor is not None:
                tensors[key] = tensor
    if problems:
        raise UserErrors(problems)
    return tensors, tuple(others)


def _tensor_of(
    key: str,
    entry: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
    folder: Path,
    file_sizes: dict[Path, int],
    problems: list[str],
) -> DistTensor | None:
    where = f"{folder / METADATA_FILE}: {key}"
    dtype = _field(_field(entry, "properties"), "dtype")
    size, chunks = _field(entry, "size"), _field(entry, "chunks")
    if not isinstance(entry, _Tensor) or not isinstance(dtype, torch.dtype):
        problems.append(f"{where}: is not a tensor")
        return None
    if not is_sizes(size) or not isinstance(chunks, list):
        problems.append(f"{where}: has no sizes or no chunks")
        return None
    checked = []
    for chunk in chunks:
        fault = _chunk_fault(chunk, size)
        place = None if fault else places.get((key, tuple(chunk.offsets)))
        if not fault and place is None:
            fault = "no file is named for it"
        if not fault:
            fault = _place_fault(place, prod(chunk.sizes) * dtype.itemsize, folder, file_sizes)
        if fault or place is None:
            problems.append(f"{where}: a chunk is wrong ({fault}); save the checkpoint again")
            return None
        file = folder / place.relative_path
        checked.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, place.offset, place.length))
    return DistTensor(key, dtype, tuple(size), tuple(checked))


def _chunk_fault(chunk: Any, size: Sequence[int]) -> str:
    offsets, sizes = _field(chunk, "offsets"), _field(chunk, "sizes")
    if not is_sizes(offsets) or not is_sizes(sizes) or not len(offsets) == len(sizes) == len(size):
        return f"offsets={offsets!r}, sizes={sizes!r} in a tensor of {list(size)}"
    if any(low + count > whole for low, count, whole in zip(offsets, sizes, size, strict=True)):
        return f"offsets={list(offsets)}, sizes={list(sizes)} reach outside of {list(size)}"
    return ""


def _place_fault(place: Any, nbytes: int, folder: Path, file_sizes: dict[Path, int]) -> str:
    name, offset, length = (_field(place, field) for field in ("relative_path", "offset", "length"))
    if not _is_inside(name):
        return f"file {name!r} is not a relative path inside the checkpoint"
    if _field(place, "transform_descriptors"):
        return "it is compressed or encrypted, which is not supported"
    if not is_sizes([offset, length]):
        return f"offset={offset!r}, length={length!r} are not sizes"
    file = folder / name
    if file not in file_sizes:
        file_sizes[file] = file.stat().st_size if file.is_file() else -1
    if file_sizes[file] < 0:
        return f"{file} is missing"
    if offset + length > file_sizes[file]:
        return f"{file} is truncated: {file_sizes[file]} bytes, needs {offset + length}"
    return "" if length >= nbytes else f"{length} bytes of {file} cannot hold {nbytes}"


def _field(value: Any, name: str) -> Any:
    """Return a field of an unpickled object, which may lack it."""
    return getattr(value, name, None)


def is_sizes(value: Any) -> bool:
    """Return whether a value from a file is a sequence of whole numbers of at least 0."""
    return isinstance(value, tuple | list) and all(type(v) is int and v >= 0 for v in value)


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
