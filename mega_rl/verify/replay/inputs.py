"""Inputs of a replay: its config, and the weights at the begin of the recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import COMMIT_FILE
from mega_rl.checkpoint.weights import HEADS, open_weights
from mega_rl.config.keys import keys_below, value_of, with_settings
from mega_rl.config.needs import unmet
from mega_rl.config.schema import Config
from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint
from mega_rl.converters.offline.writing import WriteOptions
from mega_rl.data.hub.resolve import checkpoint_folder
from mega_rl.errors import UserError
from mega_rl.tracking.records.reader import WEIGHTS, Record
from mega_rl.trainer.assemble.plan import roles_of
from mega_rl.verify.layouts import Layout
from mega_rl.verify.rl.inputs import with_layout

ROUTING, SYNC = "rollout.sglang.return_routing", "rollout.sglang.sync.timeout_s"
KEPT_OF_ENGINE = "engine.megatron.transformer_impl"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # model.dtype -> server's dtype


@dataclass(frozen=True)
class ReplayPlan:
    """A record, the weights of its step, and the layout to compute it under."""

    record: str  # folder
    target: str  # folder that gets the step as the replay computes it
    models: Mapping[str, str]  # Hugging Face folder of each role: "actor", "critic", "reference"
    layout: Layout
    timeout_s: float


def replay_config(recorded: Config, plan: ReplayPlan) -> Config:
    """Return the recorded config with the plan's layout and models. Raises UserErrors."""
    models = plan.models
    same_engine = recorded.engine.backend == plan.layout.engine == "megatron"
    defaults = Config()
    reset = [key for key in keys_below("engine") if not (same_engine and key == KEPT_OF_ENGINE)]
    servers = [key for key in keys_below("rollout.sglang") if key != ROUTING]
    kept = {key: value_of(recorded, key) for key in keys_below("engine.megatron.moe") if same_engine}
    changed: dict[str, object] = {
        **{key: value_of(defaults, key) for key in (*reset, *servers)},
        **kept,
        "engine.backend": plan.layout.engine,
        "model.path": models["actor"],
        "model.critic_path": models.get("critic", ""),
        "model.ref_path": models.get("reference", ""),
        "algorithm.kl.reference_interval": 0,
        "metrics.records.interval": 0,
        "trainer.timeout_s": plan.timeout_s,
        SYNC: min(defaults.rollout.sglang.sync.timeout_s, plan.timeout_s / 2),
        "trainer.device": "auto",
    }
    config = with_settings(recorded, changed)
    idle = {entry.key: value_of(defaults, entry.key) for entry in unmet(config)}
    return with_layout(with_settings(config, idle), plan.layout, run_dir=Path(plan.target))


def find_weights(record: Record, config: Config, work: Path, *, given: Path | None = None) -> dict[str, str]:
    """Return each role's Hugging Face folder at the begin of a record's step. Raises UserError."""
    models = {str(role): str(origin_of(config, str(role))) for role in roles_of(config) if role != "reward"}
    changing = [role for role in models if role != "reference" or config.algorithm.kl.reference_interval]
    step = record.description.steps_before
    if given is None and set(changing) <= set(record.description.weights):
        return {**models, **{role: str(record.folder / WEIGHTS / role) for role in changing}}
    if given is None and step == 0:
        return models
    checkpoint = given or folders.final(record.folder.absolute().parent.parent / folders.CHECKPOINTS, step)
    if not (checkpoint / COMMIT_FILE).is_file():
        raise UserError(
            f"{record.folder}: the weights after step {step}, with which it began, are in no checkpoint {checkpoint}; "
            "give it by --weights, or record with metrics.records.weights=true"
        )
    return {**models, **_converted(record, config, work, checkpoint, changing)}


def _converted(record: Record, config: Config, work: Path, checkpoint: Path, changing: list[str]) -> dict[str, str]:
    """Return the roles of a run's checkpoint as Hugging Face checkpoints, written below `work`."""
    step, before = folders.read_manifest(checkpoint).step, record.description.steps_before
    if step != before:
        raise UserError(f"{checkpoint}: is of step {step}, the record began after step {before}; give that one")
    targets = {}
    for role in (role for role in changing if role in HEADS):
        source = origin_of(config, role)
        export_checkpoint(
            checkpoint,
            work / role,
            reference=source,
            options=ExportOptions(dtype=_DTYPES[config.model.dtype]),
            writing=WriteOptions(overwrite=False),
            opened=partial(open_weights, checkpoint, role=role, reference=source),
        )
        targets[role] = str(work / role)
    return targets


def origin_of(config: Config, role: str) -> Path:
    """Return the folder of the checkpoint that a role of a run began with."""
    model = config.model
    path = {"actor": model.path, "critic": model.critic_path, "reference": model.ref_path}[role] or model.path
    return checkpoint_folder(Path(path), label=f"the record's {role}")
