"""Dataset repositories: one split as a Parquet file, made by the `datasets` library in a separate process.

The library takes seconds to import and reads many layouts; a run only meets the file, which is named by the commit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi, constants

from mega_rl.environment import python_module
from mega_rl.errors import UserError
from mega_rl.hub.errors import FAILURES, is_unreachable, reason
from mega_rl.hub.names import DatasetName, FolderName, Role
from mega_rl.tracking import progress

DEADLINE_S = 3600.0  # of reading one split: its requests have deadlines of their own, its size has none
_PROGRAM = "mega_rl.hub.rows_program"


def fetch_rows(name: DatasetName, *, role: Role, label: str) -> tuple[Path, DatasetName]:
    """Return (Parquet file, pinned name) of a split, downloading what is not there yet.

    Without a configuration the only one is meant, or the one that the repository calls its default. Without a split
    that is train for training; for validation the first there is of validation and test; else the only one.
    `label` is who asks, "data.train_files=openai/gsm8k:main:train". Raises UserError.
    """
    if name.pinned and (file := _file(name)).is_file():
        return file, name
    commit = _commit(name, label=label)
    known = _recall(name, role)
    if known is not None and commit in ("", known.revision) and (file := _file(known)).is_file():
        return file, known
    with progress.phase(f"downloading {label}", deadline_s=DEADLINE_S, announce=True):
        return _make(name, commit=commit, role=role, label=label)


def pin_rows(name: DatasetName, *, role: Role, label: str) -> DatasetName:
    """Return the pinned name of a split that is to be streamed, of which nothing is downloaded. Raises UserError."""
    if "[" in name.split:
        raise UserError(f"{label}: a part of a split cannot be streamed; name the whole one, or set data.stream.rows=0")
    if name.pinned:
        return name
    request = {**_request(name, _commit(name, label=label), role), "only_name": True}
    with progress.phase(f"looking up {label}", deadline_s=DEADLINE_S, announce=True):
        answer = _read(request, label)
    if "problem" in answer:
        raise UserError(f"{label}: {answer['problem']}")
    return name.at(answer["commit"], config=answer["config"], split=answer["split"])


def _request(name: DatasetName, commit: str, role: Role) -> dict[str, object]:
    """Return what the program that reads a split is asked for; commit: "" where the Hub cannot be asked."""
    revision = commit or name.revision
    asked = {"repo": name.repo, "config": name.config, "split": name.split, "revision": revision}
    return {**asked, "role": role, "local": False}


def _commit(name: DatasetName, *, label: str) -> str:
    """Return the commit that the revision stands for now; "" where the Hub cannot be asked. Raises UserError."""
    try:
        sha = HfApi().dataset_info(name.repo, revision=name.revision, timeout=constants.DEFAULT_REQUEST_TIMEOUT).sha
    except FAILURES as error:
        if is_unreachable(error) and (_recall_any(name) or constants.HF_HUB_OFFLINE):
            return ""
        raise UserError(f"{label}: {reason(error, repo=name.repo, revision=name.revision, kind='dataset')}") from error
    return sha or ""


def _make(name: DatasetName, *, commit: str, role: Role, label: str) -> tuple[Path, DatasetName]:
    """Return (Parquet file, pinned name) of a split that the library has read. Raises UserError."""
    folder = _folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{label}: {folder} cannot be made ({error.strerror}); set HF_HOME to another folder") from None
    answer = _read({**_request(name, commit, role), "folder": str(folder)}, label)
    if "problem" in answer:
        raise UserError(f"{label}: {answer['problem']}")
    pinned = name.at(answer["commit"], config=answer["config"], split=answer["split"])
    file = _file(pinned)
    file.parent.mkdir(parents=True, exist_ok=True)
    Path(answer["file"]).replace(file)
    _remember(name, role, pinned)
    return file, pinned


def folder_files(name: FolderName, *, role: Role, label: str) -> list[Path]:
    """Return the files of a split of a local folder, as the datasets library finds them. Raises UserError."""
    request = {
        "repo": name.folder,
        "config": name.config,
        "split": name.split,
        "revision": None,
        "role": role,
        "local": True,
    }
    with progress.phase(f"reading {name.folder}", deadline_s=DEADLINE_S):
        answer = _read(request, label)
    if "problem" in answer:
        raise UserError(f"{label}: {answer['problem']}")
    return [Path(file) for file in answer["files"]]


def _read(request: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return what the program that reads a split has to say. Raises UserError."""
    program = python_module(_PROGRAM, json.dumps(request))
    try:
        done = subprocess.run(program, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False, text=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{label}: the datasets library has not read it within {DEADLINE_S:.0f} s; name a file that holds it"
        ) from None
    except (ValueError, IndexError):
        raise UserError(f"{label}: the datasets library ended with exit code {done.returncode}") from None


def _folder(name: DatasetName) -> Path:
    return Path(constants.HF_HOME) / "mega_rl" / "datasets" / name.repo.replace("/", "--")


def _file(pinned: DatasetName) -> Path:
    """Return where the rows of a pinned name are kept."""
    file = f"{quote(pinned.config, safe='')}--{quote(pinned.split, safe='')}.parquet"
    return _folder(pinned) / pinned.revision / file


def _note(name: DatasetName, role: Role) -> Path:
    """Return the file that holds what a name stood for the last time."""
    return _folder(name) / "names" / f"{quote(str(name), safe='')}--{role}.json"


def _remember(name: DatasetName, role: Role, pinned: DatasetName) -> None:
    note = _note(name, role)
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(json.dumps({"commit": pinned.revision, "config": pinned.config, "split": pinned.split}))
    fresh.replace(note)


def _recall(name: DatasetName, role: Role) -> DatasetName | None:
    """Return what the name stood for the last time, if that is known."""
    try:
        note = json.loads(_note(name, role).read_text())
        return name.at(note["commit"], config=note["config"], split=note["split"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _recall_any(name: DatasetName) -> bool:
    roles: tuple[Role, Role] = ("train", "validation")
    return any(_recall(name, role) is not None for role in roles)
