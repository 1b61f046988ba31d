"""Model repositories: first the small files that describe the model, then its weights, into the Hub's own cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from mega_rl.errors import UserError
from mega_rl.hub.errors import FAILURES, is_unreachable, reason
from mega_rl.hub.meter import metered
from mega_rl.hub.names import ModelName

INDEX = "model.safetensors.index.json"
DESCRIPTION = (
    *("config.json", "generation_config.json", INDEX, "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.model.v[0-9]*", "tekken.json", "*.tiktoken"),
    *("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*"),
)  # never code, never pickled weights


def fetch_description(name: ModelName, *, label: str) -> tuple[Path, ModelName]:
    """Return (folder in the cache, pinned name) of a model whose files but its weights are there.

    `label` is who asks, "model.path=Qwen/Qwen3-0.6B". Raises UserError.
    """
    folder = _download(name, DESCRIPTION, label=label)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{label}: {name.repo} has no config.json at this revision, so it is not a model in Hugging "
            "Face's format; name another repository or revision"
        )
    return folder, name.at(folder.name)


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
    """Return the folder of the snapshot, with these files of its top folder where the repository has them."""
    try:
        with metered(label, announce=files is not DESCRIPTION) as meter:
            return _snapshot(name, files, tqdm_class=meter.adapter())
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
    # Patterns match folders, too: of those only additional_chat_templates is described.
    nested = ["[!a]*/*", "a[!d]*/*"] if files is DESCRIPTION else None
    return Path(
        snapshot_download(
            name.repo, revision=name.revision, allow_patterns=list(files), ignore_patterns=nested, **settings
        )
    )
