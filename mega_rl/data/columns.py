"""Columns of a data row: prompt, answer, and those that a reward reads. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mega_rl.data.conversation import TOOLS, VARIABLES


@dataclass(frozen=True)
class RewardColumns:
    """Columns of a row that the reward reads besides the prompt."""

    answer: bool = True  # a row without an answer is malformed
    structured: bool = False  # an answer may be a list, an object, true or false
    every: bool = False  # all columns are kept as `Prompt.row`


@dataclass(frozen=True)
class RowColumns:
    """Columns of a row that are read."""

    prompt: str
    answer: str  # "" where no row has one
    reward: RewardColumns = RewardColumns()
    difficulty: str = ""  # a number; "" where none is read
    source: str = ""  # of the row's data source, which a row need not have; "" where nothing reads it

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        of_reward = (self.prompt, self.answer) if self.reward.answer else (self.prompt,)
        return (*of_reward, self.difficulty) if self.difficulty else of_reward

    def read_of(self, names: Sequence[str]) -> list[str] | None:
        """Return which columns of those that a file has are read; None for all."""
        keys = dict.fromkeys((self.prompt, self.answer, self.difficulty, self.source, TOOLS, VARIABLES))
        return None if self.reward.every else [key for key in keys if key in names]

    def source_of(self, row: Mapping[str, Any]) -> str:
        """Return the data source of a row; empty where it names none, or nothing reads it."""
        value = row.get(self.source) if self.source else None
        return "" if value is None else str(value)
