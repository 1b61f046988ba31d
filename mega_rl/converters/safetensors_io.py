"""Safetensors files: checked headers, reads of row ranges, and a streaming writer of sharded checkpoints.

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). The header is parsed once and distrusted: sizes, offsets and names
are checked before a byte of data is read, and nothing in a file is ever executed.

Reads use pread into the memory of the tensor that is returned, not a memory map: a map reads ahead far beyond a slice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mega_rl.errors import UserError, UserErrors

MAX_HEADER_BYTES = 100_000_000
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Columns are cut out of blocks of whole rows of this size, so that the scratch memory stays bounded.
_SCRATCH_BYTES = 16 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts from the start of the file."""

    name: str
    dtype: str  # safetensors' spelling: "BF16"
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one file by name.

    Raises UserError when the file is too short or not in this format, UserErrors listing every entry whose type, shape
    or offsets are wrong: the tensors must fill the rest of the file without gap or overlap.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length > MAX_HEADER_BYTES:
                raise UserError(
                    f"{path}: header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; not a safetensors file?"
                )
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if len(prefix) < 8 or len(text) < length:
        raise UserError(
            f"{path}: truncated, {size} bytes do not hold the header of {length} bytes; fetch the file again"
        )
    entries = _decode_json(text, path)
    entries.pop("__metadata__", None)
    start = 8 + length
    problems: list[str] = []
    tensors = {}
    for name, entry in entries.items():
        info = _tensor_info(name, entry, path, start, problems)
        if info is not None:
            tensors[name] = info
    problems = problems or _extent_faults(tensors.values(), path, start, size)
    if problems:
        raise UserErrors(problems)
    return tensors


class CheckpointReader:
    """Reads tensors, or rectangles of them, of a checkpoint: one safetensors file or a directory (sharded or not).

    Raises UserError or UserErrors from the constructor when files are missing, damaged or contradict the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = _open_checkpoint(self.path)
        self.bytes_read = 0  # payload bytes asked of the file system; headers excluded
        self._fds: dict[Path, int] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; the reader may be used again and reopens them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, name: str) -> Tensor:
        """The whole tensor, in its shape and dtype on disk."""
        info = self.tensors[name]
        return self._read_bytes(info, 0, info.nbytes).view(DTYPES[info.dtype]).view(info.shape)

    def read_rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows [low, high) as [high - low, columns], reading exactly their bytes; a vector is one column wide.

        Leading dimensions count as rows: a tensor [E, F, H] has E * F rows of H columns.
        """
        info = self.tensors[name]
        columns = _columns(info)
        width = columns * DTYPES[info.dtype].itemsize
        return self._read_bytes(info, low * width, high * width).view(DTYPES[info.dtype]).view(high - low, columns)

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Rows and columns as [rows, columns].

        A cut of the columns still reads whole rows, in blocks of bounded size: a row's part is too short for the disk
        to gain by skipping, and the ranks of a node find what they skip for each other in the page cache.
        """
        info = self.tensors[name]
        columns = _columns(info)
        if cols == (0, columns):
            return self.read_rows(name, *rows)
        result = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=DTYPES[info.dtype])
        step = max(1, _SCRATCH_BYTES // (columns * DTYPES[info.dtype].itemsize))
        for low in range(rows[0], rows[1], step):
            high = min(low + step, rows[1])
            result[low - rows[0] : high - rows[0]] = self.read_rows(name, low, high)[:, cols[0] : cols[1]]
        return result

    def _read_bytes(self, info: TensorInfo, low: int, high: int) -> Tensor:
        """Bytes [low, high) of a tensor as a vector of uint8."""
        assert 0 <= low <= high <= info.nbytes, (info, low, high)
        result = torch.empty(high - low, dtype=torch.uint8)
        view = result.numpy().data
        fd = self._fds.get(info.file)
        if fd is None:
            fd = self._fds[info.file] = os.open(info.file, os.O_RDONLY)
        done = 0
        while done < high - low:
            count = os.preadv(fd, [view[done:]], info.offset + low + done)
            if count == 0:
                raise UserError(
                    f"{info.file}: ends inside {info.name}; it was complete when opened, is it being rewritten?"
                )
            done += count
        self.bytes_read += done
        return result


def _open_checkpoint(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a file or directory; a single file wins over an index, as in transformers."""
    if path.is_file():
        return read_header(path)
    if not path.is_dir():
        raise UserError(f"checkpoint {path}: no such file or directory")
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    if (path / INDEX_FILE).is_file():
        return _read_sharded(path)
    hint = ""
    if any(path.glob("pytorch_model*.bin")):
        hint = "; pickled .bin weights are never loaded, save them with save_pretrained(safe_serialization=True) first"
    raise UserError(f"checkpoint {path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _read_sharded(root: Path) -> dict[str, TensorInfo]:
    """Tensors that the index lists, each found in its shard; every contradiction is in one error."""
    index = root / INDEX_FILE
    weight_map = _decode_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{index}: weight_map is {type(weight_map).__name__}, must be an object from tensor to file name"
        )
    problems: list[str] = []
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if _is_inside(shard):
            by_shard.setdefault(shard, []).append(name)
        else:
            problems.append(f"{index}: {name} is in {shard!r}, must be a relative path inside the checkpoint")
    tensors: dict[str, TensorInfo] = {}
    for shard, names in sorted(by_shard.items()):
        if not (root / shard).is_file():
            problems.append(
                f"{root / shard}: no such file, but the index puts {len(names)} tensors there ({names[0]}, ...)"
            )
            continue
        try:
            header = read_header(root / shard)
        except UserErrors as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error))
        else:
            problems += [
                f"{root / shard}: lacks {name}, which the index puts there" for name in names if name not in header
            ]
            tensors.update((name, header[name]) for name in names if name in header)
    if problems:
        raise UserErrors(problems)
    return tensors


