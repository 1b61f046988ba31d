"""Reward of the quickstart: `write_dataset` copies this file beside the data, where the recipe names it."""

from __future__ import annotations


def points(prompt: str, response: str, answer: str) -> dict[str, float]:
    """Return the parts of a right answer's reward: one point, and one more for every carry of its sum; else zeros."""
    correct = float(response == answer)
    return {"correct": correct, "carries": correct * carries(prompt)}


def carries(prompt: str) -> int:
    """Count the carries of a sum of two numbers of two digits: `37+45=` has one, `99+99=` two."""
    left, right = (int(number) for number in prompt.removesuffix("=").split("+"))
    return (left % 10 + right % 10 >= 10) + (left + right >= 100)
