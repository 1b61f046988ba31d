"""Repositories on the Hub: names in settings, never those of paths, and rows by `datasets`.

The library takes seconds to import, so it is imported only for a name whose file is not there yet. No code of a
repository runs: the library has no dataset scripts any more.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from filelock import FileLock
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # the client's: httpx, from its release 2 on httpx2

from mega_rl.errors import UserError
from mega_rl.tracking import progress

Role = Literal["train", "validation"]  # decides the split of a dataset whose name gives none

_REPO = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_MODEL = re.compile(rf"(?P<repo>{_REPO})(?:@(?P<revision>[^\s@]+))?", flags=re.ASCII)
_DATASET = re.compile(
    rf"(?P<repo>{_REPO})(?::(?P<config>[^:@]*))?(?::(?P<split>[^@]+))?(?:@(?P<revision>[^\s@]+))?", flags=re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"
FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")  # data/train.jsonl is a file that is missing, not a repository


@dataclass(frozen=True)
class ModelName:
    """A model repository at a revision (branch, tag or commit)."""

    repo: str  # "Qwen/Qwen3-0.6B"
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class DatasetName:
    """A split of a configuration of a dataset at a revision; "" is a missing part."""

    repo: str  # "openai/gsm8k"
    config: str = ""  # "main"
    split: str = ""  # "train", or a slice of one as the datasets library writes it: "train[:100]"
    revision: str = DEFAULT_REVISION

    @property
    def pinned(self) -> bool:
        """Return whether all of it is given and the revision is a commit."""
        return bool(self.config and self.split) and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        parts = ":".join((self.repo, self.config, self.split)).rstrip(":")
        return parts if self.revision == DEFAULT_REVISION else f"{parts}@{self.revision}"


@dataclass(frozen=True)
class FolderName:
    """A split of a configuration of a local folder in the shape of a dataset."""

    folder: str  # the given path: "data/gsm8k"
    config: str = ""  # "main"; "" for the only one, or the folder's default
    split: str = ""  # "train"; "" for that of the role

    def __str__(self) -> str:
        return ":".join((self.folder, self.config, self.split)).rstrip(":")


RowsName = DatasetName | FolderName


def model_name(text: str) -> ModelName | None:
    """Return the model that `text` names on the Hub, or None for a path."""
    match = None if Path(text).exists() else _MODEL.fullmatch(text)
    return None if match is None else ModelName(match["repo"], match["revision"] or DEFAULT_REVISION)


def dataset_name(text: str) -> DatasetName | None:
    """Return the dataset that `text` names on the Hub, or None for a path."""
    is_local = text.endswith(FILE_SUFFIXES) or Path(text).exists() or folder_name(text) is not None
    match = None if is_local else _DATASET.fullmatch(text)
    if match is None:
        return None
    return DatasetName(
        match["repo"], match["config"] or "", match["split"] or "", match["revision"] or DEFAULT_REVISION
    )


def folder_name(text: str) -> FolderName | None:
    """Return the split of a local folder that `text` names, FOLDER, FOLDER:config or FOLDER:config:split; else None."""
    for folder, *parts in (text.rsplit(":", number) for number in range(3)):
        if Path(folder).is_dir():
            return FolderName(folder, *parts)
    return None


Kind = Literal["model", "dataset"]

# Errors that a download may end with; an assertion or a TypeError would be our own bug.
FAILURES = (HfHubHTTPError, httpx.HTTPError, OSError, ValueError)
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
_NOT_HERE = "there is no such file or folder here"
# Error, or any of several -> its reason. The first row that matches an error or one of its causes counts.
_REASONS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (IncompleteSnapshotError, "the cache holds only a part of it: {line}"),
    (RevisionNotFoundError, "the {kind} has no revision {revision!r} at {hub}; name a branch, a tag or a commit of it"),
    (GatedRepoError, "access to it is restricted: accept its terms at {hub}/{page}, then {log_in}"),
    (
        RepositoryNotFoundError,
        f"{_NOT_HERE}, and {{hub}} shows no {{kind}} of that name; or {{log_in}} if it is private",
    ),
    (
        OfflineModeIsEnabled,
        f"{_NOT_HERE}, and no {{kind}} of that name and revision in the cache {{cache}}; download it once without "
        "HF_HUB_OFFLINE",
    ),
    (_UNREACHED, f"{_NOT_HERE}, it is not in the cache, and {{hub}} cannot be reached ({{line}})"),
    (FAILURES, "the download failed: {line}; start again: files that are complete are kept"),
)


def reason(error: BaseException, *, repo: str, revision: str, kind: Kind) -> str:
    """Return why a repository could not be downloaded, and what to do."""
    for kinds, text in _REASONS:
        is_offline = kinds is OfflineModeIsEnabled and constants.HF_HUB_OFFLINE
        matching = [cause for cause in chain(error) if is_offline or isinstance(cause, kinds)]
        if matching:
            return text.format(
                line=_line(matching[0]),
                kind=kind,
                revision=revision,
                hub=constants.ENDPOINT,
                page=f"datasets/{repo}" if kind == "dataset" else repo,
                log_in="check that HF_TOKEN may read it" if get_token() else "set HF_TOKEN or run 'hf auth login'",
                cache=constants.HF_HUB_CACHE,
            )
    return f"the download failed: {_line(error)}"


def is_unreachable(error: BaseException) -> bool:
    """Return whether the Hub gave no answer, so that only the cache is left."""
    silent = (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled)
    return constants.HF_HUB_OFFLINE or any(isinstance(cause, silent) for cause in chain(error))


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def why_unreadable(error: Exception, *, repo: str, revision: str) -> str:
    """Return why the datasets library failed; ask the Hub again, since the library hides its answer."""
    is_hubs = constants.HF_HUB_OFFLINE or any(isinstance(one, httpx.HTTPError) for one in chain(error))
    cause = error if is_hubs else None
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().auth_check(repo, repo_type="dataset")
    except FAILURES as refusal:
        cause = refusal
    return by_library(error) if cause is None else reason(cause, repo=repo, revision=revision, kind="dataset")


def by_library(error: Exception) -> str:
    """Return an error of the datasets library in one line."""
    return f"the datasets library cannot read it: {type(error).__name__}: {_line(error)[:500]}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
    commit, folder = _commit(name, label=label), _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        progress.phase(f"downloading {label}", deadline_s=DEADLINE_S, announce=True),
        _readable(name, label),
        FileLock(folder / ".lock"),  # one rank of the node downloads, the others find its file
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
    """Return a local folder's files of a split by the datasets library. Raises UserError."""
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
        """Yield (place, row) from row `skip` on. Raises UserError for a failed download."""
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
    """Return (the library's builder, pinned name) of a split. commit: "" without the Hub."""
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
    """Raise failures of the Hub or the library as UserErrors; None: a local folder."""
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
