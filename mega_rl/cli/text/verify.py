"""Output of `mega-rl verify`: a table, or one JSON object with --json. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from mega_rl.verify.plan import LayoutErrors, TensorError
from mega_rl.verify.tolerances import Tolerances

if TYPE_CHECKING:
    from mega_rl.verify.run import Verdict

NUMBERS = ("layout", "ranks", "log-prob error", "loss", "grad-norm error")
WORST = ("worst gradient", "worst weight after a step")
WIDE = 140  # columns of a terminal that has room for the names of tensors


def print_verdicts(verdicts: Sequence[Verdict], *, header: Mapping[str, Any], tolerances: Tolerances) -> None:
    """Print the table, and below it the problems; on a narrow terminal the worst tensors as well."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    for name, value in header.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    sheet = Console(width=None if console.is_terminal else 200)
    wide = sheet.width >= WIDE
    table = Table(*NUMBERS, *(WORST if wide else ()), "verdict", box=box.SIMPLE_HEAD)
    for verdict in verdicts:
        cells = _cells(verdict.errors)
        worst = cells[-len(WORST) :] if wide else ()
        table.add_row(verdict.layout.title, str(verdict.layout.ranks), *cells[: -len(WORST)], *worst, _word(verdict))
    sheet.print(table)
    for verdict in () if wide else verdicts:
        for name, cell in zip(WORST, _cells(verdict.errors)[-len(WORST) :], strict=True):
            console.print(f"{verdict.layout.title}: {name}: {cell}", markup=False, highlight=False)
    allowed = ", ".join(f"{name} {value:g}" for name, value in asdict(tolerances).items())
    console.print(f"tolerances: {allowed}", markup=False, highlight=False)
    for verdict in verdicts:
        for problem in verdict.problems:
            console.print(f"{verdict.layout.title}: {problem}", markup=False, highlight=False)


def print_json(verdicts: Sequence[Verdict], *, header: Mapping[str, Any], tolerances: Tolerances) -> None:
    """Print all results as JSON, every tensor's error included; an error that is not finite is null."""
    layouts = [
        {
            **asdict(verdict.layout),
            "ranks": verdict.layout.ranks,
            "good": verdict.good,
            "problems": verdict.problems,
            "found": None if verdict.errors is None else asdict(verdict.errors),
        }
        for verdict in verdicts
    ]
    good = all(verdict.good for verdict in verdicts)
    facts = {"good": good, **header, "tolerances": asdict(tolerances), "layouts": layouts}
    typer.echo(json.dumps(plain(facts)))


def _cells(result: LayoutErrors | None) -> tuple[str, ...]:
    """Return a layout's cells of the table between its ranks and its verdict."""
    if result is None:
        return ("-",) * 5
    return (
        f"{result.logprob_error:.1e}",
        f"{result.loss:.6g}",
        f"{result.grad_norm_error:.1e}",
        _worst(result.gradients),
        _worst(result.weights),
    )


def _worst(errors: Sequence[TensorError]) -> str:
    return f"{errors[0].error:.1e} {errors[0].name.removeprefix('model.')}" if errors[0].error else "0"


def _word(verdict: Verdict) -> str:
    if verdict.errors is None:
        return "failed"
    return "equal" if verdict.good else "DIFFERS"


def plain(value: Any) -> Any:
    """Return the value with None for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value
