"""Output of the convert commands: text, one JSON object with --json, and a progress bar."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mega_rl.converters.architecture import HFConfig
from mega_rl.errors import in_units
from mega_rl.tracking import progress

if TYPE_CHECKING:
    from mega_rl.converters.offline.compare import Comparison, Verification
    from mega_rl.verify.twin.compare import Parity

SHOWN = 20  # names listed of each kind; --json has them all


def is_main() -> bool:
    """Return whether this process prints: rank 0."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def showing(label: str = "importing PyTorch") -> Iterator[None]:
    """Show the progress of the block on rank 0's terminal, and `label` while nothing in it can be counted."""
    progress.show_progress()
    with progress.phase(label):
        yield


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(facts, default=str))
    else:
        width = max(len(name) for name in facts)
        for name, value in facts.items():
            typer.echo(f"{name:<{width}}  {value:,}" if isinstance(value, int) else f"{name:<{width}}  {value}")


def print_report(target: Path, report: Any, as_json: bool) -> None:
    facts = dataclasses.asdict(report)
    if as_json:
        print_facts({"target": str(target), **facts}, True)
        return
    if not is_main():
        return
    rate = report.num_bytes / max(report.seconds, 1e-9) / 1e9
    typer.echo(
        f"{target}: {report.num_tensors:,} tensors in {report.num_files} file(s), {in_units(report.num_bytes)}, "
        f"{report.seconds:.1f} s ({rate:.2f} GB/s)"
    )
    for label in ("ignored", "absent", "kept"):
        _print_names(label, facts[label])


def print_description(facts: dict[str, Any]) -> None:
    if not is_main():
        return
    typer.echo(
        f"{facts['family']}: {facts['num_params']:,} elements in {facts['num_tensors']:,} tensors, "
        f"{in_units(facts['nbytes'])}" + (" (by config.json; no weights are here)" if facts["kind"] == "config" else "")
    )
    typer.echo("dtypes: " + ", ".join(f"{name} ({count})" for name, count in facts["dtypes"].items()))
    usual = {field.name: field.default for field in dataclasses.fields(HFConfig)}
    shown = {k: v for k, v in facts["architecture"].items() if k != "family" and v != usual.get(k)}
    typer.echo("architecture:")
    width = max(map(len, shown))
    for name, value in shown.items():
        typer.echo(f"  {name:<{width}}  {_brief(value)}")
    typer.echo(f"layout {facts['layout']}, weights of each rank in the checkpoint's type:")
    for stage in facts["stages"]:
        layers = ", ".join(stage["layers"])
        typer.echo(
            f"  pp_rank {stage['pp_rank']}: layers {layers}: {stage['params']:,} elements, {in_units(stage['nbytes'])}"
        )
    for label in ("missing", "unexpected", "mis_shaped", "contradicting", "ignored"):
        _print_names(label, facts[label])


def _brief(value: Any) -> str:
    """Return a value on one line; flags per layer as their count."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_brief(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, bool) for v in value):
        return f"{sum(value)} of {len(value)}"
    return str(value)


def print_verification(verification: Verification, parity: Parity | None, as_json: bool) -> None:
    """Print the result of verifying a checkpoint, with the comparison of logits if there is one."""
    if not is_main():
        return
    good = verification.equal and (parity is None or parity.good)
    if as_json:
        comparison = None if verification.comparison is None else _comparison_facts(verification.comparison)
        logits = None if parity is None else dataclasses.asdict(parity)
        facts = {"equal": good, **dataclasses.asdict(verification), "comparison": comparison, "logits": logits}
        print_facts(facts, True)
        return
    typer.echo(f"proof: every element of {verification.layout} is planned exactly once")
    if verification.comparison is not None:
        print_comparison(verification.comparison, False)
    if verification.returned is not None:
        typer.echo(f"import and export in memory: {verification.returned:,} tensors come back bit for bit")
        _print_names("do not come back", verification.lost)
    if parity is not None:
        typer.echo(f"logits: {parity.summary}")
        for line in parity.details:
            typer.echo(f"  {line}")
    typer.echo("equal" if good else "differs")


def print_comparison(comparison: Comparison, as_json: bool) -> None:
    """Print the differences between two checkpoints."""
    if not is_main():
        return
    if as_json:
        print_facts(_comparison_facts(comparison), True)
        return
    typer.echo(f"{comparison.num_equal:,} tensors are equal bit for bit (digest of the first: {comparison.digest})")
    _print_names("only in the first", comparison.only_first)
    _print_names("only in the second", comparison.only_second)
    _print_names("other type or shape", comparison.mismatched)
    _print_names("config.json", comparison.config)
    _print_names("in one only, as allowed", comparison.allowed)
    ranked = sorted(comparison.different, key=lambda d: -d.max_abs)
    for d in ranked[:SHOWN]:
        typer.echo(
            f"  {d.name}: {d.elements:,} of {d.numel:,} elements differ, "
            f"max {d.max_abs:.3g}, mean {d.mean_abs:.3g} (largest value {d.max_of_first:.3g})"
        )
    if len(ranked) > SHOWN:
        typer.echo(f"  and {len(ranked) - SHOWN:,} more tensors")


def _comparison_facts(comparison: Comparison) -> dict[str, Any]:
    return {"equal": comparison.equal, "digest": comparison.digest, **dataclasses.asdict(comparison)}


def _print_names(label: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        typer.echo(f"{label} ({len(names):,}): " + ", ".join(names[:SHOWN]) + more)


def elements(params: Sequence[tuple[str, Any]]) -> int:
    return sum(math.prod(param.shape) for _, param in params)


def copies_in_words(copies: list[Any]) -> Iterator[str]:
    """Yield copies in words, without the middle of a long list."""
    shown = copies if len(copies) <= 8 else [*copies[:4], None, *copies[-3:]]
    for c in shown:
        if c is None:
            yield f"... {len(copies) - 7} more"
            continue
        there = f"[{c.dst_row}:{c.dst_row + c.rows}, {c.dst_col}:{c.dst_col + c.cols}]"
        height, width = c.src_shape
        step = f":{c.step}" if c.step > 1 else ""
        here = f"[{c.src_row}:{c.src_row + height}, {c.src_col}:{c.src_col + width}{step}]"
        yield f"{there} <- " + (
            "0" if c.hf_name is None else f"{c.hf_name}{here}" + (" transposed" if c.transposed else "")
        )
