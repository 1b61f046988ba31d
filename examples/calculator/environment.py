"""The tools of the calculator, and the reward of its last turn."""

from __future__ import annotations

import mega_rl


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


class Calculator(mega_rl.ToolsEnvironment):
    """A conversation with two tools."""

    tools = (add, multiply)
    style = "hermes"


def right(prompt: str, response: str, answer: str) -> float:
    """Return 1 if what follows the last call is the answer."""
    return float(response.rpartition("</tool_call>")[2].strip() == answer)