def _is_inside(shard: Any) -> bool:
    """Whether a path of the index names a file below the checkpoint.

    Judged by its text: in a hub cache the files themselves are links that lead out of the folder.
    """
    if not isinstance(shard, str) or not shard or "\\" in shard or "\0" in shard:
        return False
    path = PurePosixPath(shard)
    return not path.is_absolute() and ".." not in path.parts


def _decode_json(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object without repeated keys."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, must be an object")
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return result


def _tensor_info(name: str, entry: Any, path: Path, start: int, problems: list[str]) -> TensorInfo | None:
    """One header entry, None after adding to `problems` what is wrong with it."""
    where = f"{path}: {name}"
    if not isinstance(entry, dict):
        problems.append(f"{where}: is a JSON {type(entry).__name__}, must be an object")
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.append(f"{where}: dtype={dtype!r} is unknown, must be one of {', '.join(DTYPES)}")
    elif not _is_sizes(shape):
        problems.append(f"{where}: shape={shape!r} must be a list of sizes")
    elif not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{where}: data_offsets={offsets!r} must be [begin, end]")
    else:
        nbytes, need = offsets[1] - offsets[0], prod(shape) * DTYPES[dtype].itemsize
        if nbytes == need:
            return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], nbytes)
        problems.append(f"{where}: {nbytes} bytes, but shape {shape} of {dtype} takes {need}")
    return None


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def _extent_faults(tensors: Iterable[TensorInfo], path: Path, start: int, size: int) -> list[str]:
    """What keeps the tensors from filling the file exactly."""
    problems = []
    at, before = start, "the header"
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != at:
            verb = "overlaps" if info.offset < at else "leaves a gap after"
            problems.append(f"{path}: {info.name} {verb} {before} (begins at byte {info.offset}, expected {at})")
        at, before = max(at, info.offset + info.nbytes), info.name
    if not problems and at > size:
        problems.append(f"{path}: truncated, {size} bytes of the {at} that its header lists; fetch the file again")
    elif not problems and at < size:
        problems.append(f"{path}: {size - at} bytes follow the last tensor; fetch the file again")
    return problems


def _columns(info: TensorInfo) -> int:
    """Size of the last dimension of a matrix, 1 for a vector or scalar."""
    return info.shape[-1] if len(info.shape) > 1 else 1
