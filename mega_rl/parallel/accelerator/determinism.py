"""Deterministic algorithms: the same bits twice, at the price of speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mega_rl import environment


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within it, with `on`, torch uses only algorithms that repeat their bits and raises where it has none.

    The libraries read their variables when they first run, so this comes before the first collective.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    environment.use(environment.DETERMINISTIC)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
