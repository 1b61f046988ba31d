"""Replay a record on ranks of this machine, and compare each tensor in causal order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import COMMIT_FILE
from mega_rl.checkpoint.weights import HEADS, open_weights
from mega_rl.config.keys import keys_below, value_of, with_settings
from mega_rl.config.loader import load
from mega_rl.config.needs import requested_models, unmet
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint
from mega_rl.data.downloads import checkpoint_folder
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.base import gpu_for_each
from mega_rl.tracking import progress
from mega_rl.tracking.records.reader import INPUTS, MODEL_OUTPUTS, TENSORS, WEIGHTS, Array, Record, folder_of
from mega_rl.tracking.records.reader import read_record as read_step
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import Layout, resolve_all
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
    models = {str(role): str(origin_of(config, str(role))) for role in requested_models(config) if role != "reward"}
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
            opened=partial(open_weights, checkpoint, role=role, reference=source),
        )
        targets[role] = str(work / role)
    return targets


def origin_of(config: Config, role: str) -> Path:
    """Return the folder of the checkpoint that a role of a run began with."""
    model = config.model
    path = {"actor": model.path, "critic": model.critic_path, "reference": model.ref_path}[role] or model.path
    return checkpoint_folder(Path(path), label=f"the record's {role}")


ATOL = 1e-5  # in units of the value, or of 1 where it is smaller
# bf16 keeps 8 bits, and each layout rounds partial sums in other places: `verify.layouts` has the reasons.
ATOL_BF16 = 0.15


@dataclass(frozen=True)
class TokenPlace:
    """A token of a record, or a row where a tensor has one number for each."""

    row: int  # in the order of prompts and samples
    prompt: int
    sample: int
    token: int | None  # position in the sequence; None of a number for the whole row
    text: str  # token as text; "" if the record has no texts
    recorded: float
    replayed: float


@dataclass(frozen=True)
class Difference:
    """Distance of one tensor from the recorded one."""

    tensor: str
    largest: float  # |difference|; infinite where one of the two is not a number
    allowed: float
    num_beyond: int  # elements beyond the tolerance
    first: TokenPlace | None  # first element beyond the tolerance, if any
    worst: TokenPlace | None  # None: all are equal

    @property
    def good(self) -> bool:
        """Return whether the tensor agrees within the tolerance."""
        return self.first is None


def compare(recorded: Record, replayed: Record, *, atol: float | None = None) -> list[Difference]:
    """Return the distance of every tensor that both have, in causal order.

    atol: of every tensor; by default 1e-5, in bf16 more for outputs of models.
    """
    usual = ATOL if recorded.description.dtype == "fp32" else ATOL_BF16
    allowed = {name: usual if name in MODEL_OUTPUTS else ATOL for name in TENSORS if name not in INPUTS}
    return [
        _compare_tensor(name, recorded, replayed.tensors, its if atol is None else atol)
        for name, its in allowed.items()
        if name in recorded.tensors
    ]


def _compare_tensor(name: str, recorded: Record, replayed: Mapping[str, Array], allowed: float) -> Difference:
    """Return the distance of a recorded tensor from the replayed one; infinite without one."""
    left = recorded.tensors[name].astype(np.float64)
    right = _as_wide(replayed[name], left).astype(np.float64) if name in replayed else np.full_like(left, np.nan)
    gap = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    gap = np.where(np.isnan(gap), np.inf, gap)
    beyond = gap > allowed * np.maximum(1.0, np.where(np.isfinite(left), np.abs(left), 1.0))
    places = np.argwhere(beyond)

    def place(index: Array) -> TokenPlace:
        at = tuple(int(i) for i in index)
        return _place(recorded, at, float(left[at]), float(right[at]))

    worst = np.unravel_index(int(gap.argmax()), gap.shape) if gap.size and gap.max() > 0 else None
    return Difference(
        name,
        largest=float(gap.max()) if gap.size else 0.0,
        allowed=allowed,
        num_beyond=len(places),
        first=place(places[0]) if len(places) else None,
        worst=None if worst is None else place(np.array(worst)),
    )


def _as_wide(values: Array, like: Array) -> Array:
    """Return the values, cut or padded with zeros to the width of `like`."""
    if values.ndim < 2 or values.shape[1] == like.shape[1]:
        return values
    padding = [(0, 0), (0, max(0, like.shape[1] - values.shape[1])), *[(0, 0)] * (values.ndim - 2)]
    return np.pad(values, padding)[:, : like.shape[1]]


def _place(record: Record, at: tuple[int, ...], recorded: float, replayed: float) -> TokenPlace:
    row = at[0]
    token = at[1] if len(at) > 1 else None
    texts = record.rows[row]["token_texts"] if token is not None and len(record.rows) > row else []
    return TokenPlace(
        row,
        int(record.tensors["prompt_index"][row]),
        int(record.tensors["sample_index"][row]),
        token,
        texts[token] if token is not None and token < len(texts) else "",
        recorded,
        replayed,
    )


def prepare(
    folder: Path, names: str, work: Path, *, weights: Path | None = None, timeout_s: float = 600.0
) -> tuple[Record, list[ReplayPlan]]:
    """Return a record, and a plan for each of a list of layouts. Raises UserError."""
    record = read_step(folder)
    config = load(None, record.description.config)
    with progress.phase("finding the weights"):
        models = find_weights(record, config, work / "weights", given=weights)
    source = str(record.folder.absolute())
    plans = [
        ReplayPlan(source, str(work / layout.name), models, layout, timeout_s)
        for layout in resolve_all(names, read_hf_config(Path(models["actor"])), runs=True)
    ]
    for plan in plans:
        replay_config(config, plan)
    return record, plans


def replay_layouts(
    record: Record, plans: Sequence[ReplayPlan], work: Path, *, atol: float | None = None
) -> Iterator[tuple[Layout, list[Difference]]]:
    """Yield each layout and its differences. Raises RunError if its ranks fail, UserError if they refuse."""
    on_gpus = gpu_for_each(max(plan.layout.ranks for plan in plans))
    with progress.rounds("layout", len(plans)) as rounds:
        for plan in plans:
            layout = plan.layout
            Path(plan.target).mkdir(parents=True)
            size, limit = layout.ranks, plan.timeout_s
            try:
                run_task(
                    "replay_step", asdict(plan), work, label=layout.name, ranks=size, timeout_s=limit, use_gpus=on_gpus
                )
            except (UserError, RanksFailed) as failure:
                raise type(failure)(f"{layout.name}: {failure}") from failure
            yield layout, result_of(record, plan, atol=atol)
            rounds.advance()


def result_of(record: Record, plan: ReplayPlan, *, atol: float | None = None) -> list[Difference]:
    """Return the differences of a record and of the one that ranks have written."""
    return compare(record, read_step(folder_of(Path(plan.target), record.description.step)), atol=atol)
