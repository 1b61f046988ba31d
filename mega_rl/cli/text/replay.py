"""Output of `mega-rl replay`: a table for each layout, or one JSON object with --json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from mega_rl.cli.text.verify import plain

if TYPE_CHECKING:
    from mega_rl.tracking.records.reader import Record
    from mega_rl.verify.replay.compare import Difference, TokenPlace
    from mega_rl.verify.replay.run import Replay


def print_replay(result: Replay, record: Record) -> None:
    """Print every tensor's largest difference, and the first that is beyond its tolerance."""
    description = record.description
    origin = f"recorded on {description.world_size} rank(s) of {description.layout}"
    _print_table(f"step {description.step}, {origin}; replayed: {result.layout.title}", result.differences)
    if result.first is not None:
        typer.echo(f"{result.layout.title}: {in_words(result.first)}")


def print_rewards(differences: Sequence[Difference], record: Record) -> None:
    """Print the largest difference of each part of the rewards, and the first sample and part that differ."""
    _print_table(f"step {record.description.step}, its {len(record.rows)} responses scored again", differences)
    first = next((difference for difference in differences if not difference.good), None)
    if first is not None:
        typer.echo(in_words(first))


def _print_table(title: str, differences: Sequence[Difference]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    console.print(title, markup=False, highlight=False)
    table = Table("tensor", "largest difference", "at", "allowed", "verdict", box=box.SIMPLE_HEAD)
    for difference in differences:
        at = "" if difference.worst is None else where(difference.worst)
        word = "equal" if difference.good else f"DIFFERS at {difference.num_beyond:,}"
        largest = f"{difference.largest:.1e}" if difference.largest else "0"
        table.add_row(difference.tensor, largest, at, f"{difference.allowed:g}", word)
    Console(width=None if console.is_terminal else 200, markup=False).print(table)


def in_words(difference: Difference) -> str:
    """Return the first element of a tensor that is beyond its tolerance, in words."""
    place = difference.first
    assert place is not None
    return (
        f"{difference.tensor} differs first at {where(place)}: recorded {place.recorded:.9g}, replayed "
        f"{place.replayed:.9g}"
    )


def where(place: TokenPlace) -> str:
    """Return "prompt 3, sample 1 (row 13), token 17 ' the'"."""
    row = f"prompt {place.prompt}, sample {place.sample} (row {place.row})"
    if place.token is None:
        return row
    return f"{row}, token {place.token}" + (f" {place.text!r}" if place.text else "")


def print_json(results: Sequence[Replay], record: Record, *, rewards: Sequence[Difference] = ()) -> None:
    """Print all results as JSON; a number that is not finite is null. rewards: scored again, where they were."""
    layouts = [
        {
            "layout": result.layout.name,
            "ranks": result.layout.ranks,
            "good": result.first is None,
            "first": None if result.first is None else result.first.tensor,
            "tensors": [asdict(difference) for difference in result.differences],
        }
        for result in results
    ]
    facts = {
        "record": str(record.folder),
        "step": record.description.step,
        "good": all(result.first is None for result in results) and all(one.good for one in rewards),
        "layouts": layouts,
        "rewards": [asdict(difference) for difference in rewards],
    }
    typer.echo(json.dumps(plain(facts)))
