"""Settings that name models and datasets of the Hub -> the same settings with downloaded folders and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mega_rl.config.keys import flattened, value_of, with_settings
from mega_rl.config.recipe import read_recipe
from mega_rl.config.rules.validation import files_of
from mega_rl.config.schema import Config, MixtureConfig, Origin
from mega_rl.errors import UserError
from mega_rl.hub.names import (
    DEFAULT_REVISION,
    DatasetName,
    FolderName,
    ModelName,
    Role,
    dataset_name,
    folder_name,
    model_name,
)

SOURCES = "data.mixture.sources"  # a mapping of mappings, whose files are named as those of a list are
SETS = "validation.sets"  # a mapping of files and of lists of them
DATA_ROLES: Mapping[str, Role] = {
    "data.train_files": "train",
    "data.val_files": "validation",
    SOURCES: "train",
    SETS: "validation",
}


RowsName = DatasetName | FolderName


@dataclass(frozen=True)
class HubNames:
    """The settings of a config that name something on the Hub, or a local folder of its kind; empty without any."""

    models: Mapping[str, ModelName] = field(default_factory=dict)  # key -> name
    data: Mapping[str, Mapping[str, RowsName]] = field(default_factory=dict)  # key -> entry of the list -> name

    def __bool__(self) -> bool:
        return bool(self.models or self.data)

    def __str__(self) -> str:
        entries = [f"{key}={name}" for key, name in self.models.items()]
        return ", ".join([*entries, *(f"{key}={name}" for key, names in self.data.items() for name in names.values())])


def hub_names(config: Config) -> HubNames:
    """Return what the run would have to download; a run that goes on takes the commits that it began with."""
    model, reward, data = config.model, config.reward, config.data
    paths = {"model.path": model.path, "model.ref_path": model.ref_path, "model.critic_path": model.critic_path}
    if reward.source == "model":
        paths["reward.model.path"] = reward.model.path
    models = {key: name for key, path in paths.items() if (name := model_name(path)) is not None}
    files = {"data.train_files": data.train_files, "data.val_files": data.val_files, SOURCES: data.mixture.files()}
    files[SETS] = [file for one in config.validation.sets.values() for file in files_of(one)]
    rows = {key: _dataset_names(texts) for key, texts in files.items()}
    names = HubNames(models, {key: entries for key, entries in rows.items() if entries})
    return _as_begun(names, _begun(config)) if names else names


def fetch(config: Config, names: HubNames, *, admit: Callable[[Config], None]) -> Config:
    """Return the config with every name replaced by what was downloaded for it, and the pinned names in `origins`.

    `admit` is called with the models' folders before their weights are there: what it refuses is not downloaded.
    Raises UserError.
    """
    from mega_rl.hub.models import fetch_description, fetch_weights, has_weights

    models = {key: fetch_description(name, label=f"{key}={name}") for key, name in names.models.items()}
    config = with_settings(config, {key: str(folder) for key, (folder, _) in models.items()})
    if not all(has_weights(folder) for folder, _ in models.values()):
        admit(config)
    origins: dict[str, Origin] = {key: str(pinned) for key, (_, pinned) in models.items()}
    for key, entries in names.data.items():
        fetch_files = _FETCH.get(key, _fetch_entries)
        files, origins[key] = fetch_files(key, value_of(config, key), entries, streamed=config.data.stream.rows > 0)
        config = with_settings(config, {key: files})
    for key, (folder, pinned) in models.items():
        fetch_weights(pinned, folder, label=f"{key}={names.models[key]}")
    return replace(config, origins=origins)


def _fetch_rows(key: str, text: str, name: RowsName, *, streamed: bool) -> tuple[list[str], str]:
    """Return (files, pinned name) of rows that a setting names; a stream's name stands in the place of its files."""
    from mega_rl.hub.rows import fetch_rows, folder_files, pin_rows

    role, label = role_of(key), f"{key}={text}"
    if isinstance(name, FolderName):
        return [str(file) for file in folder_files(name, role=role, label=label)], text
    if streamed and role == "train":
        pinned = pin_rows(name, role=role, label=label)
        return [str(pinned)], str(pinned)
    path, pinned = fetch_rows(name, role=role, label=label)
    return [str(path)], str(pinned)


def _fetch_entries(
    key: str, texts: Sequence[str], names: Mapping[str, RowsName], *, streamed: bool
) -> tuple[list[str], list[str]]:
    """Return (files, pinned names) of a list of data files; one that is no name stands in both as it is."""
    files: list[str] = []
    pinned: list[str] = []
    for text in texts:
        name = names.get(text)
        local, origin = ([text], text) if name is None else _fetch_rows(key, text, name, streamed=streamed)
        files += local
        pinned.append(origin)
    return files, pinned


