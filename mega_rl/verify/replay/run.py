"""Replay a record on ranks of this machine, and compare each tensor in causal order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mega_rl.config.loader import load
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.gpus import gpu_for_each
from mega_rl.tracking import progress
from mega_rl.tracking.records.reader import INPUTS, MODEL_OUTPUTS, TENSORS, Array, Record, folder_of, read_record
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import Layout, resolve_all
from mega_rl.verify.replay.inputs import ReplayPlan, find_weights, replay_config

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
    record = read_record(folder)
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
                    "replay.task", asdict(plan), work, label=layout.name, ranks=size, timeout_s=limit, use_gpus=on_gpus
                )
            except (UserError, RanksFailed) as failure:
                raise type(failure)(f"{layout.name}: {failure}") from failure
            yield layout, result_of(record, plan, atol=atol)
            rounds.advance()


def result_of(record: Record, plan: ReplayPlan, *, atol: float | None = None) -> list[Difference]:
    """Return the differences of a record and of the one that ranks have written."""
    return compare(record, read_record(folder_of(Path(plan.target), record.description.step)), atol=atol)
