"""Reward of the quickstart's sums. The quickstart copies this file next to its data."""

from __future__ import annotations


def points(prompt: str, response: str, answer: str) -> dict[str, float]:
    """Return a point for a right answer and one per carry of its sum; else zeros."""
    correct = float(response == answer)
    return {"correct": correct, "carries": correct * carries(prompt)}


def carries(prompt: str) -> int:
    """Count the carries of a sum of two-digit numbers: `37+45=` has one, `99+99=` two."""
    left, right = (int(number) for number in prompt.removesuffix("=").split("+"))
    return (left % 10 + right % 10 >= 10) + (left + right >= 100)
