"""Dataset repositories by the `datasets` library: a split as a Parquet file or as a stream.

The library takes seconds to import, so it is imported only for a name whose file is not there yet. No code of a
repository runs: the library has no dataset scripts any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock
from huggingface_hub import HfApi, constants

from mega_rl.data.hub.names import (
    COMMIT,
    FAILURES,
    DatasetName,
    FolderName,
    Role,
    by_library,
    is_unreachable,
    reason,
    why_unreadable,
)
from mega_rl.errors import UserError
from mega_rl.tracking import progress

DEADLINE_S = 3600.0  # for reading one split
USUAL_SPLITS: dict[Role, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "test")}


def fetch_rows(name: DatasetName, *, role: Role, label: str) -> tuple[Path, DatasetName]:
    """Return (Parquet file, pinned name) of a split, downloading it unless it is there.

    Without a configuration the only one is meant, or the default of the repository. Without a split that is train for
    training; for validation the first there is of validation and test; else the only one.
    label: who asks, "data.train_files=openai/gsm8k:main:train". Raises UserError.
    """
    if name.pinned and (file := _file(name)).is_file():
        return file, name
    commit = _commit(name, label=label)
    with (
        progress.phase(f"downloading {label}", deadline_s=DEADLINE_S, announce=True),
        _readable(name, label),
        _locked(_folder(name)),  # one rank of the node downloads, the others find its file
    ):
        builder, pinned = _resolved(name, commit, role, label)
        file = _file(pinned)
        if not file.is_file():
            builder.download_and_prepare()
            file.parent.mkdir(parents=True, exist_ok=True)
            fresh = file.with_suffix(f".{os.getpid()}.new")
            try:
                builder.as_dataset(split=pinned.split).to_parquet(fresh)
                fresh.replace(file)
            finally:
                fresh.unlink(missing_ok=True)
    return file, pinned


def pin_rows(name: DatasetName, *, role: Role, label: str) -> DatasetName:
    """Return the pinned name of a split to stream, without downloading it. Raises UserError."""
    if "[" in name.split:
        raise UserError(f"{label}: a part of a split cannot be streamed; name the whole one, or set data.stream.rows=0")
    if name.pinned:
        return name
    with progress.phase(f"looking up {label}", deadline_s=DEADLINE_S, announce=True), _readable(name, label):
        return _resolved(name, _commit(name, label=label), role, label)[1]


def folder_files(name: FolderName, *, role: Role, label: str) -> list[Path]:
    """Return the files of a split of a local folder, as the datasets library finds them. Raises UserError."""
    root = os.path.abspath(name.folder)
    with progress.phase(f"reading {name.folder}", deadline_s=DEADLINE_S), _readable(None, label):
        builder = _builder(name.folder, name.config, None, label)
        split = _split(builder, name.split, role, label)
        files = [os.path.abspath(file) for file in (builder.config.data_files or {}).get(split, ())]
    for file in files:
        if not Path(file).is_relative_to(root):  # links of a cache may lead elsewhere
            raise UserError(f"{label}: names {file}, which is outside of the folder")
        if not file.endswith((".parquet", ".jsonl")):
            raise UserError(f"{label}: holds {file}; files of rows are .parquet or .jsonl")
    if not files:
        raise UserError(f"{label}: takes a part of the split, {split}; name the whole of it")
    return [Path(file) for file in files]


@dataclass(frozen=True)
class HubShard:
    """A shard of a split at a commit: a file, or a part of a file."""

    dataset: Any  # datasets.IterableDataset of the whole split
    pinned: DatasetName
    number: int
    num_shards: int

    @property
    def name(self) -> str:
        return f"{self.pinned} shard {self.number + 1} of {self.num_shards}"

    @property
    def schema(self) -> object:
        """pyarrow.Schema of the rows; None where the library does not know it, as for JSONL."""
        return getattr(self.dataset.features, "arrow_schema", None)

    def identity(self) -> str:
        return self.name

    def rows(self, columns: object, *, skip: int) -> Iterator[tuple[str, object]]:
        """Yield (place, row) from row `skip` on. Raises UserError for a failure of the Hub or the library."""
        with _readable(self.pinned, self.name):
            shard = self.dataset.shard(num_shards=self.num_shards, index=self.number)
            for number, row in enumerate(shard.skip(skip) if skip else shard, start=skip + 1):
                yield f"{self.name}: row {number}", row


def hub_shards(pinned: DatasetName) -> list[HubShard]:
    """Return the shards of a split at a commit. Raises UserError."""
    label = str(pinned)
    with _readable(pinned, label):
        builder = _builder(_remote(pinned), pinned.config, pinned.revision, label)
        dataset = builder.as_streaming_dataset(split=pinned.split)
        count = dataset.num_shards
    return [HubShard(dataset, pinned, number, count) for number in range(count)]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield


def _commit(name: DatasetName, *, label: str) -> str:
    """Return the revision's present commit; "" where the Hub cannot be asked. Raises UserError."""
    try:
        sha = HfApi().dataset_info(name.repo, revision=name.revision, timeout=constants.DEFAULT_REQUEST_TIMEOUT).sha
    except FAILURES as error:
        if is_unreachable(error):  # the library has its own cache
            return ""
        raise UserError(f"{label}: {reason(error, repo=name.repo, revision=name.revision, kind='dataset')}") from error
    return sha or ""


