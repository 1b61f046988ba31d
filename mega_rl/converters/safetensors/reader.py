"""Reader of safetensors checkpoints: whole tensors, rows, and rectangles of them.

Whole rows are read with preadv straight into their targets. A cut of the columns is copied out of small windows of a
memory map, so that a process takes only the bytes it needs; the kernel reads the bytes between them once for all ranks
of a node.

A quantised matrix is presented as one bfloat16 tensor (`quantised`). The language model in a checkpoint of images and
text is presented under the names that it has on its own: `model.language_model.norm.weight` as `model.norm.weight`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_rl.converters.safetensors.header import (
    PLAIN_NAMES,
    checkpoint_entries,
    matrix_shape,
    name_prefixes,
    renamed,
)
from mega_rl.converters.safetensors.quantised import BYTES_PER_VALUE, Packed, block_size, decode, pair
from mega_rl.disk import IOV_MAX
from mega_rl.errors import UserError

# Bytes of a map, and of decoded blocks, that one thread holds at a time. Smaller maps cost more than they save.
_WINDOW_BYTES = 8 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


_Bytes: TypeAlias = npt.NDArray[np.uint8]


class TensorInfo(NamedTuple):
    """Dtype, shape and place of a tensor on disk; `offset` counts from the file's start.

    With `packed` the bytes are quantised; `dtype` and `shape` are those of the decoded tensor.
    """

    name: str  # on disk
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int  # on disk, scales excluded
    packed: Packed | None = None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a file or checkpoint by name. Raises as `checkpoint_entries`."""
    return {
        name: TensorInfo(name, DTYPES[entry.dtype], entry.shape, entry.file, entry.offset, entry.nbytes)
        for name, entry in checkpoint_entries(path).items()
    }


