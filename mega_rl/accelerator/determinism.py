"""Deterministic algorithms: the same bits twice, at the price of speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# cuBLAS's split work space adds up in an order of its own; NCCL's choice of algorithm changes with load and topology;
# Transformer Engine has attention kernels that add atomically.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within it, with `on`, torch uses only algorithms that repeat their bits and raises where it has none.

    The libraries read `ENVIRONMENT` when they first run, so this comes before the first collective; what the user set
    there stays.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
