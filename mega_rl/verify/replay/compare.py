"""Comparison of two records of one step, tensor by tensor in causal order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mega_rl.tracking.records.format import INPUTS, MODEL_OUTPUTS, TENSORS
from mega_rl.tracking.records.reader import Array, Record

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
    """Return the distance of one tensor of a record from the replayed one; infinite where there is none."""
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
    """Return the values cut or filled up with zeros to the width of `like`, whose padding may be another."""
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