class CheckpointReader:
    """Reader of a checkpoint's tensors or their rectangles: a safetensors file or directory (sharded or not).

    A tensor is seen as a matrix: leading dimensions count as rows, so [E, F, H] has E * F rows of H columns; a vector
    is one column wide. Reads may come from several threads. Raises UserError or UserErrors from the constructor when
    files are missing, damaged or contradict the index, or when scales do not fit a quantised matrix.
    """

    def __init__(self, path: str | Path, *, tensors: Mapping[str, TensorInfo] | None = None) -> None:
        self.path = Path(path)
        # Given tensors are read from their own files; `path` is not opened.
        self.prefixes = PLAIN_NAMES  # how the names of the language model begin on disk
        self.tensors: dict[str, TensorInfo] = dict(tensors or {})
        if tensors is None:
            infos = pair(read_header(self.path), block_size(self.path))
            self.prefixes = name_prefixes(infos)
            self.tensors = {renamed(name, self.prefixes, PLAIN_NAMES): info for name, info in infos.items()}
            if len(self.tensors) < len(infos):
                rule = f"begin with {self.prefixes[0]}, or none"
                raise UserError(f"{self.path}: holds two language models; all names of one must {rule}")
        # Names outside of the language model, as those of a tower for images.
        self.others = sorted(name for name, info in self.tensors.items() if not info.name.startswith(self.prefixes))
        # Payload bytes that this process copied, without headers and without the rest of cut rows.
        self.bytes_read = 0
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; later reads reopen them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def position(self, name: str) -> tuple[str, int]:
        """Return (file, offset) of a tensor; reads in this order run forwards through the files."""
        info = self.tensors[name]
        return str(info.file), info.offset

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, in its shape."""
        info = self.tensors[name]
        result = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, 0, (0, _columns(info)), [result.view(-1, _columns(info))] if result.numel() else [])
        return result

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Return rows and columns, each (low, high), as [rows, columns] in the tensor's dtype."""
        result = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=self.tensors[name].dtype)
        self.read_into(name, rows[0], cols, [result])
        return result

    def read_into(self, name: str, row: int, cols: tuple[int, int], targets: Sequence[Tensor]) -> None:
        """Read rows from `row` on, columns [low, high) of them, into `targets` one after the other.

        Targets are [rows_i, high - low] of the tensor's dtype on the CPU, each row contiguous. Reads exactly their
        bytes; contiguous targets of whole rows are filled in one system call. Raises UserError when the file has
        become shorter, or cannot be read.
        """
        info = self.tensors[name]
        targets = [target for target in targets if target.numel()]
        rows = sum(len(target) for target in targets)
        width = _columns(info)
        assert 0 <= cols[0] <= cols[1] <= width, (info, cols)
        assert not rows or (row >= 0 and (row + rows) * width <= prod(info.shape)), (info, row, rows)
        assert all(t.dtype == info.dtype and t.shape[1] == cols[1] - cols[0] for t in targets), (info, cols)
        if info.packed is not None:
            self._decode(info.packed, row, cols, targets)
        else:
            self._read_bytes(info, row, cols, [as_bytes(target) for target in targets])

    def _decode(self, packed: Packed, row: int, cols: tuple[int, int], targets: Sequence[Tensor]) -> None:
        """Fill `targets` with the values of a quantised matrix."""

        def stored(info: TensorInfo, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
            result = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=info.dtype)
            self._read_bytes(info, rows[0], cols, [as_bytes(result)])
            return result

        step = max(1, _WINDOW_BYTES // (BYTES_PER_VALUE * max(1, cols[1] - cols[0])))
        for part in targets:
            for low in range(0, len(part), step):
                target = part[low : low + step]
                target.copy_(decode(packed, (row + low, row + low + len(target)), cols, stored))
            row += len(part)

    def _read_bytes(self, info: TensorInfo, row: int, cols: tuple[int, int], views: Sequence[_Bytes]) -> None:
        """Read rows from `row` on, columns [low, high) of them, into the byte views of targets."""
        if all(view.flags.c_contiguous for view in views) and cols == (0, _columns(info)):
            self._read_rows(info, row, views)
        else:
            for view in views:
                self._read_columns(info, row, cols[0] * info.dtype.itemsize, view)
                row += len(view)
        with self._lock:
            self.bytes_read += sum(view.nbytes for view in views)

    def _read_rows(self, info: TensorInfo, row: int, views: Sequence[_Bytes]) -> None:
        fd = self._open(info.file)
        position = info.offset + row * _columns(info) * info.dtype.itemsize
        buffers = [view.reshape(-1).data for view in views]
        while buffers:
            try:
                count = os.preadv(fd, buffers[:IOV_MAX], position)
            except OSError as error:
                raise UserError(f"{info.file}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise _shrunk(info)
            position += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]

    def _read_columns(self, info: TensorInfo, row: int, left: int, view: _Bytes) -> None:
        """Fill `view` with rows from `row` on, bytes [left, left + its width) of each.

        Maps windows of bounded size, since mapped pages count as memory of this process.
        """
        fd = self._open(info.file)
        width = _columns(info) * info.dtype.itemsize
        step = max(1, _WINDOW_BYTES // width)
        for low in range(0, len(view), step):
            part = view[low : low + step]
            start = info.offset + (row + low) * width
            skip = start % mmap.ALLOCATIONGRANULARITY
            try:
                window = mmap.mmap(
                    fd, skip + len(part) * width, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start - skip
                )
            except ValueError as error:  # the range is not in the file any more
                raise _shrunk(info) from error
            with window:
                source = np.frombuffer(window, np.uint8, offset=skip).reshape(len(part), width)
                np.copyto(part, source[:, left : left + part.shape[1]])
                del source  # a map with a view of it cannot be closed

    def _open(self, file: Path) -> int:
        fd = self._fds.get(file)
        if fd is not None:
            return fd
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise UserError(f"{file}: cannot be read ({error.strerror})") from error
            return self._fds[file]


def as_bytes(target: Tensor) -> _Bytes:
    """Return a matrix with contiguous rows as bytes that share its memory.

    Not by `Tensor.numpy`: that makes the storage one that can never be resized, and engines offload by resizing.
    """
    return np.from_dlpack(target.detach().view(torch.uint8)).view(np.uint8)


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as [elements * item size] uint8; copies only non-contiguous tensors."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal dtype, shape and bits: nan equals itself, -0 not 0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = bits(a), bits(b)
    if x.storage_offset() % 8 or y.storage_offset() % 8:
        return torch.equal(x, y)
    # Eight bytes at a time is several times faster.
    words = x.numel() // 8 * 8
    return torch.equal(x[:words].view(torch.int64), y[:words].view(torch.int64)) and torch.equal(x[words:], y[words:])


def _shrunk(info: TensorInfo) -> UserError:
    return UserError(f"{info.file}: ends inside {info.name}; it was complete when opened, is it being rewritten?")


def _columns(info: TensorInfo) -> int:
    return matrix_shape(info.shape)[1]
