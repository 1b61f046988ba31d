"""Replay a record on ranks of this machine, and compare each tensor in causal order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.gpus import gpu_for_each
from mega_rl.tracking import progress
from mega_rl.tracking.records.reader import INPUTS, MODEL_OUTPUTS, TENSORS, Array, Record, folder_of, read_record
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import Layout, resolve_runs
from mega_rl.verify.plan import ReplayPlan
from mega_rl.verify.replay.inputs import find_weights, recorded_config, replay_config

ATOL = 1e-5  # in units of the value, or of 1 where it is smaller
# bf16 keeps 8 bits, and each layout rounds partial sums in other places: `verify.tolerances` has the reasons.
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

    atol: of every tensor; by default 1e-5, in bf16 more for what models compute. What was recorded and is not computed
    again counts as equal by itself and is left out.
    """
    usual = ATOL if recorded.description.dtype == "fp32" else ATOL_BF16
    differences = []
    for name in TENSORS:
        if name in INPUTS or name not in recorded.tensors:
            continue
        allowed = (usual if name in MODEL_OUTPUTS else ATOL) if atol is None else atol
        differences.append(compare_tensor(name, recorded, replayed.tensors, allowed))
    return differences


def compare_tensor(name: str, recorded: Record, replayed: Mapping[str, Array], allowed: float) -> Difference:
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


@dataclass(frozen=True)
class Replay:
    """Result of replaying a record under one layout."""

    layout: Layout
    differences: tuple[Difference, ...]  # one for each tensor that was computed again, in causal order

    @property
    def first(self) -> Difference | None:
        """Return the first tensor, in causal order, that is beyond its tolerance; None: all agree."""
        return next((difference for difference in self.differences if not difference.good), None)

    @property
    def good(self) -> bool:
        """Return whether all tensors agree."""
        return self.first is None


@dataclass(frozen=True)
class Prepared:
    """A record with its weights in place, and the layouts to replay it under."""

    record: Record
    config: Config  # config of the recorded run
    models: dict[str, str]  # Hugging Face folder of each role
    layouts: tuple[Layout, ...]


def prepare(folder: Path, names: str, work: Path, *, weights: Path | None = None) -> Prepared:
    """Return a record that can be replayed under a list of layouts. Raises UserError."""
    record = read_record(folder)
    config = recorded_config(record.description)
    with progress.phase("finding the weights"):
        models = find_weights(record, config, work / "weights", given=weights)
    layouts = resolve_runs(names, read_hf_config(Path(models["actor"])))
    prepared = Prepared(record, config, models, tuple(layouts))
    for layout in layouts:
        replay_config(config, plan_of(prepared, layout, work, timeout_s=1.0))
    return prepared


def plan_of(prepared: Prepared, layout: Layout, work: Path, *, timeout_s: float) -> ReplayPlan:
    """Return the plan of one layout."""
    record = prepared.record.folder.absolute()
    return ReplayPlan(str(record), str(work / layout.name), prepared.models, layout, timeout_s)


def replay_layouts(prepared: Prepared, work: Path, *, timeout_s: float, atol: float | None = None) -> Iterator[Replay]:
    """Yield each layout's result. Raises RunError if its ranks fail, UserError if they refuse."""
    on_gpus = gpu_for_each(max(layout.ranks for layout in prepared.layouts))
    with progress.rounds("layout", len(prepared.layouts)) as rounds:
        for layout in prepared.layouts:
            plan = plan_of(prepared, layout, work, timeout_s=timeout_s)
            Path(plan.target).mkdir(parents=True)
            try:
                run_task(
                    "replay",
                    asdict(plan),
                    work,
                    label=layout.name,
                    ranks=layout.ranks,
                    timeout_s=timeout_s,
                    use_gpus=on_gpus,
                )
            except (UserError, RanksFailed) as failure:
                raise type(failure)(f"{layout.name}: {failure}") from failure
            yield Replay(layout, tuple(result_of(prepared.record, plan, atol=atol)))
            rounds.advance()


def result_of(record: Record, plan: ReplayPlan, *, atol: float | None = None) -> list[Difference]:
    """Return the differences of a record and of what the ranks of a plan have written."""
    replayed = folder_of(Path(plan.target), record.description.step)
    if not replayed.is_dir():
        raise RunError(f"{plan.layout.name}: the ranks have written no record of the step; see their lines above")
    return compare(record, read_record(replayed), atol=atol)
