"""Run cases on ranks with Transformer Engine: `python -m tests.fake_te.program CASES RESULTS`, files of torch.save."""

from __future__ import annotations

import sys

import torch

from tests.fake_te.on_ranks import Case, run
from tests.helpers.distributed import run_ranks


def main() -> None:
    """Launch the cases of each number of ranks; results are those of rank 0, by the case's name."""
    torch.serialization.add_safe_globals([Case])
    cases: dict[int, dict[str, Case]] = torch.load(sys.argv[1])
    results = {}
    for world_size, named in cases.items():
        results |= run_ranks(world_size, run, named, preload="tests.fake_te.preloaded", timeout_s=250, device="cpu")[0]
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
