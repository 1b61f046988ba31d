"""The program of a response."""

from __future__ import annotations

import time
from textwrap import indent

import pytest

from mega_rl.workers.code.blocks import code_format, last_program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("a\n```py\nx\n```\nb\n```\ny\n```\nc", "y\n"),
        ("```python\nx\n```\n```json\n{}\n```", "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("  ```Python3 title\n  x\n  ```", "  x\n"),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
        ("```python\nunclosed", None),
        ("print(1)", None),
        ("", None),
        ("```\n```", ""),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("```python\nx = 1\n```", 1.0),
        ("```python\nx = (\n```", 0.0),
        ("```python\n \n```", 0.0),
        ("```python\n\0\n```", 0.0),
        ("x = 1", 0.0),
        ("```python\n" + "(" * 10_000 + "\n```", 0.0),
        ("```python\n" + "-" * 100_000 + "1\n```", 0.0),
    ],
)
def test_a_block_that_parses_has_the_form(response: str, score: float) -> None:
    assert code_format(response) == score


def test_a_long_response_of_fences_is_read_at_once() -> None:
    begin = time.perf_counter()
    assert last_program("```python\n" * 100_000) is None
    assert last_program("```\n" * 100_001) == ""
    assert code_format("`" * 1_000_000) == 0.0
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    "line", ["```" + " " * 32_000 + "`", "~" * 100_000 + "`", "```" + " \t" * 32_000 + "x`", "`" * 99_999 + "x`"]
)
def test_long_line_is_read_in_linear_time(line: str) -> None:
    begin = time.perf_counter()
    assert last_program(f"{line}\n```\nx\n```") == "x\n"
    assert time.perf_counter() - begin < 1


def nested(levels: int) -> str:
    """Return a program whose compiled form doubles with each level."""
    return "try:\n x\nfinally:\n" + indent(nested(levels - 1), " ") if levels else "x\n"


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("f'" + "{x}" * 100_000 + "'", 0.0),
        (" or ".join("x" * 100_000), 0.0),
        ("f'" + "{x}" * 10_000 + "'", 1.0),
        (nested(20), 1.0),
    ],
)
def test_form_of_a_costly_program_is_soon_clear(program: str, score: float) -> None:
    begin = time.perf_counter()
    assert code_format(f"```python\n{program}\n```") == score
    assert time.perf_counter() - begin < 3


def test_warnings_about_a_program_are_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    assert code_format("```python\nx = 1 is 1\ny = '\\d'\n```") == 1.0
    assert not recwarn.list
