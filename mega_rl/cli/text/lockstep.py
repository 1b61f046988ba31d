"""Output of `mega-rl verify rl`: tables, or one JSON object with --json. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from mega_rl.verify.tolerances import UPDATES

if TYPE_CHECKING:
    from mega_rl.verify.rl.run import Lockstep, PlantedFault

WIDTH = 160  # columns of a table that does not go to a terminal


def print_lockstep(lockstep: Lockstep, *, tolerances: Mapping[str, float]) -> None:
    """Print the errors of every update on one layout, the tolerances below them, and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    layout = lockstep.layout
    ranks = f"{layout.ranks} rank{'s' * (layout.ranks > 1)}"
    if lockstep.updates:
        present = {phase for update in lockstep.updates for phase in update.errors}
        phases = [phase for phase in tolerances if phase in present - {UPDATES}]
        table = Table("update", *phases, box=box.SIMPLE_HEAD, title=f"{layout.name}, {ranks}", title_justify="left")
        for update in lockstep.updates:
            table.add_row(update.title, *(_cell(update.errors.get(phase), tolerances[phase]) for phase in phases))
        table.add_section()
        table.add_row("tolerance", *(f"{tolerances[phase]:g}" for phase in phases))
        Console(width=None if console.is_terminal else WIDTH).print(table)
    verdict = "agrees" if lockstep.good else f"DIFFERS first at {lockstep.problem}" if lockstep.updates else "failed"
    console.print(f"{layout.name}: {verdict}", markup=False, highlight=False)
    if not lockstep.updates:
        console.print(f"{layout.name}: {lockstep.problem}", markup=False, highlight=False)


def print_faults(results: Sequence[PlantedFault]) -> None:
    """Print what the lockstep said of each planted fault."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("planted fault", "run", "first off", "at", "error", "verdict", box=box.SIMPLE_HEAD)
    for result in results:
        verdict = "named" if result.good else "MISSED" if not result.phase else f"NOT as {result.fault.phase}"
        error = f"{result.error:.1e}" if result.phase else "-"
        table.add_row(
            result.fault.name, result.fault.algorithm, result.phase or "-", result.where or "-", error, verdict
        )
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(table)
    named = sum(result.good for result in results)
    console.print(f"{named} of {len(results)} planted faults are named by their phase", markup=False, highlight=False)


def print_json(locksteps: Sequence[Lockstep], *, header: Mapping[str, object], tolerances: Mapping[str, float]) -> None:
    """Print all errors as one JSON object; one that is not finite is null."""
    layouts = [
        {
            "layout": lockstep.layout.name,
            "ranks": lockstep.layout.ranks,
            "good": lockstep.good,
            "problem": lockstep.problem,
            "updates": [
                {**asdict(update), "errors": {phase: _plain(error) for phase, error in update.errors.items()}}
                for update in lockstep.updates
            ],
        }
        for lockstep in locksteps
    ]
    good = all(lockstep.good for lockstep in locksteps)
    typer.echo(json.dumps({"good": good, **header, "tolerances": dict(tolerances), "layouts": layouts}))


def print_json_faults(results: Sequence[PlantedFault]) -> None:
    """Print what the lockstep said of each planted fault as one JSON object."""
    faults = [
        {
            **{"fault": result.fault.name, "run": result.fault.algorithm, "expected": result.fault.phase},
            **{"phase": result.phase, "where": result.where, "error": _plain(result.error), "good": result.good},
        }
        for result in results
    ]
    typer.echo(json.dumps({"good": all(result.good for result in results), "faults": faults}))


def _cell(error: float | None, tolerance: float) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" + ("" if error <= tolerance else " !")


def _plain(error: float) -> float | None:
    return error if math.isfinite(error) else None
