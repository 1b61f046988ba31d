"""Shards of a stream: the files that it reads one after the other, each from any row on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from mega_rl.data.columns import RowColumns
from mega_rl.data.rows import one_line, read_jsonl
from mega_rl.errors import UserError

BATCH_ROWS = 1024  # of a Parquet file that are decoded at once
SAMPLE_BYTES = 1 << 16  # from the beginning, the middle and the end of a file, which it is known by


class StreamShard(Protocol):
    """A part of a stream, such as a file."""

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    def identity(self) -> str:
        """Return text that changes with the content. Raises UserError where it cannot be read."""
        ...

    def rows(self, columns: RowColumns, *, skip: int) -> Iterator[tuple[str, object]]:
        """Yield (place, row) from row `skip` on, counted from 0; a RowProblem for an unreadable row.

        Raises UserError where it cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileShard:
    """A local JSONL or Parquet file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        """Return name, size and SHA-256 of 192 KiB of the file: a stream may be too large to read it at every start."""
        digest = hashlib.sha256()
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                for place in sorted({0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)}):
                    file.seek(place)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {one_line(error)}") from error
        return f"{self.path.name} {size} {digest.hexdigest()}"

    def rows(self, columns: RowColumns, *, skip: int) -> Iterator[tuple[str, object]]:
        try:
            if self.path.suffix == ".parquet":
                yield from self._parquet(columns, skip)
            else:
                yield from read_jsonl(self.path, skip=skip)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {one_line(error)}") from error

    def _parquet(self, columns: RowColumns, skip: int) -> Iterator[tuple[str, object]]:
        """Yield rows of row groups; those that lie before `skip` are not read."""
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(self.path, memory_map=True) as file:
                names = file.schema_arrow.names
                if missing := [key for key in columns.needed if key not in names]:
                    raise UserError(
                        f"{self.path}: has no column {', '.join(missing)}; its columns are {', '.join(names)}"
                    )
                groups, before = _groups_from(file, skip)
                batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns.read_of(names))
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(islice(rows, skip - before, None), start=skip + 1):
                    yield f"{self.path}: row {number}", row
        except ArrowException as error:
            raise UserError(f"{self.path}: is not a readable Parquet file: {one_line(error)}") from error


def _groups_from(file: object, skip: int) -> tuple[list[int], int]:
    """Return the row groups of a Parquet file that hold rows from `skip` on, and the number of rows before them."""
    metadata = file.metadata  # type: ignore[attr-defined]
    before, first = 0, 0
    while first < metadata.num_row_groups and before + metadata.row_group(first).num_rows <= skip:
        before += metadata.row_group(first).num_rows
        first += 1
    return list(range(first, metadata.num_row_groups)), before
