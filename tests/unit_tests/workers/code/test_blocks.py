"""The program of a response."""

from __future__ import annotations

import time

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
