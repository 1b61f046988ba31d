"""Run jobs on ranks with Transformer Engine: `python -m tests.fake_te.program JOBS RESULTS`, files of torch.save."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.fake_te import on_ranks
from tests.helpers.distributed import run_ranks
from tests.unit_tests.plan import activations_on_ranks

FUNCTIONS: dict[str, Callable[..., Any]] = {"engines": on_ranks.run, "activations": activations_on_ranks.run_cases}


def main() -> None:
    """Launch each job, (number of ranks, name of a function, its cases); results are rank 0's, in the jobs' order."""
    torch.serialization.add_safe_globals([on_ranks.Case])
    jobs: list[tuple[int, str, dict[str, Any]]] = torch.load(sys.argv[1])
    results = [
        run_ranks(size, FUNCTIONS[name], cases, preload="tests.fake_te.preloaded", timeout_s=250, device="cpu")[0]
        for size, name, cases in jobs
    ]
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
