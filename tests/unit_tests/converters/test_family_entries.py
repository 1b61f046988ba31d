"""A family is one entry: it has every piece, the pages say what it says, and no other module names a family."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

import mega_rl
from mega_rl.converters import families
from mega_rl.converters.families import FAMILIES, Family
from tests.code_tables import BLOCK, BLOCKS, PAGES, rendered
from tests.helpers.models import TINY
from tests.unit_tests.converters import tiny_configs
from tests.unit_tests.distributed.family_cases import CASES

PACKAGE = Path(mega_rl.__file__).parent
WRAPPERS = {name for family in FAMILIES.values() for name in family.in_wrappers}
WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


def literals(tree: ast.Module) -> Iterator[str]:
    """String literals of a module that are no docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def families_named(source: str) -> set[str]:
    """The string literals of a module that hold a family's name as a word."""
    names = FAMILIES.keys() | WRAPPERS
    if names.isdisjoint(re.findall(r"\w+", source)):  # as of most modules, and much faster
        return set()
    return {text for text in literals(ast.parse(source)) if names & set(re.findall(r"\w+", text))}


def test_no_other_module_names_a_family() -> None:
    actual = {
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in PACKAGE.rglob("*.py")
        if Path(families.__file__).parent not in path.parents
        for text in families_named(path.read_text(encoding="utf-8"))
    }
    assert actual == {"agents/tools.py: mistral"}, "make it a field of Family"  # there it is a style of tool calls


def test_every_entry_is_registered() -> None:
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    entries = {value.model_type for module in modules for value in vars(module).values() if isinstance(value, Family)}
    assert entries == FAMILIES.keys()


def test_every_family_has_test_data() -> None:
    """A tiny checkpoint, a tiny config.json and a case of parity, and no test data is of a family that is gone."""
    assert TINY.keys() == FAMILIES.keys()
    assert tiny_configs.TINY.keys() >= FAMILIES.keys()
    assert {case.family for case in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_entry_has_every_piece(family: Family) -> None:
    assert FAMILIES[family.model_type] is family
    assert family.rules
    assert family.title
    assert family.differs
    assert not family.differs.endswith(".")
    assert not {"|", "\n"} & set(family.title + family.differs)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_transformers_knows_the_names(family: Family) -> None:
    """The model_type, or that of the class that stands in; those that models of images and text have for it."""
    assert CONFIG_MAPPING[family.transformers_type].model_type == family.transformers_type
    assert family.model_type in CONFIG_MAPPING or family.stand_in
    assert [name for name in family.in_wrappers if name not in CONFIG_MAPPING] == []


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_pages_say_what_the_entries_say(page: Path) -> None:
    """`make docs` has been run."""
    text = page.read_text(encoding="utf-8")
    assert rendered(text) == text


def test_every_block_is_on_a_page() -> None:
    """The Chinese README repeats those of the English one."""
    pages = [page for page in PAGES if page.name != "README.zh-CN.md"]
    named = [match[2] for page in pages for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(BLOCKS)
