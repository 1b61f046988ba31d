"""The tool that plants faults: places by their text, ends of pytest, restored files; every fault has its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fault import Fault
from tests.fault_table import FAULTS
from tests.planted_faults import PROJECT, locate, planted, run_tests, try_fault

FAULT = Fault("area", "one is two", "ONE = 1", "ONE = 2", ("tests/test_one.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of two modules, with a test of one of them."""
    for folder in ("mega_rl", "tests", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mega_rl" / "one.py").write_text("ONE = 1\n")
    (tmp_path / "mega_rl" / "two.py").write_text("TWO = 2\n")
    (tmp_path / "tests" / "test_one.py").write_text(
        "import pathlib\n\ndef test_one():\n    assert 'ONE = 1' in pathlib.Path('mega_rl/one.py').read_text()\n"
    )
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_a_fault_is_planted_and_removed(tree: Path) -> None:
    path = tree / "mega_rl" / "one.py"
    with planted(FAULT, tree) as place:
        assert (place, path.read_text()) == (path, "ONE = 2\n")
    assert path.read_text() == "ONE = 1\n"


def test_a_fault_is_found_or_missed(tree: Path) -> None:
    assert run_tests(tree, FAULT.targets).passed
    row, is_found = try_fault(FAULT, tree)
    assert (row[2:4], is_found) == (["one.py", "tests/test_one.py::test_one"], True)
    row, is_found = try_fault(Fault("area", "two is three", "TWO = 2", "TWO = 3", FAULT.targets), tree)
    assert (row[3], is_found) == ("NOT FOUND: all tests passed", False)


def test_every_fault_has_one_place_and_its_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 36
    for fault in FAULTS:
        assert locate(fault, PROJECT)
        assert fault.old != fault.new
        assert 1 <= len(fault.targets) <= 2
        for target in fault.targets:
            path, _, word = target.partition(" -k ")
            assert word in (PROJECT / path).read_text(), f"{fault.name}: {target}"
