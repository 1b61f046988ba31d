"""Checks of data files: they exist and have the columns that the run reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mega_rl.config.plugins.files import missing_name
from mega_rl.config.rules.validation import files_of
from mega_rl.config.schema import DataConfig, ValidationConfig
from mega_rl.data.hub.names import dataset_name
from mega_rl.errors import UserError, no_such

DATA_SUFFIXES = (".jsonl", ".parquet")


def check_data(data: DataConfig, *, trains: bool = True) -> Iterator[str]:
    """Yield the problems of the files of prompts."""
    if trains and not data.train_files and data.reads_train_files:
        yield "data.train_files is empty: name at least one JSONL or Parquet file"
    for name, source in data.mixture.named().items():
        own = replace(data, prompt_key=source.prompt_key or data.prompt_key)
        for file in _local(source.files, data):
            yield from (f"data.mixture.sources.{name}: {problem}" for problem in _data_file(Path(file), own))
    for key, files in (("data.train_files", _local(data.train_files, data)), ("data.val_files", data.val_files)):
        for name in files:
            yield from (f"{key}: {problem}" for problem in _data_file(Path(name), data))


def check_validation(validation: ValidationConfig, data: DataConfig) -> Iterator[str]:
    """Yield the problems of the files of validation sets, and of the function that finds a response's answer."""
    for name, files in validation.sets.items():
        for file in files_of(files):
            yield from (f"validation.sets.{name}: {problem}" for problem in _data_file(Path(file), data))
    if validation.answer_of and (problem := missing_name(validation.answer_of, builtin=(), kind="function")):
        yield f"validation.answer_of={validation.answer_of!r}: {problem}"


def _local(files: Sequence[str], data: DataConfig) -> list[str]:
    """Return the files of training prompts without data sets of the Hub that are streamed."""
    return [file for file in files if not data.stream.rows or dataset_name(file) is None]


def _data_file(path: Path, data: DataConfig) -> Iterator[str]:
    if path.suffix not in DATA_SUFFIXES:
        yield f"{path}: unknown kind of file; legal: {', '.join(DATA_SUFFIXES)}, or org/name of the Hub"
        return
    if not path.is_file() or path.stat().st_size == 0:
        yield f"{path}: " + ("is empty" if path.is_file() else no_such("file", path))
        return
    try:
        columns = _parquet_columns(path) if path.suffix == ".parquet" else _first_row_columns(path)
    except UserError as error:
        yield str(error)
        return
    if columns is not None and data.prompt_key not in columns:
        yield f"{path}: has no column {data.prompt_key!r} (data.prompt_key); it has {', '.join(sorted(columns))}"


def _parquet_columns(path: Path) -> set[str]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return set(read_schema(path).names)
    except (ArrowException, OSError):
        raise UserError(f"{path}: not a readable Parquet file; write it again") from None


def _first_row_columns(path: Path) -> set[str] | None:
    """Return the keys of the first row; None if it is malformed, which the reader of the data reports or drops."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return set(row) if isinstance(row, dict) else None