def role_of(key: str) -> Role:
    """Return which split is meant by names in a setting, or in an entry of it, that name none."""
    return next(role for setting, role in DATA_ROLES.items() if key == setting or key.startswith(f"{setting}."))


def _fetch_sources(
    key: str, sources: dict[str, dict[str, object]], names: Mapping[str, RowsName], *, streamed: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the sources of a mixture with files, and with pinned names."""
    local: dict[str, object] = {}
    pinned: dict[str, object] = {}
    for name, source in MixtureConfig(sources).named().items():
        files, origins = _fetch_entries(key, source.files, names, streamed=streamed)
        local[name], pinned[name] = {**sources[name], "files": files}, {**sources[name], "files": origins}
    return local, pinned


def _fetch_sets(
    key: str, sets: dict[str, object], names: Mapping[str, RowsName], *, streamed: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the sets of a validation with files, and with pinned names."""
    fetched = {
        name: _fetch_entries(f"{key}.{name}", files_of(files), names, streamed=streamed) for name, files in sets.items()
    }
    local: dict[str, object] = {name: files for name, (files, _) in fetched.items()}
    return local, {name: pinned for name, (_, pinned) in fetched.items()}


# Settings whose files are in a mapping -> the function that replaces their names.
_FETCH: Mapping[str, Callable[..., tuple[object, Origin]]] = {SOURCES: _fetch_sources, SETS: _fetch_sets}


def settings_of(config: Config) -> dict[str, Any]:
    """Return what `fetch` changed as JSON, for other ranks of the node."""
    return {"values": {key: value_of(config, key) for key in config.origins}, "origins": dict(config.origins)}


def with_fetched(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with the result of `settings_of`."""
    return replace(with_settings(config, settings["values"]), origins=settings["origins"])


def checkpoint_folder(text: str | Path, *, label: str, weights: bool = True) -> Path:
    """Return the folder of a checkpoint that an argument names: a local one, or one of the Hub, downloaded.

    Without `weights` only what describes the model is downloaded. Raises UserError.
    """
    name = model_name(str(text))
    if name is None:
        return Path(text)
    from mega_rl.hub.models import fetch_description, fetch_weights
    from mega_rl.hub.node import once_per_node

    asked = f"{label}={name}"

    def download() -> dict[str, Any]:
        folder, pinned = fetch_description(name, label=asked)
        if weights:
            fetch_weights(pinned, folder, label=asked)
        return {"folder": str(folder)}

    return Path(once_per_node(download, what=asked)["folder"])


def _dataset_names(texts: Sequence[str]) -> dict[str, RowsName]:
    return {text: name for text in texts if (name := folder_name(text) or dataset_name(text)) is not None}


def _begun(config: Config) -> Mapping[str, Any]:
    """Return the settings that the run in the folder was begun with; empty where there is none to go on with."""
    run_dir = Path(config.trainer.run_dir)
    if config.checkpoint.resume != "auto" or not any((run_dir / "checkpoints").glob("step_*")):
        return {}
    try:
        return flattened(read_recipe(run_dir / "config.yaml"))
    except UserError:
        return {}


def _as_begun(names: HubNames, begun: Mapping[str, Any]) -> HubNames:
    """Return the names with the commits of the run's beginning where they name no revision and nothing else changed."""
    models = {key: _model_as_begun(name, begun.get(key)) for key, name in names.models.items()}
    data = {
        key: {text: _rows_as_begun(name, begun.get(key)) for text, name in entries.items()}
        for key, entries in names.data.items()
    }
    return HubNames(models, data)


def _model_as_begun(name: ModelName, begun: object) -> ModelName:
    earlier = model_name(begun) if isinstance(begun, str) else None
    same = earlier is not None and earlier.repo == name.repo and name.revision == DEFAULT_REVISION
    return earlier if same and earlier is not None else name


def _rows_as_begun(name: RowsName, begun: object) -> RowsName:
    if isinstance(name, FolderName):
        return name
    if isinstance(begun, dict):
        entries = (one.get("files", ()) if isinstance(one, dict) else files_of(one) for one in begun.values())
        begun = [file for files in entries for file in files]
    for text in begun if isinstance(begun, list) else ():
        earlier = dataset_name(str(text))
        if earlier is None or name.revision != DEFAULT_REVISION or earlier.repo != name.repo:
            continue
        if name.config in ("", earlier.config) and name.split in ("", earlier.split):
            return earlier
    return name
