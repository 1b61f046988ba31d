"""`mega-rl checkpoint`: the checkpoints of a run. Imports torch only to verify and to export.

`list` and `verify` end with exit code 1 when a checkpoint is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import CHECKPOINTS, RunLock
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, MANIFEST_FILE
from mega_rl.cli.convert import Dtype, Jobs, Overwrite, show_report
from mega_rl.cli.options import Json
from mega_rl.cli.options import checkpoint as hub_checkpoint
from mega_rl.cli.output import Commands, print_json, print_table, show, showing
from mega_rl.data.downloads import checkpoint_folder
from mega_rl.errors import UserError, in_units
from mega_rl.tracking.progress import printable

app = Commands(name="checkpoint", help="List, verify, export and remove the checkpoints of a run.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or its checkpoints folder.")]


@app.command("list")
def list_(
    run: Run,
    metric: Annotated[str, typer.Option(help="Show this metric; default: that of checkpoint.keep_best.")] = "",
    as_json: Json = False,
) -> int:
    """List checkpoints with step, time, size, layout, state. Exit code 1: missing or short files."""
    one = run.absolute() if _is_checkpoint(run) else None
    root = _root_of(run if one is None else one.parent)
    rows = [_described(folder, metric) for folder in folders.complete(root) if one in (None, folder)]
    rows += [_unusable(path, why) for path, why in folders.torn(root) if one in (None, path)]
    if as_json:
        print_json({"root": str(root), "checkpoints": rows})
    elif rows:
        _print_rows(rows)
    else:
        typer.echo(f"{root}: no checkpoints")
    return int(any(row["state"] == "damaged" for row in rows))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run folder, or one checkpoint.")],
    as_json: Json = False,
) -> int:
    """Read every byte and compare all checksums. Exit code 1 if any differs."""
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
    ignored = [{"path": str(other), "reason": why} for other, why in notes]
    lines = [f"{other}: ignored: {why}" for other, why in notes]
    show({"checkpoints": reports, "ignored": ignored}, lines, as_json=as_json)
    return int(any(report["faults"] for report in reports))


@app.command()
def prune(
    run: Run,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints kept.")],
    keep_interval: Annotated[int, typer.Option(min=0, help="Also keep those whose step is a multiple of this.")] = 0,
    keep_best: Annotated[str, typer.Option(help="Also keep the one with the largest value of this metric.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old checkpoints, and what torn saves have left; never the newest one.

    Removes nothing if files of the newest are missing or short.
    """
    root = _root_of(run)
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
    removed = [{"path": str(path), "reason": why} for path, why in surplus]
    lines = [f"{'would remove' if dry_run else 'removed'} {path}: {why}" for path, why in surplus]
    lines.append(f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}")
    show({"removed": removed, "kept": kept, "dry_run": dry_run}, lines, as_json=as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or one checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    step: Annotated[int | None, typer.Option(min=0, help="Of which step; default: the newest.")] = None,
    role: Annotated[Literal["actor", "critic"], typer.Option(help="Which model: actor or critic.")] = "actor",
    reference: Annotated[
        Path | None,
        typer.Option(
            "--hf",
            metavar="HF_DIR",
            callback=hub_checkpoint,
            help="Whose config and tokenizer to copy; default: the run's model.",
        ),
    ] = None,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint, of any layout and engine, as a Hugging Face checkpoint."""
    root = None if _is_checkpoint(run) else _root_of(run)
    candidates = [run.absolute()] if root is None else folders.complete(root)
    if not candidates:
        raise UserError(f"{root}: holds no complete checkpoint")
    complete = {folders.step_of(folder): folder for folder in candidates}
    if step is not None and step not in complete:
        steps = ", ".join(map(str, complete))
        raise UserError(f"--step={step}: {run} has no complete checkpoint of this step; it has {steps}")
    folder = candidates[-1] if step is None else complete[step]
    manifest = folders.read_manifest(folder).config.get("model")
    model: dict[str, Any] = manifest if isinstance(manifest, dict) else {}
    source = reference or _origin(model, folder, role)
    trained = {"bf16": "bfloat16", "fp32": "float32"}.get(str(model.get("dtype")))
    with showing():
        from mega_rl.checkpoint.weights import open_weights
        from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint

        report = export_checkpoint(
            folder,
            target,
            reference=source,
            options=ExportOptions(dtype=dtype or trained),
            overwrite=overwrite,
            jobs=jobs,
            opened=lambda: open_weights(folder, role=role, reference=source),
        )
    show_report(target, report, as_json=as_json)


def _origin(model: dict[str, Any], folder: Path, role: str) -> Path:
    """Return the Hugging Face folder that a role's model came from. Raises UserError if missing."""
    text = str((model.get("critic_path") if role == "critic" else "") or model.get("path", ""))
    path = checkpoint_folder(text, label="model.path")
    if not text or not (path / "config.json").is_file():
        raise UserError(
            f"{folder}: its run trained {text!r}, which is not here; name a folder with its config.json and tokenizer "
            "by --hf"
        )
    return path


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
        report |= {"tensors": len(checkpoint.pieces), "pieces": sum(map(len, checkpoint.pieces.values()))}
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


def _print_rows(rows: list[dict[str, Any]]) -> None:
    metrics = list(dict.fromkeys(row["metric"] for row in rows if row.get("metric")))
    lines = []
    for row in rows:
        cells = [Path(row["path"]).name, "", "", "", *("" for _ in metrics)]
        if "saved_at" in row:
            values = [f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "" for name in metrics]
            cells = [str(row["step"]), row["saved_at"][:19], in_units(row["bytes"]), row["layout"], *values]
        cells.append(row["state"] if not row["reason"] else f"{row['state']}: {row['reason']}")
        lines.append([printable(cell) for cell in cells])  # files may hold any text
    print_table(("step", "saved at", "size", "layout", *metrics, "state"), lines)
