"""The whole campaign against checkpoints, as a table: `make campaign-checkpoint`.

A run is killed at every point of a save, in the step and in the background, on each rank, and at twenty points of
training; each time it goes on, and must end with the weights of a run that was never killed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.unit_tests.checkpoint.kill_campaign import Campaign
from tests.unit_tests.checkpoint.kill_cases import RANKS, Kill

PHASES = ("generate", "reward", "old_logprobs", "update_actor", "sync_weights")


def kills_in_training() -> list[Kill]:
    """Begin and end of five phases of two steps, ranks in turn: twenty."""
    points = itertools.product((2, 3), PHASES, (False, True))
    return [Kill(rank=i % RANKS, phase=phase, step=step, at_end=end) for i, (step, phase, end) in enumerate(points)]


def run_kills(campaign: Campaign, title: str, kills: Sequence[Kill]) -> list[Any]:
    """A row of the table: title, cases, cases that resumed and ended right, seconds."""
    begin, wrong = time.monotonic(), 0
    for kill in track(kills, description=title, console=Console(stderr=True)):
        try:
            campaign.check(kill)
        except (AssertionError, pytest.fail.Exception) as error:
            print(f"{kill}: {error}", file=sys.stderr)
            wrong += 1
    return [title, len(kills), len(kills) - wrong, time.monotonic() - begin]


def main() -> int:
    """Print the table; exit code 1 if anything went wrong."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="campaign_") as name:
        campaign = Campaign(Path(name))
        rows.append(run_kills(campaign, "killed in training", kills_in_training()))
        for background, rank in itertools.product((False, True), range(RANKS)):
            title = f"killed in a save {'in the background' if background else 'in the step'}, rank {rank}"
            kills = [kill for _, kill in campaign.points(background=background, rank=rank)]
            rows.append(run_kills(campaign, title, kills))
    table = Table("campaign", "cases", "right", "s")
    for title, cases, right, seconds in rows:
        table.add_row(title, str(cases), str(right), f"{seconds:.0f}")
    Console(width=100).print(table)
    return 0 if all(cases == right for _, cases, right, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
