"""Reader of checkpoints: opening checks everything except the data; pieces are then read straight into tensors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from mega_rl.checkpoint.folders import is_step_folder, read_manifest, step_of
from mega_rl.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from mega_rl.checkpoint.format.shards import (
    CHUNK_BYTES,
    FORMAT,
    PieceSpec,
    ShardRecord,
    checksum,
    coverage_fault,
    is_inside,
)
from mega_rl.converters.live.copying import in_threads
from mega_rl.converters.safetensors.header import METADATA, HeaderEntry, parse_entries, read_header_bytes
from mega_rl.converters.safetensors.reader import DTYPES, CheckpointReader, TensorInfo
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.boxes import Box
from mega_rl.untrusted import decode_json, fault, is_checksum, limited, open_regular, read_at, shorten, shown

_JOB_BYTES = 32 << 20  # checked or read by one thread at a time
_BUFFER_BYTES = 4 << 20  # for targets that cannot be read into directly
_SHOWN = 500  # characters of a message that has values of a file in it
_T = TypeVar("_T")


class StoredPiece(NamedTuple):
    """A piece of a tensor and the place of its bytes."""

    spec: PieceSpec
    file: Path
    offset: int  # bytes from the start of the file
    checksum: str

    @property
    def box(self) -> Box:
        """Return its box in the whole tensor."""
        return Box(self.spec.offset, self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return its dtype."""
        return DTYPES[self.spec.dtype]


class PieceCopy(NamedTuple):
    """Copy of a box of a stored piece into live memory."""

    source: StoredPiece
    inner: Box  # within the stored piece
    target: Tensor  # [*inner.shape], dtype of the piece, any strides and device


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest
    pieces: dict[str, list[StoredPiece]]  # tensor -> pieces; a tensor without elements may have none

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open a folder and check everything except the data.

        COMMIT fits the manifest; the manifest names every shard in the folder, with its size and its header's checksum;
        every tensor of the manifest, and no other, is covered by pieces of its dtype, each element exactly once.
        Raises UserError or UserErrors.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"checkpoint {folder}: no such folder")
        manifest = read_manifest(folder)
        if is_step_folder(folder) and step_of(folder) != manifest.step:
            raise UserError(fault(folder / MANIFEST_FILE, "step", manifest.step, "is not that of the folder's name"))
        problems = _unknown_shards(folder, manifest)
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

    def all_pieces(self) -> Iterator[StoredPiece]:
        """Yield every piece of every tensor."""
        return itertools.chain.from_iterable(self.pieces.values())

    def verify(self, pieces: Iterable[StoredPiece]) -> None:
        """Read the bytes of pieces and compare their checksums. Raises UserErrors naming file, tensor, both sums."""
        jobs = _jobs(((piece.file, piece.offset), piece) for piece in dict.fromkeys(pieces))
        problems = list(itertools.chain.from_iterable(in_threads(jobs, _data_faults)))
        if problems:
            raise UserErrors(limited(problems, self.folder))

    def read(self, copies: Iterable[PieceCopy], *, done: Callable[[int], None] = lambda nbytes: None) -> None:
        """Make these copies without checksums. `done` gets, in threads, the bytes of each.

        Raises UserError when a file ends or cannot be read.
        """

        def read(job: Sequence[PieceCopy]) -> None:
            infos = {copy.source.spec.key: as_matrix(copy.source) for copy in job}
            with CheckpointReader(self.folder, tensors=infos) as reader:
                for copy in job:
                    _read_box(reader, copy)
                    done(copy.target.nbytes)

        wanted = (copy for copy in copies if copy.target.numel())
        in_threads(_jobs(((copy.source.file, copy.source.offset), copy) for copy in wanted), read)


def read_shard(path: Path, record: ShardRecord, manifest: Manifest) -> list[StoredPiece]:
    """Return the pieces of a shard, its header checked against the manifest. Raises UserError or UserErrors."""
    fd, size = open_regular(path)
    try:
        if size != record.nbytes:
            cause = "truncated" if size < record.nbytes else "changed"
            raise UserError(f"{path}: {size} bytes, expected {record.nbytes}; the file was {cause}")
        header = read_header_bytes(fd, size, path)
    finally:
        os.close(fd)
    if (actual := checksum(header)) != record.header:
        raise UserError(
            f"{path}: its header has checksum {actual}, expected {record.header}; the file was changed, is of another "
            "checkpoint, or the disk is failing"
        )
    raw = decode_json(header[8:], path)
    try:
        entries = parse_entries(raw, path, record.nbytes, start=len(header))
    except UserErrors as error:
        raise UserErrors(limited([problem[:_SHOWN] for problem in error.problems], path)) from error
    checksums = _checksums(raw.get(METADATA), path)
    if set(checksums) != set(entries) or not all(map(is_checksum, checksums.values())):
        raise UserError(f"{path}: must have a checksum of 16 hexadecimal digits for each of {len(entries)} pieces")
    problems = []
    pieces = []
    for key, entry in entries.items():
        spec, problem = _piece_spec(entry, manifest)
        if problem:
            problems.append(f"{path}: {shorten(key)}: {problem}")
        else:
            pieces.append(StoredPiece(spec, path, entry.offset, checksums[key]))
    if problems:
        raise UserErrors(problems)
    return pieces


def _checksums(metadata: Any, path: Path) -> dict[str, str]:
    """Return the checksums in a header's metadata, by key."""
    match metadata:
        case {"format": known, "checksums": str(text)} if known == FORMAT and len(metadata) == 2:
            # JSON can hold a surrogate without its partner, UTF-8 cannot.
            return decode_json(text.encode(errors="replace"), f"{path}: checksums")
    raise UserError(f"{path}: {METADATA} must have format={FORMAT!r} and checksums, a text of JSON")


