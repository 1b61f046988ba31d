"""Names of repositories on the Hub in settings. A path that exists is never a name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
