"""Shards of a stream: the files that it reads one after the other, each from any row on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mega_rl.data.columns import RowColumns
from mega_rl.data.rows import one_line, read_jsonl, read_parquet
from mega_rl.errors import UserError

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
            is_table = self.path.suffix == ".parquet"
            yield from read_parquet(self.path, columns, skip=skip) if is_table else read_jsonl(self.path, skip=skip)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {one_line(error)}") from error
