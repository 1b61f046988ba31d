"""Values of single tokens from the record of a step, RUN/records/step_000020 (`mega_rl.records`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mega_rl.errors import UserError
from mega_rl.storage.strict_json import JsonFields

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_TOKENS = 1_500  # of a sample that a page shows token by token

Columns: TypeAlias = "Mapping[str, npt.NDArray[np.float32]]"  # of a row: [tokens] by name
_Compute: TypeAlias = "Callable[[Columns], npt.NDArray[np.float32]]"


def _trainer(columns: Columns) -> npt.NDArray[np.float32]:
    """Return the trainer's log-probs before the update."""
    return columns["policy_logprobs"] if "policy_logprobs" in columns else columns["old_logprobs"]


# Name on the page, the columns it needs besides the trainer's log-probs, and its values. Where a record has no
# entropies, -log p of what was sampled has them as its expectation.
_ESTIMATE, _ENTROPY = "entropy estimate (-log p)", "entropy"
_VALUES: tuple[tuple[str, tuple[str, ...], _Compute], ...] = (
    ("advantage", ("advantages",), lambda c: c["advantages"]),
    ("log-prob difference", ("rollout_logprobs",), lambda c: _trainer(c) - c["rollout_logprobs"]),
    (_ENTROPY, ("entropy",), lambda c: c["entropy"]),
    (_ESTIMATE, (), lambda c: -_trainer(c)),
    ("log-prob over reference", ("ref_logprobs",), lambda c: _trainer(c) - c["ref_logprobs"]),
    ("value", ("values",), lambda c: c["values"]),
)


def read_tokens(folder: Path, *, limit: int) -> Iterator[tuple[JsonFields, dict[str, list[float]]]]:
    """Yield the first `limit` rows of a record with texts, and values of their tokens by name, NaN off the loss mask.

    Raises UserError for a record that is damaged or of another format.
    """
    from mega_rl.records.reader import read_record  # numpy, which commands do not wait for

    record = read_record(folder)
    for number, row in enumerate(record.rows[:limit]):
        try:
            values = _values(record.tensors, number)
            texts = row["token_texts"]
            if not isinstance(texts, list) or any(len(column) != len(texts) for column in values.values()):
                raise ValueError("texts of tokens and their values differ in number")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{folder}: row {number} is none of a record ({error}); it is damaged") from error
        shown = {name: column[:MAX_TOKENS] for name, column in values.items()}
        yield {**row, "token_texts": texts[:MAX_TOKENS]}, shown


def _values(tensors: Mapping[str, npt.NDArray[np.float32]], row: int) -> dict[str, list[float]]:
    """Return the values of a row's tokens by name; none of a record without the trainer's log-probs."""
    import numpy as np

    length = int(tensors["lengths"][row])
    mask = tensors["loss_mask"][row, :length].astype(bool)
    columns = {name: tensor[row, :length] for name, tensor in tensors.items() if tensor.ndim == 2}
    if not {"policy_logprobs", "old_logprobs"} & columns.keys():
        return {}
    there = [(name, compute) for name, needed, compute in _VALUES if set(needed) <= columns.keys()]
    if "entropy" in columns:
        there = [(name, compute) for name, compute in there if name != _ESTIMATE]
    return {name: np.where(mask, compute(columns), np.nan).tolist() for name, compute in there}
