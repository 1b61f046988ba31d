"""Reader of checkpoints: opening checks everything but the data; pieces are then read straight into tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from mega_rl.checkpoint.folders import is_step_folder, read_manifest, step_of
from mega_rl.checkpoint.format.coverage import is_inside, missing_elements, overlap
from mega_rl.checkpoint.format.headers import StoredPiece as StoredPiece
from mega_rl.checkpoint.format.headers import read_shard
from mega_rl.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from mega_rl.checkpoint.format.shards import CHUNK_BYTES, PieceSpec
from mega_rl.errors import UserError, UserErrors
from mega_rl.storage.safetensors_reader import as_bytes
from mega_rl.storage.strict_json import shorten
from mega_rl.storage.untrusted import RESUME_HINT, fault, limited, open_regular
from mega_rl.types import Box

MAX_THREADS = 8
_JOB_BYTES = 32 << 20  # that one thread checks at a time
_MAX_OPEN_FILES = 256
# A cut of rows is read row by row where rows lie this far apart, else with what is between them.
_FAR_BYTES = 32 << 10
_WINDOW_BYTES = 4 << 20  # of buffer for reads that cannot go straight into the target


class Checkpoint:
    """A complete checkpoint, readable from several threads. As a context manager it closes its files."""

    def __init__(self, folder: Path, manifest: Manifest, pieces: Mapping[str, list[StoredPiece]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.pieces = dict(pieces)  # by tensor; without elements, it may have none
        self._fds: dict[Path, int] = {}
        self._lock = Lock()

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open a folder and check everything but the data.

        COMMIT fits the manifest; the manifest names every shard in the folder, with its size and its header's checksum;
        every tensor of the manifest, and no other, is covered by pieces of its dtype, each element exactly once.
        Raises UserError or UserErrors.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"checkpoint {folder}: no such folder; {RESUME_HINT}")
        manifest = read_manifest(folder)
        if is_step_folder(folder) and step_of(folder) != manifest.step:
            raise UserError(fault(folder / MANIFEST_FILE, "step", manifest.step, "is not that of the folder's name"))
        problems = _strangers(folder, manifest)
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in manifest.tensors}
        for record in manifest.shards:
            try:
                for piece in read_shard(folder / record.file, record, manifest):
                    pieces[piece.spec.name].append(piece)
            except UserErrors as error:
                problems += error.problems
            except UserError as error:
                problems.append(str(error))
        problems = problems or _coverage_faults(folder, manifest, pieces)
        if problems:
            raise UserErrors(limited(problems, folder))
        return cls(folder, manifest, pieces)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; later reads reopen them."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def all_pieces(self) -> Iterator[StoredPiece]:
        """Yield every piece of every tensor."""
        for pieces in self.pieces.values():
            yield from pieces

    def verify(self, pieces: Iterable[StoredPiece]) -> None:
        """Read the bytes of pieces and compare their checksums. Raises UserErrors naming file, tensor, both sums."""
        jobs = _jobs(sorted(dict.fromkeys(pieces), key=lambda piece: (piece.file, piece.offset)))
        if not jobs:
            return
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)), len(jobs))) as pool:
            problems = [problem for faults in pool.map(self._data_faults, jobs) for problem in faults]
        if problems:
            raise UserErrors(limited(problems, self.folder))

    def read_into(self, piece: StoredPiece, inner: Box, target: Tensor) -> None:
        """Read `inner`, a box within a piece, into `target` [*inner.shape] of its dtype; compares no checksum.

        The target may be on any device and have any strides; only a contiguous one on the CPU needs no buffer. Raises
        UserError when the file ends or cannot be read.
        """
        spec = piece.spec
        assert (target.dtype, tuple(target.shape)) == (piece.dtype, tuple(inner.shape)), (piece, inner, target.shape)
        assert is_inside(PieceSpec(spec.name, spec.dtype, *inner), spec.shape), (piece, inner)
        if target.numel() == 0:
            return
        with self._open(piece.file) as fd:
            _read_box(fd, piece, inner, target.detach())

    def _data_faults(self, pieces: Sequence[StoredPiece]) -> list[str]:
        """Return the problems of the data of pieces, all of one file."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        problems: list[str] = []
        try:
            with self._open(pieces[0].file) as fd:
                for piece in pieces:
                    problems += _checksum_faults(fd, piece, buffer)
        except UserError as error:
            problems.append(str(error))
        return problems

    @contextmanager
    def _open(self, file: Path) -> Iterator[int]:
        """Open a file for reading; the first `_MAX_OPEN_FILES` stay open until `close`."""
        with self._lock:
            fd = self._fds.get(file)
            if fd is None and len(self._fds) < _MAX_OPEN_FILES:
                fd = self._fds[file] = open_regular(file)[0]
        if fd is not None:
            yield fd
            return
        fd = open_regular(file)[0]
        try:
            yield fd
        finally:
            os.close(fd)


