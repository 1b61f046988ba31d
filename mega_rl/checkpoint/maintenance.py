"""`mega-rl checkpoint list | verify | prune | memory`: checkpoints on disk and in memory.

Each function prints and returns the exit code: 0, or 1 when a checkpoint is damaged. Raises UserError for a mistake of
the user. Only `verify` and `prune` read data, and import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import CHECKPOINTS
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, MANIFEST_FILE
from mega_rl.checkpoint.lock import LOCK_FILE, RunLock
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.previous import previous_runs
from mega_rl.disk import lock_file
from mega_rl.errors import UserError, UserErrors, in_units
from mega_rl.untrusted import shorten

EXIT_DAMAGED = 1


def list_checkpoints(run: Path, *, metric: str = "", as_json: bool = False) -> int:
    """Show the checkpoints of a run, and torn ones with the reason. Reads manifests and sizes.

    `metric`: shown metric; default: the one that the run keeps the best checkpoint by.
    """
    one = run.absolute() if _is_checkpoint(run) else None
    root = _root_of(run if one is None else one.parent)
    rows = [_described(folder, metric) for folder in folders.complete(root) if one in (None, folder)]
    rows += [_unusable(path, why) for path, why in folders.torn(root) if one in (None, path)]
    earlier = previous_runs(root.parent) if one is None else []
    if as_json:
        aside = [str(folder) for folder in earlier]
        typer.echo(json.dumps({"root": str(root), "checkpoints": rows, "previous": aside}))
    elif rows:
        _print_table(rows)
    else:
        typer.echo(f"{root}: no checkpoints")
    for folder in earlier if not as_json else ():
        steps = [str(folders.step_of(checkpoint)) for checkpoint in folders.complete(folder / CHECKPOINTS)]
        typer.echo(f"an earlier run is in {folder}: checkpoints of steps {', '.join(steps) or 'none'}")
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

    Reads every byte of the newest checkpoints until `keep` are whole; damaged ones among them stay. Raises UserError
    when none is whole, or when a run writes there.
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
    lines = [f"{'would remove' if dry_run else 'removed'} {path}: {why}" for path, why in surplus]
    lines += [f"{path}: damaged, not counted and left there: {faults[0]}" for path, faults in damaged.items()]
    typer.echo("\n".join([*lines, f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}"]))
    return 0


def list_memory(run: Path | None, *, remove: bool = False, as_json: bool = False, shm: Path = place.SHM) -> int:
    """Show or remove the checkpoints of one or all runs in this host's memory.

    Removes nothing that a run uses, by its lock. Raises UserError for a folder that other users may enter.
    """
    if why := place.unusable(place.user_folder(shm) / "run"):
        raise UserError(f"{why}; it is not read, ask who made it")
    rows, lines = [], []
    for folder in place.folders_of_runs(shm):
        run_dir = place.run_dir_of(folder)
        if run is not None and run_dir != os.path.realpath(run):
            continue
        with _unused(run_dir) as unused:
            state = "in use" if not unused else "removed" if remove else "left"
            steps = [folders.step_of(path) for path in folders.complete(folder)]
            nbytes = _bytes_of(folder)
            if remove and unused:
                place.remove(folder)
        rows.append({"path": str(folder), "run": run_dir, "steps": steps, "bytes": nbytes, "state": state})
        named, of = ", ".join(map(str, steps)) or "none", shorten(run_dir) or "an unknown run"
        lines.append(f"{folder}: of {of}: steps {named}, {in_units(nbytes)}: {state}")
    lines = lines or [f"{place.user_folder(shm)}: no checkpoints in memory"]
    typer.echo(json.dumps({"memory": rows}) if as_json else "\n".join(lines))
    return 0


@contextmanager
def _unused(run_dir: str) -> Iterator[bool]:
    """Yield whether no run has the lock of a run folder; meanwhile none can take it."""
    path = Path(run_dir) / CHECKPOINTS / LOCK_FILE
    if not run_dir or not os.path.lexists(path):
        yield True
        return
    try:
        fd = lock_file(path)
    except OSError:  # held, or not readable, so it may be held
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def _bytes_of(folder: Path) -> int:
    """Return the memory that the files of a folder take: of sparse files the written part."""
    nbytes = 0
    for parent, names, files in os.walk(folder):
        for name in (*names, *files):
            with suppress(OSError):  # a run in use removes files meanwhile
                nbytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return nbytes


def _surplus(
    root: Path, keep: int, keep_interval: int, keep_best: str
) -> tuple[list[tuple[Path, str]], dict[Path, list[str]]]:
    """Return (folder, reason) of checkpoints to remove, and faults of damaged ones that stay.

    Reads every byte of the newest until `keep` of them are whole. Raises UserError or UserErrors.
    """
    complete = folders.complete(root)
    if not complete:
        raise UserError(f"{root}: holds no complete checkpoint, so nothing is removed; remove folders by hand")
    metrics: set[str] = set()
    for folder in complete if keep_best else ():
        with suppress(UserError):  # reported below
            metrics.update(folders.read_manifest(folder).metrics)
    if keep_best and keep_best not in metrics:
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
