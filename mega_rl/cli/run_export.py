"""`mega-rl checkpoint export`: the weights of a run's checkpoint as a Hugging Face folder. Needs no model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import Manifest
from mega_rl.checkpoint.maintenance import checkpoints_of
from mega_rl.cli.checkpoint import app
from mega_rl.cli.convert import Dtype, Jobs, Json, Overwrite
from mega_rl.cli.text.convert import print_report, progress_bar
from mega_rl.errors import UserError
from mega_rl.hub.arguments import checkpoint as hub_checkpoint
from mega_rl.hub.resolve import checkpoint_folder

ROLES = ("actor", "critic")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # of model.dtype


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or one checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of which step; default: the newest.")] = None,
    role: Annotated[str, typer.Option("--role", help="Which model: actor or critic.")] = "actor",
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
    if role not in ROLES:
        raise UserError(f"--role={role}: must be one of {', '.join(ROLES)}")
    folder = _checkpoint(run, step)
    manifest = folders.read_manifest(folder)
    source = reference or _model_of(manifest, folder, role)
    trained = _DTYPES.get(str(_model_settings(manifest).get("dtype")))
    with progress_bar() as progress:
        from mega_rl.checkpoint.weights import open_weights
        from mega_rl.converters.offline.convert import ExportOptions, WriteOptions, export_checkpoint

        report = export_checkpoint(
            folder,
            target,
            reference=source,
            options=ExportOptions(dtype=dtype or trained),
            writing=WriteOptions(overwrite, jobs, progress),
            opened=lambda: open_weights(folder, role=role, reference=source),
        )
    print_report(target, report, as_json)


def _checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint to export. Raises UserError."""
    complete = checkpoints_of(run)
    if step is None:
        return complete[-1]
    matching = [folder for folder in complete if folders.step_of(folder) == step]
    if not matching:
        steps = ", ".join(str(folders.step_of(folder)) for folder in complete)
        raise UserError(f"--step={step}: {run} has no complete checkpoint of this step; it has {steps}")
    return matching[0]


def _model_of(manifest: Manifest, folder: Path, role: str) -> Path:
    """Return the Hugging Face folder that a role's model came from. Raises UserError where it is not there."""
    settings = _model_settings(manifest)
    text = str((settings.get("critic_path") if role == "critic" else "") or settings.get("path", ""))
    path = checkpoint_folder(text, label="model.path")
    if not text or not (path / "config.json").is_file():
        raise UserError(
            f"{folder}: its run trained {text!r}, which is not here; name a folder with its config.json and tokenizer "
            "by --hf"
        )
    return path


def _model_settings(manifest: Manifest) -> dict[str, Any]:
    """Return the section model of the run's config."""
    model = manifest.config.get("model")
    return model if isinstance(model, dict) else {}
