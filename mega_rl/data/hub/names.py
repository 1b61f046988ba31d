"""Names of repositories on the Hub in settings. A path that exists is never a name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
