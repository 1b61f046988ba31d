"""Settings that name models and datasets of the Hub, and their downloaded folders and files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError
from tqdm import tqdm

from mega_rl.config.keys import flattened, value_of, with_settings
from mega_rl.config.packaged import read_recipe
from mega_rl.config.rules.rollout import files_of
from mega_rl.config.schema import Config, Origin
from mega_rl.config.schema.data import SOURCES, MixtureConfig
from mega_rl.data.hub import (
    DEFAULT_REVISION,
    FAILURES,
    FolderName,
    ModelName,
    Role,
    RowsName,
    dataset_name,
    fetch_rows,
    folder_files,
    folder_name,
    is_unreachable,
    model_name,
    pin_rows,
    reason,
)
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
    """Return the files that the index names, or the only file without an index."""
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


SETS = "validation.sets"  # a mapping of files, and of lists of files
DATA_ROLES: Mapping[str, Role] = {
    "data.train_files": "train",
    "data.val_files": "validation",
    SOURCES: "train",
    SETS: "validation",
}


@dataclass(frozen=True)
class HubNames:
    """Settings that name something on the Hub, or a local folder of its kind."""

    models: Mapping[str, ModelName] = field(default_factory=dict)  # key -> name
    data: Mapping[str, Mapping[str, RowsName]] = field(default_factory=dict)  # key -> file of the setting -> name

    def __bool__(self) -> bool:
        return bool(self.models or self.data)


def hub_names(config: Config) -> HubNames:
    """Return the names that the run would download; a resumed run keeps its commits."""
    begun = _begun(config)
    named = {key: name for key, path in checkpoint_paths(config).items() if (name := model_name(path)) is not None}
    models = {key: _model_as_begun(name, begun.get(key)) for key, name in named.items()}
    data = {}
    for key in DATA_ROLES:
        files = _files_by_entry(key, value_of(config, key))
        texts = [text for own in files.values() for text in own]
        earlier = [text for own in _files_by_entry(key, begun.get(key) or ()).values() for text in own]
        rows = {text: row for text in texts if (row := folder_name(text) or dataset_name(text)) is not None}
        if rows:
            data[key] = {text: _rows_as_begun(name, earlier) for text, name in rows.items()}
    return HubNames(models, data)


def checkpoint_paths(config: Config) -> dict[str, str]:
    """Return the folder or name of every checkpoint that the run reads, by config key."""
    model, reward = config.model, config.reward
    paths = {"model.path": model.path, "model.ref_path": model.ref_path, "model.critic_path": model.critic_path}
    if reward.source.name == "model":
        paths["reward.source.path"] = reward.model_path
    return {key: path for key, path in paths.items() if path}


def _files_by_entry(key: str, value: Any) -> dict[str, Sequence[str]]:
    """Return the files of a setting by its entries; a list is one entry, ""."""
    if key == SOURCES:
        return {name: source.files for name, source in MixtureConfig(dict(value)).named().items()}
    if key == SETS:
        return {name: files_of(files) for name, files in dict(value).items()}
    return {"": value}


def fetch(config: Config, names: HubNames, *, admit: Callable[[Config], None]) -> Config:
    """Return the config with every name replaced by its download, and the pinned names in `origins`."""
    models = {key: fetch_description(name, label=f"{key}={name}") for key, name in names.models.items()}
    config = with_settings(config, {key: str(folder) for key, (folder, _) in models.items()})
    if not all(has_weights(folder) for folder, _ in models.values()):
        admit(config)
    origins: dict[str, Origin] = {key: str(pinned) for key, (_, pinned) in models.items()}
    for key, named in names.data.items():
        value = value_of(config, key)
        local: dict[str, Any] = {}
        pinned: dict[str, Any] = {}
        for entry, texts in _files_by_entry(key, value).items():
            place = f"{key}.{entry}" if entry else key
            pairs = [_fetch_rows(place, text, named.get(text), streamed=config.data.stream.rows > 0) for text in texts]
            local[entry] = [file for files, _ in pairs for file in files]
            pinned[entry] = [origin for _, origin in pairs]
        if key == SOURCES:
            local, pinned = ({name: {**value[name], "files": own[name]} for name in own} for own in (local, pinned))
        config = with_settings(config, {key: local.get("", local)})
        origins[key] = pinned.get("", pinned)
    for key, (folder, commit) in models.items():
        fetch_weights(commit, folder, label=f"{key}={names.models[key]}")
    return replace(config, origins=origins)


def _fetch_rows(key: str, text: str, name: RowsName | None, *, streamed: bool) -> tuple[list[str], str]:
    """Return (files, pinned name) for one file of a setting; a stream's files are its name."""
    if name is None:
        return [text], text
    role, label = role_of(key), f"{key}={text}"
    if isinstance(name, FolderName):
        return [str(file) for file in folder_files(name, role=role, label=label)], text
    if streamed and role == "train":
        pinned = pin_rows(name, role=role, label=label)
        return [str(pinned)], str(pinned)
    path, pinned = fetch_rows(name, role=role, label=label)
    return [str(path)], str(pinned)


def role_of(key: str) -> Role:
    """Return the role of a setting or of its entry, which decides a missing split."""
    return next(role for setting, role in DATA_ROLES.items() if key == setting or key.startswith(f"{setting}."))


def checkpoint_folder(text: str | Path, *, label: str, weights: bool = True) -> Path:
    """Return the folder of a checkpoint that an argument names, local or downloaded from the Hub."""
    name = model_name(str(text))
    if name is None:
        return Path(text)
    asked = f"{label}={name}"
    folder, pinned = fetch_description(name, label=asked)
    if weights:
        fetch_weights(pinned, folder, label=asked)
    return folder


def _begun(config: Config) -> Mapping[str, Any]:
    """Return the settings that the run in the folder began with; empty without one."""
    run_dir = Path(config.trainer.run_dir)
    if config.checkpoint.resume != "auto" or not any((run_dir / "checkpoints").glob("step_*")):
        return {}
    try:
        return flattened(read_recipe(run_dir / "config.yaml"))
    except UserError:
        return {}


def _model_as_begun(name: ModelName, begun: object) -> ModelName:
    """Return the name at the run's first commit, unless it names a revision or another model."""
    earlier = model_name(begun) if isinstance(begun, str) else None
    same = earlier is not None and earlier.repo == name.repo and name.revision == DEFAULT_REVISION
    return earlier if earlier is not None and same else name


def _rows_as_begun(name: RowsName, begun: Sequence[str]) -> RowsName:
    """Return the name at the run's first commit, unless it names a revision or other rows."""
    if isinstance(name, FolderName) or name.revision != DEFAULT_REVISION:
        return name
    for earlier in filter(None, map(dataset_name, map(str, begun))):
        if earlier.repo == name.repo and name.config in ("", earlier.config) and name.split in ("", earlier.split):
            return earlier
    return name
