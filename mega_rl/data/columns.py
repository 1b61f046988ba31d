"""Columns of a data row that a reward reads. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardColumns:
    """Columns of a row that the reward reads besides the prompt."""

    answer: bool = True  # a row without an answer is malformed
    structured: bool = False  # an answer may be a list, an object, true or false
    every: bool = False  # all columns are kept as `Prompt.row`


TEXT_ANSWERS = RewardColumns()