def _checksum_faults(fd: int, piece: StoredPiece, buffer: memoryview) -> Iterator[str]:
    """Yield a problem if the checksum of a piece's data is wrong; reads through `buffer` of CHUNK_BYTES."""
    running = xxhash.xxh3_64()
    for low in range(0, piece.spec.nbytes, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, piece.spec.nbytes - low)]
        _fill(fd, part, piece.offset + low, piece)
        running.update(part)
    if (actual := running.hexdigest()) != piece.checksum:
        yield (
            f"{piece.file}: {_place(piece)}: checksum {actual}, expected {piece.checksum}; "
            f"the file was changed or the disk is failing: {RESUME_HINT}"
        )


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Return a problem for every shard in the folder that the manifest does not name."""
    known = {record.file for record in manifest.shards}
    try:
        strangers = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in known)
    except OSError as error:
        return [f"{folder}: cannot be read ({error.strerror}); {RESUME_HINT}"]
    return [f"{folder / shorten(name)}: is not in {MANIFEST_FILE}; remove it or {RESUME_HINT}" for name in strangers]


def _coverage_faults(folder: Path, manifest: Manifest, stored: Mapping[str, list[StoredPiece]]) -> list[str]:
    """Return a problem for every tensor that the pieces do not cover exactly once."""
    problems = []
    for name, whole in manifest.tensors.items():
        pieces = [piece.spec for piece in stored[name]]
        if len(pieces) == 1 and pieces[0].shape == whole.shape:
            continue
        what = f"{folder}: {shorten(name)} {list(whole.shape)}"
        missing = missing_elements(pieces, whole.shape)
        if (pair := overlap(pieces)) is not None:
            at = " and ".join(f"{list(p.shape)} at {list(p.offset)}" for p in pair)
            problems.append(f"{what}: its pieces {at} overlap; {RESUME_HINT}")
        elif missing:
            problems.append(f"{what}: its pieces lack {missing} of {prod(whole.shape)} elements; {RESUME_HINT}")
    return problems


def _jobs(pieces: Sequence[StoredPiece]) -> list[list[StoredPiece]]:
    """Group consecutive pieces of one file into jobs for threads, of about `_JOB_BYTES`."""
    jobs: list[list[StoredPiece]] = []
    size = 0
    for piece in pieces:
        if not jobs or size >= _JOB_BYTES or jobs[-1][0].file != piece.file:
            jobs.append([])
            size = 0
        jobs[-1].append(piece)
        size += piece.spec.nbytes
    return jobs


def _read_box(fd: int, piece: StoredPiece, inner: Box, target: Tensor) -> None:
    """Read a box into any target; halve one that exceeds the window, unless it is contiguous on the CPU."""
    if target.device.type == "cpu" and target.is_contiguous():
        _read_rows(fd, piece, inner, target)
    elif (
        target.nbytes > _WINDOW_BYTES
        and (dim := next((d for d, n in enumerate(inner.shape) if n > 1), None)) is not None
    ):
        half = inner.shape[dim] // 2
        for low, size in ((0, half), (half, inner.shape[dim] - half)):
            offset = (*inner.offset[:dim], inner.offset[dim] + low, *inner.offset[dim + 1 :])
            shape = (*inner.shape[:dim], size, *inner.shape[dim + 1 :])
            _read_box(fd, piece, Box(offset, shape), target.narrow(dim, low, size))
    else:
        part = torch.empty(inner.shape, dtype=target.dtype)
        _read_rows(fd, piece, inner, part)
        target.copy_(part)


def _read_rows(fd: int, piece: StoredPiece, inner: Box, target: Tensor) -> None:
    """Read a box into contiguous memory, as the longest possible runs of the file at equal distances."""
    outer, item = piece.spec.shape, target.element_size()
    strides = [prod(outer[dim + 1 :]) * item for dim in range(len(outer))]
    start = piece.offset + sum(o * stride for o, stride in zip(inner.offset, strides, strict=True))
    # Not by `view`: a contiguous tensor of one element may have any stride.
    out = as_bytes(target.as_strided((target.numel(),), (1,))).data
    # The last dimension that is cut: all within it is one run of bytes.
    cut = max((dim for dim in range(len(outer)) if inner.shape[dim] != outer[dim]), default=0)
    run = prod(inner.shape[cut:]) * item
    counts, steps = list(inner.shape[:cut]), strides[:cut]
    while counts and counts[-1] == 1:
        counts.pop()
        steps = steps[:-1]
    rows, pitch = (counts.pop(), steps[-1]) if counts else (1, run)
    block = rows * run
    for i in range(len(out) // block):
        at, left = start, i
        for count, step in zip(reversed(counts), reversed(steps[: len(counts)]), strict=True):
            left, index = divmod(left, count)
            at += index * step
        _read_pitched(fd, piece, at, pitch, run, out[i * block : (i + 1) * block])


def _read_pitched(fd: int, piece: StoredPiece, at: int, pitch: int, run: int, out: memoryview) -> None:
    """Fill `out` with runs of bytes that begin `pitch` bytes apart in the file."""
    rows = len(out) // run
    if pitch == run or rows == 1:
        _fill(fd, out, at, piece)
    elif pitch >= _FAR_BYTES:
        for row in range(rows):
            _fill(fd, out[row * run : (row + 1) * run], at + row * pitch, piece)
    else:
        step = _WINDOW_BYTES // pitch
        window = torch.empty(step, pitch, dtype=torch.uint8)
        source = as_bytes(window.view(-1)).data
        into = torch.frombuffer(out, dtype=torch.uint8).view(rows, run)
        for low in range(0, rows, step):
            count = min(step, rows - low)
            _fill(fd, source[: (count - 1) * pitch + run], at + low * pitch, piece)
            into[low : low + count] = window[:count, :run]


def _fill(fd: int, buffer: memoryview, offset: int, piece: StoredPiece) -> None:
    """Fill a buffer from a file. Raises UserError when the file ends too early."""
    while len(buffer):
        try:
            count = os.preadv(fd, [buffer], offset)
        except OSError as error:
            raise UserError(
                f"{piece.file}: {_place(piece)}: cannot be read ({error.strerror}); {RESUME_HINT}"
            ) from error
        if count == 0:
            raise UserError(
                f"{piece.file}: {_place(piece)}: the file ends at byte {offset}, {len(buffer)} bytes are missing; "
                f"it was truncated: {RESUME_HINT}"
            )
        buffer, offset = buffer[count:], offset + count


def _place(piece: StoredPiece) -> str:
    return f"{piece.spec.name} at {list(piece.spec.offset)}"
