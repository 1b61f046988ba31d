"""`mega-rl checkpoint`: the checkpoints of a run. Imports torch only to verify and to export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint import maintenance as verbs
from mega_rl.cli.convert import Dtype, Jobs, Overwrite, show_report
from mega_rl.cli.options import Json
from mega_rl.cli.options import checkpoint as hub_checkpoint
from mega_rl.cli.output import Commands, showing
from mega_rl.data.downloads import checkpoint_folder
from mega_rl.errors import UserError

app = Commands(name="checkpoint", help="List, verify, export and remove the checkpoints of a run.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or its checkpoints folder.")]


@app.command("list")
def list_(
    run: Run,
    metric: Annotated[
        str, typer.Option("--metric", help="Show this metric; default: that of checkpoint.keep_best.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List checkpoints with step, time, size, layout, state. Exit code 1: missing or short files."""
    raise typer.Exit(verbs.list_checkpoints(run, metric=metric, as_json=as_json))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run folder, or one checkpoint.")],
    as_json: Json = False,
) -> None:
    """Read every byte and compare all checksums. Exit code 1 if any differs."""
    raise typer.Exit(verbs.verify_checkpoints(path, as_json=as_json))


@app.command()
def prune(
    run: Run,
    keep: Annotated[int, typer.Option("--keep", help="Newest checkpoints kept.")],
    keep_interval: Annotated[
        int, typer.Option("--keep-interval", help="Also keep those whose step is a multiple of this.")
    ] = 0,
    keep_best: Annotated[
        str, typer.Option("--keep-best", help="Also keep the one with the largest value of this metric.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old checkpoints, and what torn saves have left; never the newest one."""
    raise typer.Exit(
        verbs.prune(run, keep=keep, keep_interval=keep_interval, keep_best=keep_best, dry_run=dry_run, as_json=as_json)
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or one checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of which step; default: the newest.")] = None,
    role: Annotated[Literal["actor", "critic"], typer.Option("--role", help="Which model: actor or critic.")] = "actor",
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
    complete = {folders.step_of(folder): folder for folder in verbs.checkpoints_of(run)}
    if step is not None and step not in complete:
        steps = ", ".join(map(str, complete))
        raise UserError(f"--step={step}: {run} has no complete checkpoint of this step; it has {steps}")
    folder = list(complete.values())[-1] if step is None else complete[step]
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
