"""The functions that a setting chooses from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.config.schema import AlgorithmConfig


def choices(settings: Any) -> Iterator[tuple[str, ...] | None]:
    """The choices of every setting of a group and of the groups inside."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from choices(value)
        else:
            yield field.metadata["choices"]


@pytest.mark.parametrize("table", [AGGREGATIONS, KL_ESTIMATORS])
def test_a_setting_chooses_from_all_of_them_and_from_nothing_else(table: Mapping[str, Callable[..., Any]]) -> None:
    assert {tuple(table), ("auto", *table)} & set(choices(AlgorithmConfig()))
