"""Reader of records: numpy arrays and rows of texts, checked against their checksums.

from mega_rl.tracking.records.reader import read_record

record = read_record("runs/a/records/step_000011")
record.tensors["advantages"]   # [N, S] float32, rows by prompt and sample
record.rows[3]["token_texts"]  # text of each token of row 3
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mega_rl.converters.safetensors.header import read_entries
from mega_rl.errors import UserError
from mega_rl.tracking.records.format import MAX_RECORD_BYTES, RECORD_FILE, TENSORS, RecordDescription, Shard, parse
from mega_rl.untrusted import JsonFields, parse_object

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "I32": np.int32, "I16": np.int16, "BOOL": np.bool_}


@dataclass(frozen=True)
class Record:
    """A record that was read; rows are in the order of prompts and samples, whatever layout wrote them."""

    folder: Path
    description: RecordDescription
    tensors: dict[str, Array]  # [N] or [N, S, ...] by the names of `format.TENSORS`, in their order
    files: tuple[Shard, ...]

    @cached_property
    def rows(self) -> list[JsonFields]:
        """Return the rows for people, in the order of `tensors`; none if there are no texts. Raises UserError."""
        rows = []
        for shard in (shard for shard in self.files if shard.file.endswith(".jsonl")):
            try:
                rows += [parse_object(line) for line in _read(self.folder, shard).splitlines()]
            except ValueError as error:
                raise UserError(f"{self.folder / shard.file}: {error}; the record is damaged") from error
        return sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"]))


def read_record(folder: str | Path) -> Record:
    """Read a record's tensors. Raises UserError for a folder that is not a record, or is damaged."""
    folder = Path(folder)
    path = folder / RECORD_FILE
    try:
        text = path.read_bytes() if path.stat().st_size <= MAX_RECORD_BYTES and not path.is_fifo() else b""
    except OSError as error:
        raise UserError(
            f"{folder}: is not a record ({RECORD_FILE}: {error.strerror}); give a folder as RUN/records/step_000001"
        ) from error
    description, files, dtypes = parse(text, path)
    names = [name for name in TENSORS if name in dtypes]
    shards = [_shard(folder, file) for file in files if file.file.endswith(".safetensors")]
    for name in names:
        if not shards or any(name not in shard for shard in shards):
            raise UserError(f"{folder}: a file has no {name}, which {RECORD_FILE} lists; the record is damaged")
    joined = {name: _joined([shard[name] for shard in shards]) for name in names}
    order = np.lexsort((joined["sample_index"], joined["prompt_index"]))
    return Record(folder, description, {name: tensor[order] for name, tensor in joined.items()}, tuple(files))


def _shard(folder: Path, shard: Shard) -> dict[str, Array]:
    """Return the tensors of one replica's rows. Raises UserError for a damaged file."""
    path = folder / shard.file
    data = _read(folder, shard)
    tensors = {}
    for name, entry in read_entries(path).items():
        if name not in TENSORS or entry.dtype not in _DTYPES or entry.shape[:1] != (shard.rows,):
            raise UserError(f"{path}: {name} {entry.dtype} {list(entry.shape)} does not fit a record; it is damaged")
        count = int(np.prod(entry.shape))
        flat: Array = np.frombuffer(data, dtype=_DTYPES[entry.dtype], count=count, offset=entry.offset)
        tensors[name] = flat.reshape(entry.shape)
    return tensors


def _read(folder: Path, shard: Shard) -> bytes:
    """Return the bytes of a file. Raises UserError if they differ from the written ones."""
    path = folder / shard.file
    try:
        data = path.read_bytes() if path.stat().st_size == shard.nbytes and not path.is_symlink() else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); the record is damaged") from error
    if len(data) != shard.nbytes or hashlib.sha256(data).hexdigest() != shard.sha256:
        raise UserError(f"{path}: differs from the file that was written, by its checksum; the record is damaged")
    return data


def _joined(parts: Sequence[Array]) -> Array:
    """Return the rows of all replicas, padded with zeros to the widest."""
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    widened = [
        np.pad(part, [(0, 0), (0, width - part.shape[1]), *[(0, 0)] * (part.ndim - 2)])
        if part.ndim > 1 and part.shape[1] < width
        else part
        for part in parts
    ]
    return np.concatenate(widened)
