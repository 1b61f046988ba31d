"""Columns of a data row: prompt, answer, and those that a reward reads. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        of_reward = (self.prompt, self.answer) if self.reward.answer else (self.prompt,)
        return (*of_reward, self.difficulty) if self.difficulty else of_reward