def _resolved(name: DatasetName, commit: str, role: Role, label: str) -> tuple[Any, DatasetName]:
    """Return (the library's builder, pinned name) of a split. commit: "" where the Hub cannot be asked."""
    asked = commit or name.revision
    builder = _builder(_remote(name), name.config, asked, label)
    present = str(builder.hash)
    if COMMIT.fullmatch(present) is None or (COMMIT.fullmatch(asked) and asked != present):
        # Without a network the library takes any version in its cache.
        raise UserError(f"{label}: the cache holds version {present}, not {asked}; download it once with a network")
    split = _split(builder, name.split, role, label)
    return builder, DatasetName(name.repo, builder.config.name, split, present)


def _remote(name: DatasetName) -> str:
    return f"hf://datasets/{name.repo}"  # never a folder of that name


def _builder(place: str, config: str, revision: str | None, label: str) -> Any:
    """Return the library's builder of a configuration. Raises UserError for a wrong one."""
    import datasets

    datasets.utils.logging.set_verbosity(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset_builder(place, config or None, revision=revision)
    except ValueError:
        names = datasets.get_dataset_config_names(place, revision=revision)
        legal = f"legal: {', '.join(names)}"
        if config and config not in names:
            raise UserError(f"{label}: has no configuration {config!r}; {legal}") from None
        if not config and len(names) > 1:
            example = f"{place.removeprefix('hf://datasets/')}:{names[0]}"
            raise UserError(f"{label}: name one of its configurations, as {example}; {legal}") from None
        raise


def _split(builder: Any, asked: str, role: Role, label: str) -> str:
    """Return the split that is asked for, or the usual one of the role. Raises UserError."""
    splits = list(map(str, builder.config.data_files or builder.info.splits or ()))  # the latter from the cache
    if asked:
        if asked.partition("[")[0] not in splits:
            raise UserError(f"{label}: has no split {asked!r}; legal: {', '.join(splits)}")
        return asked
    usual = USUAL_SPLITS[role]
    for split in (*usual, *(splits if len(splits) == 1 else ())):
        if split in splits:
            return split
    raise UserError(f"{label}: has no split {' or '.join(usual)}; name one of {', '.join(splits)}")


@contextmanager
def _readable(name: DatasetName | None, label: str) -> Iterator[None]:
    """Raise failures of the Hub or the library as UserErrors with the label; None: a local folder."""
    import datasets
    import pyarrow
    import yaml

    library = (RuntimeError, datasets.exceptions.DatasetsError, pyarrow.ArrowException, yaml.YAMLError)
    try:
        yield
    except UserError:
        raise
    except (*FAILURES, *library) as error:
        why = by_library(error) if name is None else why_unreadable(error, repo=name.repo, revision=name.revision)
        raise UserError(f"{label}: {why}") from error


def _folder(name: DatasetName) -> Path:
    return Path(constants.HF_HOME) / "mega_rl" / "datasets" / name.repo.replace("/", "--")


def _file(pinned: DatasetName) -> Path:
    """Return the file for the rows of a pinned name."""
    file = f"{quote(pinned.config, safe='')}--{quote(pinned.split, safe='')}.parquet"
    return _folder(pinned) / pinned.revision / file
