"""Call peers: `python -m tests.peers.program RESULTS PEER...` writes {peer: answers of each seed} with torch.save."""

from __future__ import annotations

import importlib
import sys

import torch

from tests.peers.batch import SEEDS, batch


def main() -> None:
    """Import each peer, in this order, and write its answers."""
    results, *peers = sys.argv[1:]
    modules = {peer: importlib.import_module(f"tests.peers.{peer}_answers") for peer in peers}
    torch.save({peer: [module.answers(batch(seed)) for seed in SEEDS] for peer, module in modules.items()}, results)


if __name__ == "__main__":
    main()
