"""Values of single tokens from a record of a step, RUN/records/step_000020; No torch.

A record is record.json, which lists its files, and for each replica rows of texts (JSONL) and columns (safetensors):
`loss_mask`, `lengths`, log-probs, advantages, [rows, padded length], aligned to the token that they describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mega_rl.errors import UserError
from mega_rl.storage.strict_json import JsonFields, parse_object

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMAT = 1
MAX_TEXT_BYTES = 64 << 20
MAX_TOKENS = 1_500  # of a sample that a page shows token by token
_COLUMNS = re.compile(r"replica_\d{5}\.safetensors")

Columns: TypeAlias = "Mapping[str, npt.NDArray[np.float32]]"
_Compute: TypeAlias = "Callable[[Columns], npt.NDArray[np.float32]]"


def _trainer(columns: Columns) -> npt.NDArray[np.float32]:
    """Return the trainer's log-probs before the update."""
    return columns["policy_logprobs"] if "policy_logprobs" in columns else columns["old_logprobs"]


# Name on the page, the columns it needs besides the trainer's log-probs, and its values.
_VALUES: tuple[tuple[str, tuple[str, ...], _Compute], ...] = (
    ("advantage", ("advantages",), lambda c: c["advantages"]),
    ("log-prob difference", ("rollout_logprobs",), lambda c: _trainer(c) - c["rollout_logprobs"]),
    ("entropy", ("entropies",), lambda c: c["entropies"]),
    ("entropy estimate (-log p)", (), lambda c: -_trainer(c)),
    ("log-prob over reference", ("ref_logprobs",), lambda c: _trainer(c) - c["ref_logprobs"]),
    ("value", ("values",), lambda c: c["values"]),
)


def read_tokens(folder: Path, *, limit: int) -> Iterator[tuple[JsonFields, dict[str, list[float]]]]:
    """Yield the first `limit` rows of a record with texts, and values of their tokens by name, NaN off the loss mask.

    Raises UserError for a record that is damaged or of another format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    for name in _files(folder):
        path = folder / name
        texts = path.with_suffix(".jsonl")
        if not texts.is_file():
            continue
        try:
            if texts.stat().st_size > MAX_TEXT_BYTES:
                raise ValueError(f"texts of more than {MAX_TEXT_BYTES >> 20} MiB")
            columns = load_file(path)
            rows = [parse_object(line) for line in texts.read_bytes().splitlines()[:limit]]
            shown = [_shown(row, _values(columns, number)) for number, row in enumerate(rows)]
        except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
            raise UserError(f"{path}: is no part of a record ({error}); it is damaged") from error
        yield from shown
        limit -= len(shown)


def _files(folder: Path) -> list[str]:
    """Return the names of a record's columns files, which lie in its folder."""
    file = folder / "record.json"
    try:
        content = parse_object(file.read_bytes())
        if content.get("format") != FORMAT:
            raise ValueError(f"format={content.get('format')!r}, this version reads {FORMAT}")
        names = [str(entry["file"]) for entry in content["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    return [name for name in names if _COLUMNS.fullmatch(name) and not (folder / name).is_symlink()]


def _values(columns: Columns, row: int) -> dict[str, list[float]]:
    """Return the values of a row's tokens by name."""
    import numpy as np

    length = int(columns["lengths"][row])
    mask = columns["loss_mask"][row, :length].astype(bool)
    of_row = {name: column[row, :length] for name, column in columns.items() if column.ndim == 2}
    if not {"policy_logprobs", "old_logprobs"} & of_row.keys():
        return {}
    there = [(name, compute) for name, needed, compute in _VALUES if set(needed) <= of_row.keys()]
    return {name: np.where(mask, compute(of_row), np.nan).tolist() for name, compute in there}


def _shown(row: JsonFields, values: dict[str, list[float]]) -> tuple[JsonFields, dict[str, list[float]]]:
    """Return a row and its values, of the first `MAX_TOKENS` tokens. Raises ValueError where a text is missing."""
    texts = row["token_texts"]
    if not isinstance(texts, list) or any(len(column) != len(texts) for column in values.values()):
        raise ValueError("texts of tokens and their values differ in number")
    shown = {name: column[:MAX_TOKENS] for name, column in values.items()}
    return {**row, "token_texts": texts[:MAX_TOKENS]}, shown
