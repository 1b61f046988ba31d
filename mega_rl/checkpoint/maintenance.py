"""`mega-rl checkpoint list | verify | prune`: what is in a run folder, whether it is whole, and what may go.

Each function prints and returns the exit code: 0, or 1 when a checkpoint is damaged. Raises UserError for a mistake of
the user. Only `verify` reads data, and imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, MANIFEST_FILE
from mega_rl.checkpoint.lock import RunLock
from mega_rl.checkpoint.previous import CHECKPOINTS, previous_runs
from mega_rl.errors import UserError, UserErrors

EXIT_DAMAGED = 1


def list_checkpoints(run: Path, *, metric: str = "", as_json: bool = False) -> int:
    """Show the checkpoints of a run, and what only looks like one. Reads manifests and sizes.

    `metric`: whose value to show; default: the one that the run keeps the best checkpoint by.
    """
    one = run.absolute() if _is_checkpoint(run) else None
    root = _root_of(run if one is None else one.parent)
    rows = [_described(folder, metric) for folder in folders.complete(root) if one in (None, folder)]
    rows += [_unusable(path, why) for path, why in folders.torn(root) if one in (None, path)]
    earlier = previous_runs(root.parent) if one is None else []
    if as_json:
        aside = [str(folder) for folder in earlier]
        typer.echo(json.dumps({"root": str(root), "checkpoints": rows, "previous": aside}))
        return EXIT_DAMAGED if any(row["state"] == "damaged" for row in rows) else 0
    if rows:
        _print_table(rows)
    else:
        typer.echo(f"{root}: no checkpoints")
    for folder in earlier:
        steps = [str(folders.step_of(checkpoint)) for checkpoint in folders.complete(folder / CHECKPOINTS)]
        typer.echo(f"an earlier run is in {folder}: checkpoints of steps {', '.join(steps) or 'none'}")
    return EXIT_DAMAGED if any(row["state"] == "damaged" for row in rows) else 0


def verify_checkpoints(path: Path, *, as_json: bool = False) -> int:
    """Read every byte of every checkpoint of a run, or of one checkpoint, and compare all checksums."""
    targets, notes = _targets(path)
    reports = []
    for folder in targets:
        report = _verified(folder)
        reports.append(report)
        if as_json:
            continue
        if not report["faults"]:
            size = _size(report["bytes"])
            typer.echo(f"{folder}: whole: {report['tensors']:,} tensors, {report['pieces']:,} pieces, {size}")
        for fault in report["faults"]:
            typer.echo(f"{folder}: damaged: {fault.removeprefix(f'{folder}/')}")
    if as_json:
        ignored = [{"path": str(path), "reason": why} for path, why in notes]
        typer.echo(json.dumps({"checkpoints": reports, "ignored": ignored}))
    else:
        for path, why in notes:
            typer.echo(f"{path}: ignored: {why}")
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
    """Remove checkpoints of a run as training with these settings would, and what torn saves have left.

    Reads every byte of what counts as kept: the newest `keep` that are whole stay, and so do damaged ones among them.
    Raises UserError when none is whole, or when a run writes there.
    """
    root = _root_of(run)
    for name, value, least in (("--keep", keep, 1), ("--keep-interval", keep_interval, 0)):
        if value < least:
            raise UserError(f"{name}={value}: must be at least {least}")
    if dry_run:
        surplus, damaged = _surplus(root, keep, keep_interval, keep_best)
    else:
        with RunLock(root, what=str(run), fix="stop it first, or use --dry-run"):
            surplus, damaged = _surplus(root, keep, keep_interval, keep_best)
            folders.remove([path for path, _ in surplus])
    gone = {path for path, _ in surplus}
    kept = [str(folder) for folder in folders.complete(root) if folder not in gone and folder not in damaged]
    if as_json:
        removed = [{"path": str(path), "reason": why} for path, why in surplus]
        left = [{"path": str(path), "faults": faults} for path, faults in damaged.items()]
        typer.echo(json.dumps({"removed": removed, "kept": kept, "damaged": left, "dry_run": dry_run}))
        return 0
    for path, why in surplus:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {path}: {why}")
    for path, faults in damaged.items():
        typer.echo(f"{path}: damaged, not counted and left there: {faults[0]}")
    typer.echo(f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}")
    return 0


def _surplus(
    root: Path, keep: int, keep_interval: int, keep_best: str
) -> tuple[list[tuple[Path, str]], dict[Path, list[str]]]:
    """Return (folder, reason) of what may go, and the faults of damaged ones among the newest; those stay.

    Every byte of the newest is read until `keep` of them are whole. Raises UserError or UserErrors.
    """
    complete = folders.complete(root)
    if not complete:
        raise UserError(f"{root}: holds no complete checkpoint, so nothing is removed; remove folders by hand")
    if keep_best and not any(keep_best in _metrics_of(folder) for folder in complete):
        raise UserError(f"--keep-best={keep_best}: no checkpoint has this metric; see mega-rl checkpoint list --json")
    damaged: dict[Path, list[str]] = {}
    num_whole = 0
    for folder in reversed(complete):
        if num_whole == keep:
            break
        faults = _verified(folder)["faults"]
        if faults:
            damaged[folder] = faults
        else:
            num_whole += 1
    if not num_whole:
        problems = [fault for faults in damaged.values() for fault in faults[:1]]
        raise UserErrors([*problems, f"{root}: every checkpoint is damaged, so nothing is removed"])
    surplus = folders.surplus(
        root,
        newest_step=folders.step_of(complete[-1]),
        keep=keep + len(damaged),
        keep_interval=keep_interval,
        keep_best=keep_best,
        verified=True,
    )
    return surplus, damaged


def _metrics_of(folder: Path) -> Mapping[str, float]:
    try:
        return folders.read_manifest(folder).metrics
    except UserError:  # damaged, which is found below
        return {}


def checkpoints_of(path: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first, or the one that the path itself is.

    Raises UserError where there is none.
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
    """The folder of checkpoints of a run folder, or the folder itself if it holds some. Raises UserError."""
    for root in (run / CHECKPOINTS, run):
        if root.is_dir() and (root.name == CHECKPOINTS or folders.complete(root) or folders.torn(root)):
            return root.absolute()
    reason = "holds no checkpoints" if run.is_dir() else "no such folder"
    raise UserError(f"{run}: {reason}; give a run folder (trainer.run_dir) or its {CHECKPOINTS} folder")


def _targets(path: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Checkpoints to verify, and what is ignored beside them with the reason."""
    if _is_checkpoint(path):
        return [path.absolute()], []
    root = _root_of(path)
    whole, others = folders.complete(root), folders.torn(root)
    # Hidden folders belong to saves: a folder gets its visible name when it is complete.
    steps = [other for other, _ in others if folders.is_step_folder(other)]
    if not whole and not steps:
        raise UserError(f"{root}: holds no complete checkpoint")
    return sorted([*whole, *steps], key=folders.step_of), [(p, why) for p, why in others if p not in steps]


