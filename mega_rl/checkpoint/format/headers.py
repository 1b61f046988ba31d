"""Headers of shards, parsed and checked against the manifest."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from mega_rl.checkpoint.format.coverage import is_inside
from mega_rl.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from mega_rl.checkpoint.format.shards import FORMAT, PieceSpec, ShardRecord, checksum
from mega_rl.errors import UserError, UserErrors
from mega_rl.storage.safetensors_header import MAX_HEADER_BYTES
from mega_rl.storage.safetensors_reader import DTYPE_NAMES, DTYPES, TensorInfo, read_header
from mega_rl.storage.strict_json import shorten
from mega_rl.storage.untrusted import (
    RESUME_HINT,
    decode_json,
    fault,
    is_checksum,
    key_faults,
    limited,
    open_regular,
    read_at,
    shown,
)
from mega_rl.types import Box

_SHOWN = 500  # characters of a message that has values of a file in it


class StoredPiece(NamedTuple):
    """A piece of a tensor and the place of its bytes."""

    spec: PieceSpec
    file: Path
    offset: int  # from the start of the file
    checksum: str

    @property
    def box(self) -> Box:
        """Return its box in the whole tensor."""
        return Box(self.spec.offset, self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return its dtype."""
        return DTYPES[self.spec.dtype]


def read_shard(path: Path, record: ShardRecord, manifest: Manifest) -> list[StoredPiece]:
    """Return the pieces of a shard, its header checked against the manifest. Raises UserError or UserErrors."""
    fd, size = open_regular(path)
    try:
        if size != record.nbytes:
            cause = "truncated" if size < record.nbytes else "changed"
            raise UserError(f"{path}: {size} bytes, expected {record.nbytes}; the file was {cause}: {RESUME_HINT}")
        prefix = read_at(fd, 0, 8, path)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UserError(f"{path}: claims a header of {length} bytes in {size}; the file was changed: {RESUME_HINT}")
        text = read_at(fd, 8, length, path)
    finally:
        os.close(fd)
    if (actual := checksum(prefix + text)) != record.header:
        raise UserError(
            f"{path}: its header has checksum {actual}, expected {record.header}; the file was changed, is of another "
            f"checkpoint, or the disk is failing: {RESUME_HINT}"
        )
    infos = _entries(path)
    checksums = _checksums(text, path)
    problems = [f"{path}: {shorten(key)} has no checksum; {RESUME_HINT}" for key in infos if key not in checksums]
    problems += [
        f"{path}: a checksum of {shorten(k)}, which is not there; {RESUME_HINT}" for k in checksums if k not in infos
    ]
    if problems:
        raise UserErrors(problems)
    pieces = []
    for key, info in infos.items():
        spec = _piece_spec(key, info, manifest, problems)
        if spec is not None:
            pieces.append(StoredPiece(spec, path, info.offset, checksums[key]))
    if problems:
        raise UserErrors(problems)
    return pieces


def _entries(path: Path) -> dict[str, TensorInfo]:
    """Return the entries of a header, by key. Raises UserErrors with the fix for checkpoints."""
    try:
        return read_header(path)
    except UserError as error:
        problems = error.problems if isinstance(error, UserErrors) else (str(error),)
        causes = [problem.removesuffix("; fetch the file again")[:_SHOWN] for problem in problems]
        # Names in a header may hold any characters.
        causes = ["".join(c if c.isprintable() else "?" for c in cause) for cause in causes]
        raise UserErrors(limited([f"{cause}; {RESUME_HINT}" for cause in causes], path)) from error


def _checksums(header: bytes, path: Path) -> dict[str, str]:
    """Return the checksums in a header's metadata, by key."""
    metadata = decode_json(header, path).get("__metadata__")
    if not isinstance(metadata, dict):
        raise UserError(fault(path, "__metadata__", metadata, "must be an object"))
    problems = key_faults(metadata, ("format", "checksums"), f"{path}: __metadata__")
    if problems:
        raise UserErrors(problems)
    if metadata["format"] != FORMAT:
        raise UserError(fault(path, "format", metadata["format"], f"must be {FORMAT!r}"))
    if not isinstance(metadata["checksums"], str):
        raise UserError(fault(path, "checksums", metadata["checksums"], "must be a text of JSON"))
    # A lone surrogate is a text that JSON can hold and UTF-8 cannot.
    checksums = decode_json(metadata["checksums"].encode(errors="replace"), f"{path}: checksums")
    problems = [
        fault(path, key, value, "must be 16 hexadecimal digits")
        for key, value in checksums.items()
        if not is_checksum(value)
    ]
    if problems:
        raise UserErrors(problems)
    return checksums


def _piece_spec(key: str, info: TensorInfo, manifest: Manifest, problems: list[str]) -> PieceSpec | None:
    """Return the piece of a header's entry; None for a malformed key. Adds its faults to `problems`."""
    name, at, text = key.rpartition("@")
    where = f"{info.file}: {shorten(key)}"
    whole = manifest.tensors.get(name) if at else None
    if whole is None:
        problems.append(f"{where}: is of no tensor of {MANIFEST_FILE}; {RESUME_HINT}")
        return None
    numbers = text.split(",") if text else []
    if len(numbers) != len(whole.shape) or not all(_is_offset(number) for number in numbers):
        problems.append(f"{where}: must end in @ and {len(whole.shape)} numbers; {RESUME_HINT}")
        return None
    spec = PieceSpec(name, DTYPE_NAMES[info.dtype], tuple(map(int, numbers)), info.shape)
    if spec.dtype != whole.dtype:
        problems.append(f"{where}: is {spec.dtype}, but {whole.dtype} in {MANIFEST_FILE}; {RESUME_HINT}")
    elif not is_inside(spec, whole.shape):
        problems.append(f"{where}: {shown(list(spec.shape))} lies outside of {shown(list(whole.shape))}; {RESUME_HINT}")
    return spec


def _is_offset(text: str) -> bool:
    """Return whether a text is a whole number without leading zeros, at most 19 digits long."""
    return text.isascii() and text.isdigit() and len(text) < 20 and (text == "0" or text[0] != "0")
