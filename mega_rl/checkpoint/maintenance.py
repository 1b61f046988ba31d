"""`mega-rl checkpoint list | verify | prune`: checkpoints of a run.

Each function prints and returns the exit code: 0, or 1 when a checkpoint is damaged. Raises UserError for a mistake of
the user. Only `verify` reads data, and imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import CHECKPOINTS, RunLock
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, MANIFEST_FILE
from mega_rl.errors import UserError, in_units

EXIT_DAMAGED = 1


def list_checkpoints(run: Path, *, metric: str = "", as_json: bool = False) -> int:
    """Show the checkpoints of a run, and torn ones with the reason. Reads manifests and sizes.

    `metric`: shown metric; default: the one that the run keeps the best checkpoint by.
    """
    one = run.absolute() if _is_checkpoint(run) else None
    root = _root_of(run if one is None else one.parent)
    rows = [_described(folder, metric) for folder in folders.complete(root) if one in (None, folder)]
    rows += [_unusable(path, why) for path, why in folders.torn(root) if one in (None, path)]
    if as_json:
        typer.echo(json.dumps({"root": str(root), "checkpoints": rows}))
    elif rows:
        _print_table(rows)
    else:
        typer.echo(f"{root}: no checkpoints")
    return EXIT_DAMAGED if any(row["state"] == "damaged" for row in rows) else 0


def verify_checkpoints(path: Path, *, as_json: bool = False) -> int:
    """Read every byte of one or all checkpoints of a run; compare all checksums."""
    targets, notes = [path.absolute()], []
    if not _is_checkpoint(path):
        root = _root_of(path)
        # Hidden folders belong to saves: a folder gets its visible name when it is complete.
        steps = [other for other, _ in folders.torn(root) if folders.is_step_folder(other)]
        targets = sorted([*folders.complete(root), *steps], key=folders.step_of)
        notes = [(other, why) for other, why in folders.torn(root) if other not in steps]
        if not targets:
            raise UserError(f"{root}: holds no complete checkpoint")
    reports = []
    for folder in targets:
        report = _verified(folder)
        reports.append(report)
        lines = [f"damaged: {fault.removeprefix(f'{folder}/')}" for fault in report["faults"]]
        size = in_units(report["bytes"])
        whole = f"whole: {report['tensors']:,} tensors, {report['pieces']:,} pieces, {size}"
        for line in (lines or [whole]) if not as_json else ():
            typer.echo(f"{folder}: {line}")
    if as_json:
        ignored = [{"path": str(other), "reason": why} for other, why in notes]
        typer.echo(json.dumps({"checkpoints": reports, "ignored": ignored}))
    else:
        for other, why in notes:
            typer.echo(f"{other}: ignored: {why}")
    return EXIT_DAMAGED if any(report["faults"] for report in reports) else 0


def prune(
    run: Path,
    *,
    keep: int,
    keep_interval: int = 0,
    keep_best: str = "",
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Remove checkpoints as training with these settings would, and remains of torn saves.

    Removes nothing if files of the newest are missing or short. Raises UserError when a run writes there.
    """
    root = _root_of(run)
    for name, value, least in (("--keep", keep, 1), ("--keep-interval", keep_interval, 0)):
        if value < least:
            raise UserError(f"{name}={value}: must be at least {least}")
    with nullcontext() if dry_run else RunLock(root, what=str(run), fix="stop it first, or use --dry-run"):
        complete = folders.complete(root)
        if not complete or (faults := folders.size_faults(complete[-1])):
            why = f"the newest checkpoint is damaged: {faults[0]}" if complete else "holds no complete checkpoint"
            raise UserError(f"{root}: {why}; nothing is removed: remove folders by hand")
        metrics = {name for folder in complete for name in folders.read_manifest(folder).metrics}
        if keep_best and keep_best not in metrics:
            raise UserError(f"--keep-best={keep_best}: no checkpoint has this metric; they have {sorted(metrics)}")
        newest = folders.step_of(complete[-1])
        surplus = folders.surplus(root, newest_step=newest, keep=keep, keep_interval=keep_interval, keep_best=keep_best)
        if not dry_run:
            folders.remove([path for path, _ in surplus])
    gone = {path for path, _ in surplus}
    kept = [str(folder) for folder in complete if folder not in gone]
    if as_json:
        removed = [{"path": str(path), "reason": why} for path, why in surplus]
        typer.echo(json.dumps({"removed": removed, "kept": kept, "dry_run": dry_run}))
        return 0
    lines = [f"{'would remove' if dry_run else 'removed'} {path}: {why}" for path, why in surplus]
    typer.echo("\n".join([*lines, f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}"]))
    return 0


def checkpoints_of(path: Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first, or the one at the path.

    Raises UserError if there is none.
    """
    if _is_checkpoint(path):
        return [path.absolute()]
    root = _root_of(path)
    complete = folders.complete(root)
    if not complete:
        raise UserError(f"{root}: holds no complete checkpoint")
    return complete


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint, by its name or its files."""
    files = (MANIFEST_FILE, COMMIT_FILE)
    return path.is_dir() and (folders.is_step_folder(path) or any(os.path.lexists(path / name) for name in files))


def _root_of(run: Path) -> Path:
    """Return a run's folder of checkpoints, or the folder itself. Raises UserError."""
    for root in (run / CHECKPOINTS, run):
        if root.is_dir() and (root.name == CHECKPOINTS or folders.complete(root) or folders.torn(root)):
            return root.absolute()
    reason = "holds no checkpoints" if run.is_dir() else "no such folder"
    raise UserError(f"{run}: {reason}; give a run folder (trainer.run_dir) or its {CHECKPOINTS} folder")


def _verified(folder: Path) -> dict[str, Any]:
    """Return the report of `verify` on one checkpoint: counts, bytes and faults."""
    from mega_rl.checkpoint.format.reader import Checkpoint

    report: dict[str, Any] = {"path": str(folder), "tensors": 0, "pieces": 0, "bytes": 0, "faults": []}
    try:
        checkpoint = Checkpoint.open(folder)
        report["tensors"] = len(checkpoint.pieces)
        report["pieces"] = sum(len(pieces) for pieces in checkpoint.pieces.values())
        report["bytes"] = sum(shard.nbytes for shard in checkpoint.manifest.shards)
        checkpoint.verify(checkpoint.all_pieces())
    except UserError as error:
        report["faults"] = str(error).split("\n")
    return report


def _described(folder: Path, metric: str) -> dict[str, Any]:
    """Return the row of `list` for a complete checkpoint."""
    try:
        manifest = folders.read_manifest(folder)
    except UserError as error:
        return _unusable(folder, str(error))
    settings = manifest.config.get("checkpoint")
    faults = folders.size_faults(folder)
    return {
        "path": str(folder),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "bytes": sum(shard.nbytes for shard in manifest.shards),
        "layout": manifest.layout,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "metric": metric or (settings.get("keep_best", "") if isinstance(settings, Mapping) else ""),
        "state": "damaged" if faults else "complete",
        "reason": "; ".join(faults),
    }


def _unusable(path: Path, why: str) -> dict[str, Any]:
    """Return the row of `list` for a folder that is not a complete checkpoint."""
    step = folders.step_of(path) if folders.is_step_folder(path) else None
    return {"path": str(path), "step": step, "state": "torn", "reason": why}


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    metrics = list(dict.fromkeys(row["metric"] for row in rows if row.get("metric")))
    table = Table(box=None, pad_edge=False)
    for name in ("step", "saved at", "size", "layout", *metrics, "state"):
        table.add_column(name, justify="right" if name in ("step", "size", *metrics) else "left")
    for row in rows:
        cells = [Path(row["path"]).name, "", "", "", *("" for _ in metrics)]
        if "saved_at" in row:
            values = [f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "" for name in metrics]
            cells = [str(row["step"]), row["saved_at"][:19], in_units(row["bytes"]), row["layout"], *values]
        cells.append(row["state"] if not row["reason"] else f"{row['state']}: {row['reason']}")
        # Files may hold any text: show it without rich's markup and control characters.
        table.add_row(*(Text("".join(c if c.isprintable() else "?" for c in cell)) for cell in cells))
    Console().print(table)