def _verified(folder: Path) -> dict[str, Any]:
    """Return the report of `verify` on one checkpoint: counts, bytes and faults."""
    from mega_rl.checkpoint.format.reader import Checkpoint

    report: dict[str, Any] = {"path": str(folder), "tensors": 0, "pieces": 0, "bytes": 0, "faults": []}
    try:
        with Checkpoint.open(folder) as checkpoint:
            report["tensors"] = len(checkpoint.pieces)
            report["pieces"] = sum(len(pieces) for pieces in checkpoint.pieces.values())
            report["bytes"] = sum(shard.nbytes for shard in checkpoint.manifest.shards)
            checkpoint.verify(checkpoint.all_pieces())
    except UserErrors as error:
        report["faults"] = list(error.problems)
    except UserError as error:
        report["faults"] = [str(error)]
    return report


def _described(folder: Path, metric: str) -> dict[str, Any]:
    """Return the row of `list` for a complete checkpoint."""
    try:
        manifest = folders.read_manifest(folder)
    except UserError as error:
        return _unusable(folder, str(error))
    settings = manifest.config.get("checkpoint")
    metric = metric or (settings.get("keep_best", "") if isinstance(settings, dict) else "")
    faults = folders.size_faults(folder)
    return {
        "path": str(folder),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "bytes": sum(shard.nbytes for shard in manifest.shards),
        "layout": manifest.layout,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "metric": metric,
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

    metrics = list(dict.fromkeys(row["metric"] for row in rows if row.get("metric")))
    table = Table(box=None, pad_edge=False)
    for name in ("step", "saved at", "size", "layout", *metrics, "state"):
        table.add_column(name, justify="right" if name in ("step", "size", *metrics) else "left")
    for row in rows:
        table.add_row(*map(_plain, _cells(row, metrics)))
    console = Console()
    console.print(table)


def _cells(row: dict[str, Any], metrics: Iterable[str]) -> list[str]:
    state = row["state"] if not row["reason"] else f"{row['state']}: {row['reason']}"
    if "saved_at" not in row:
        return [Path(row["path"]).name, "", "", "", *("" for _ in metrics), state]
    values = [f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "" for name in metrics]
    return [str(row["step"]), row["saved_at"][:19], _size(row["bytes"]), row["layout"], *values, state]


def _plain(text: str) -> Any:
    """Text of a file as it is, without rich's markup or control characters."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.2f} MB"
