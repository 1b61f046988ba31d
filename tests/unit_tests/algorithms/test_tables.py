"""The functions that a setting chooses from."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mega_rl.algorithms.advantages.registry import ESTIMATORS
from mega_rl.algorithms.corrections.registry import CORRECTIONS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.algorithms.losses.registry import OBJECTIVES
from mega_rl.config.schema import AlgorithmConfig

FORMULA = re.compile(r"^ {4}.* = ", re.MULTILINE)  # a line of its own
MAX_LINES = 60  # of an algorithm's file: formula, source and code fit on one screen


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


@pytest.mark.parametrize("algorithm", [*ESTIMATORS.values(), *OBJECTIVES.values(), *CORRECTIONS.values()])
def test_an_algorithm_fits_on_one_screen(algorithm: type) -> None:
    text = Path(inspect.getfile(algorithm)).read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    module = ast.parse(text)
    assert re.search(r"arXiv:\d{4}\.\d{5}|Source: \w+", ast.get_docstring(module) or ""), "its source is on top"
    documented = [node for node in ast.walk(module) if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))]
    assert any(FORMULA.search(ast.get_docstring(node) or "") for node in documented), "its formula stands in the file"