def _piece_spec(entry: HeaderEntry, manifest: Manifest) -> tuple[PieceSpec, str]:
    """Return the piece of a header's entry, and its problem or ""."""
    name, at, text = entry.name.rpartition("@")
    offset = tuple(int(number) for number in text.split(",") if number.isdecimal())
    spec = PieceSpec(name, entry.dtype, offset, entry.shape)
    whole = manifest.tensors.get(name) if at else None
    if whole is None:
        return spec, f"is of no tensor of {MANIFEST_FILE}"
    if spec.key != entry.name or len(offset) != len(whole.shape):
        return spec, f"must end in @ and {len(whole.shape)} numbers"
    if spec.dtype != whole.dtype:
        return spec, f"is {spec.dtype}, but {whole.dtype} in {MANIFEST_FILE}"
    if not is_inside(spec, whole.shape):
        return spec, f"{shown(list(spec.shape))} lies outside of {shown(list(whole.shape))}"
    return spec, ""


def _unknown_shards(folder: Path, manifest: Manifest) -> list[str]:
    """Return a problem for every shard in the folder that the manifest does not name."""
    known = {record.file for record in manifest.shards}
    try:
        unknown = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in known)
    except OSError as error:
        return [f"{folder}: cannot be read ({error.strerror})"]
    return [f"{folder / shorten(name)}: is not in {MANIFEST_FILE}; remove it" for name in unknown]


def _coverage_faults(folder: Path, manifest: Manifest, stored: Mapping[str, list[StoredPiece]]) -> list[str]:
    """Return a problem for every tensor that the pieces do not cover exactly once."""
    problems = []
    for name, whole in manifest.tensors.items():
        pieces = [piece.spec for piece in stored[name]]
        if len(pieces) == 1 and pieces[0].shape == whole.shape:
            continue
        if fault := coverage_fault(pieces, whole.shape):
            problems.append(f"{folder}: {shorten(name)} {list(whole.shape)}: {fault}")
    return problems


def _jobs(items: Iterable[tuple[tuple[Path, int], _T]]) -> list[list[_T]]:
    """Group items by (file, offset) into jobs of one file and about `_JOB_BYTES`."""
    jobs: list[list[_T]] = []
    begin: tuple[Path | None, int] = (None, 0)
    for (file, offset), item in sorted(items, key=lambda each: each[0]):
        if file != begin[0] or offset - begin[1] >= _JOB_BYTES:
            jobs.append([])
            begin = (file, offset)
        jobs[-1].append(item)
    return jobs


def _data_faults(pieces: Sequence[StoredPiece]) -> list[str]:
    """Return a problem for every piece of one file with another checksum."""
    problems: list[str] = []
    try:
        fd, _ = open_regular(pieces[0].file)
    except UserError as error:
        return [str(error)]
    try:
        for piece in pieces:
            running = xxhash.xxh3_64()
            for low in range(0, piece.spec.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, piece.spec.nbytes - low)
                running.update(read_at(fd, piece.offset + low, size, piece.file))
            if (actual := running.hexdigest()) != piece.checksum:
                problems.append(
                    f"{piece.file}: {piece.spec.name} at {list(piece.spec.offset)}: checksum {actual}, expected "
                    f"{piece.checksum}; the file was changed or the disk is failing"
                )
    except UserError as error:
        problems.append(str(error))
    finally:
        os.close(fd)
    return problems


def _padded(shape: tuple[int, ...], fill: int) -> tuple[int, ...]:
    """Return a shape or offset of at least two dimensions; a vector is a column."""
    return (*shape, *(fill for _ in range(2 - len(shape))))


def as_matrix(piece: StoredPiece) -> TensorInfo:
    """Return a piece as the matrix of its last dimension's rows, for a `CheckpointReader`."""
    shape = _padded(piece.spec.shape, 1)
    shape = (prod(shape[:-1]), shape[-1])
    return TensorInfo(piece.spec.key, piece.dtype, shape, piece.file, piece.offset, piece.spec.nbytes)


def _read_box(reader: CheckpointReader, copy: PieceCopy) -> None:
    """Make one copy: a rectangle of rows and columns for each index of the leading dimensions."""
    piece, inner = copy.source, copy.inner
    assert (copy.target.dtype, tuple(copy.target.shape)) == (piece.dtype, tuple(inner.shape)), copy
    assert is_inside(PieceSpec(piece.spec.name, piece.spec.dtype, *inner), piece.spec.shape), copy
    outer, offset, shape = _padded(piece.spec.shape, 1), _padded(inner.offset, 0), _padded(inner.shape, 1)
    target = copy.target.detach()
    while target.dim() < 2:
        target = target.unsqueeze(-1)
    cols = (offset[-1], offset[-1] + shape[-1])
    for index in itertools.product(*map(range, shape[:-2])):
        row = 0
        for size, low, i in zip(outer[:-2], offset[:-2], index, strict=True):
            row = row * size + low + i
        row = row * outer[-2] + offset[-2]
        part = target[index]
        if part.device.type == "cpu" and part.stride(-1) == 1:
            reader.read_into(piece.spec.key, row, cols, [part])
            continue
        step = max(1, _BUFFER_BYTES // (shape[-1] * part.element_size()))
        for low in range(0, len(part), step):
            high = min(low + step, len(part))
            part[low:high].copy_(reader.read_block(piece.spec.key, (row + low, row + high), cols))
