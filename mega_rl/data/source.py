"""Rows of prompts from a user's own code, in the place of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mega_rl.data.prompts import Tokenizer

MAX_ROWS = 10_000_000  # of a source; one that yields more is taken for an endless one


@dataclass(frozen=True)
class DataContext:
    """Parts of a run that a data source works with, the same on every rank."""

    split: Literal["train", "validation"]
    seed: int  # trainer.seed
    tokenizer: Tokenizer  # the actor's


@dataclass(frozen=True)
class RowSource:
    """Rows of a user's data source, read once; their number and content must be the same each time."""

    name: str  # the setting that chose it, with the split: "data.source='sums.py:Sums' (train)"
    rows: Iterable[object]

    def read(self, fatal: list[str]) -> Iterator[tuple[str, object]]:
        """Yield (place, row); a problem of the source as a whole goes to `fatal`."""
        number = 0
        for number, row in enumerate(self.rows, start=1):
            if number > MAX_ROWS:
                fatal.append(f"{self.name}: yields more than {MAX_ROWS:,} rows; let it end")
                return
            yield f"{self.name}: row {number}", row
        if not number:
            fatal.append(f"{self.name}: yields no rows")
