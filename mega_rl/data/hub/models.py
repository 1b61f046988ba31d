"""Model repositories: first the small files that describe the model, then its weights, into the Hub's cache.

`snapshot_download` locks files, so that the ranks of a node download each file once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError
from tqdm import tqdm

from mega_rl.data.hub.errors import FAILURES, is_unreachable, reason
from mega_rl.data.hub.names import ModelName
from mega_rl.errors import UserError
from mega_rl.tracking import progress

INDEX = "model.safetensors.index.json"
DESCRIPTION = (
    *("config.json", "generation_config.json", INDEX, "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.model.v[0-9]*", "tekken.json", "*.tiktoken"),
    *("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*"),
)  # never code, never pickled weights


def fetch_description(name: ModelName, *, label: str) -> tuple[Path, ModelName]:
    """Download a model without its weights; return (folder in the cache, pinned name)."""
    folder = _download(name, DESCRIPTION, label=label)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{label}: {name.repo} has no config.json at this revision, so it is not a model in Hugging "
            "Face's format; name another repository or revision"
        )
    return folder, replace(name, revision=folder.name)


def fetch_weights(name: ModelName, folder: Path, *, label: str) -> None:
    """Complete the folder of `fetch_description` with the safetensors files; `name` is pinned. Raises UserError."""
    wanted = _weight_files(folder, label=label)
    if all((folder / file).is_file() for file in wanted):
        return
    _download(name, wanted, label=label)
    if not any((folder / file).is_file() for file in wanted):
        raise UserError(
            f"{label}: {name.repo} holds no safetensors weights ({wanted[0]}); other formats are not read, since they "
            "may run code: take a repository or revision with safetensors"
        )


def has_weights(folder: Path) -> bool:
    """Return whether every weight file of a downloaded description is there."""
    try:
        return all((folder / file).is_file() for file in _weight_files(folder, label=""))
    except UserError:
        return False


def _weight_files(folder: Path, *, label: str) -> list[str]:
    """Return the files that the index names, or the one file of a model without an index."""
    index = folder / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{label}: {index}: not an index of weights; take another revision") from None
    return sorted(name for name in names if name.endswith(".safetensors"))


def _download(name: ModelName, files: Sequence[str], *, label: str) -> Path:
    """Return the folder of the snapshot, with those of the files that the repository has."""
    try:
        with progress.phase(f"downloading {label}", unit="B", announce=files is not DESCRIPTION) as phase:
            return _snapshot(name, files, tqdm_class=type("Bar", (_Bar,), {"phase": phase}))
    except FAILURES as error:
        failure: Exception = error
    if is_unreachable(failure):  # the client gives up without its list of files, which an older cache may lack
        try:
            return _snapshot(name, files, local_files_only=True)
        except IncompleteSnapshotError as error:
            failure = error
        except FAILURES:
            pass
    raise UserError(f"{label}: {reason(failure, repo=name.repo, revision=name.revision, kind='model')}") from failure


def _snapshot(name: ModelName, files: Sequence[str], **settings: Any) -> Path:
    # Patterns match folders, too: only additional_chat_templates is part of the description.
    nested = ["[!a]*/*", "a[!d]*/*"] if files is DESCRIPTION else None
    return Path(
        snapshot_download(
            name.repo, revision=name.revision, allow_patterns=list(files), ignore_patterns=nested, **settings
        )
    )


class _Bar(tqdm):
    """A bar of huggingface_hub that shows its bytes in our phase and writes nothing itself."""

    phase: progress.Phase

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings | {"disable": False, "file": io.StringIO()})

    def display(self, *_: Any, **__: Any) -> None:
        # One bar counts files, one the bytes received, one the bytes written: only the last knows the real total.
        if self.unit == "B" and not str(self.desc).startswith("Downloading"):
            self.phase.report(int(self.n), int(self.total or 0) or None)
