"""Weights that a recorded step began with: in the record, in a checkpoint of its run, or where the user says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_rl.assemble.plan import roles_of
from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import COMMIT_FILE
from mega_rl.checkpoint.weights import HEADS, open_weights
from mega_rl.config.schema import Config
from mega_rl.converters.offline.convert import ExportOptions, WriteOptions, export_checkpoint
from mega_rl.errors import UserError
from mega_rl.hub.resolve import checkpoint_folder
from mega_rl.tracking.records.format import WEIGHTS
from mega_rl.tracking.records.reader import Record

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # model.dtype -> server's dtype


@dataclass(frozen=True)
class Search:
    """Search for the weights of a record's step."""

    record: Record
    config: Config  # of the run
    work: Path  # folder for what is converted
    given: Path | None = None  # by the user: a folder of roles, a checkpoint of a run, or the actor in HF format

    def __call__(self) -> dict[str, str]:
        """Return the Hugging Face folder of each role. Raises UserError naming what is missing."""
        models = {role: str(origin_of(self.config, role)) for role in self._roles()}
        changing = [role for role in models if role != "reference" or self.config.algorithm.kl.reference_interval]
        if self.given is not None:
            return {**models, **self._of_user(self.given, changing)}
        if set(changing) <= set(self.record.description.weights):
            return {**models, **{role: str(self.record.folder / WEIGHTS / role) for role in changing}}
        step = self.record.description.steps_before
        if step == 0:
            return models
        run = self.record.folder.absolute().parent.parent
        checkpoint, exported = folders.final(run / "checkpoints", step), run / "hf" / f"step_{step:06d}"
        if (checkpoint / COMMIT_FILE).is_file():
            return {**models, **self._converted(checkpoint, changing)}
        if changing == ["actor"] and (exported / "config.json").is_file():
            return {**models, "actor": str(exported)}
        raise UserError(
            f"{self.record.folder}: the weights after step {step}, with which it began, are in no checkpoint of {run}; "
            "give them by --weights, or record with metrics.records.weights=true"
        )

    def _roles(self) -> list[str]:
        return [str(role) for role in roles_of(self.config) if role != "reward"]

    def _of_user(self, given: Path, changing: list[str]) -> dict[str, str]:
        if (given / COMMIT_FILE).is_file():
            return self._converted(given, changing)
        if (given / "config.json").is_file() and changing == ["actor"]:
            return {"actor": str(given)}
        missing = [role for role in changing if not (given / role / "config.json").is_file()]
        if missing:
            raise UserError(
                f"--weights={given}: has no {missing[0]}/config.json; give a checkpoint of a run, or a folder with the "
                f"Hugging Face checkpoints {', '.join(changing)}"
            )
        return {role: str(given / role) for role in changing}

    def _converted(self, checkpoint: Path, changing: list[str]) -> dict[str, str]:
        """Return the roles of a run's checkpoint as Hugging Face checkpoints, written below `work`."""
        manifest = folders.read_manifest(checkpoint)
        if manifest.step != self.record.description.steps_before:
            raise UserError(
                f"{checkpoint}: is of step {manifest.step}, the record began after step "
                f"{self.record.description.steps_before}; give that one"
            )
        return {role: self._convert(checkpoint, role) for role in changing if role in HEADS}

    def _convert(self, checkpoint: Path, role: str) -> str:
        target, source = self.work / role, origin_of(self.config, role)
        export_checkpoint(
            checkpoint,
            target,
            reference=source,
            options=ExportOptions(dtype=_DTYPES[self.config.model.dtype]),
            writing=WriteOptions(overwrite=False),
            opened=lambda: open_weights(checkpoint, role=role, reference=source),
        )
        return str(target)


def origin_of(config: Config, role: str) -> Path:
    """Return the folder of the checkpoint that a role of a run began with."""
    model = config.model
    path = {"actor": model.path, "critic": model.critic_path, "reference": model.ref_path}[role] or model.path
    return checkpoint_folder(Path(path), label=f"the record's {role}")
