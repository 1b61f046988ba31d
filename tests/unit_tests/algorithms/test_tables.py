"""The functions that a setting chooses from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.policy_losses import LOSSES as OBJECTIVES
from mega_rl.config.schema import AlgorithmConfig, KlInLoss, KlInReward

FORMULA = re.compile(r"^ {4}.* = ", re.MULTILINE)  # a separate line


def choices(settings: Any) -> Iterator[tuple[str, ...] | None]:
    """The choices of every setting of a group and of the groups inside."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from choices(value)
        else:
            yield field.metadata["choices"]


def test_settings_choose_from_exactly_these_functions() -> None:
    assert tuple(AGGREGATIONS) in choices(AlgorithmConfig())
    assert {KlInReward().estimator, *chain(*filter(None, choices(KlInLoss())))} >= set(KL_ESTIMATORS)


@pytest.mark.parametrize("algorithm", [*ESTIMATORS.values(), *OBJECTIVES.values(), *CORRECTIONS.values()])
def test_algorithm_has_formula_and_source(algorithm: type) -> None:
    """In its docstring, or in that of a class that it names."""
    text = inspect.getdoc(algorithm) or ""
    for name in re.findall(r"`(\w+)`", text):
        text += "\n" + (inspect.getdoc(getattr(inspect.getmodule(algorithm), name, None)) or "")
    assert re.search(r"arXiv:\d{4}\.\d{5}|Source: \w+", text)
    assert FORMULA.search(text)
