"""Setting keys and sections by dotted name, read from the schema; settings as records."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, get_type_hints

from mega_rl.config.schema import Config
from mega_rl.config.setting import Kind, OwnKind

Setting = dataclasses.Field[Any]
_NO_SETTING = "origins"


NAMES: list[str] = []  # dotted names of sections and keys, in the schema's order
SECTIONS: dict[str, type] = {}
FIELDS: dict[str, Setting] = {}
TYPES: dict[str, Any] = {}


def _collect(section: str, area: type) -> None:
    """Fill the tables with every section and key below a section."""
    hints = get_type_hints(area)
    for field in dataclasses.fields(area):
        name, kind = f"{section}{field.name}", hints[field.name]
        if name == _NO_SETTING:
            continue
        NAMES.append(name)
        if dataclasses.is_dataclass(kind) and "kinds" not in field.metadata:
            SECTIONS[name] = kind  # type: ignore[assignment]
            _collect(f"{name}.", hints[field.name])
        else:
            FIELDS[name], TYPES[name] = field, kind


_collect("", Config)


def keys_in(section: str) -> tuple[str, ...]:
    """Return every key of a section, without those of the sections in it."""
    return tuple(key for key in FIELDS if key.rpartition(".")[0] == section)


def keys_below(section: str) -> tuple[str, ...]:
    """Return every key of a section and of the sections in it."""
    return tuple(key for key in FIELDS if key.startswith(f"{section}."))


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting."""
    return attrgetter(key)(config)


# Tagged sections with their default kinds.
TAGGED: dict[str, Kind] = {key: value_of(Config(), key) for key, field in FIELDS.items() if field.metadata["kinds"]}


def is_mapping(key: str) -> bool:
    """Return whether a setting's value is a mapping whose entries may be given as key.name=value."""
    return key in TAGGED or getattr(TYPES.get(key), "__origin__", None) is dict


def flat(config: Config) -> dict[str, Any]:
    """Return every setting's plain value by dotted key; a tagged section is a mapping with `name`."""
    return {key: value_of(config, key).plain if key in TAGGED else value_of(config, key) for key in FIELDS}


def as_nested(area: Any) -> dict[str, Any]:
    """Return every setting of a config or section as plain values by section and name."""
    entries = {field.name: getattr(area, field.name) for field in dataclasses.fields(area) if field.name != _NO_SETTING}
    sections = {
        name for name, value in entries.items() if dataclasses.is_dataclass(value) and not isinstance(value, Kind)
    }
    return {name: as_nested(value) if name in sections else _plain(value) for name, value in entries.items()}


def _plain(value: Any) -> Any:
    return copy.deepcopy(value.plain if isinstance(value, Kind) else value)


def flattened(nested: Mapping[str, object], section: str = "") -> dict[str, object]:
    """Return a nested record's entries by dotted name: {"optim": {"lr": 1e-06}} -> {"optim.lr": 1e-06}.

    A setting that is itself a mapping stays one, a tagged section does not.
    """
    entries: dict[str, object] = {}
    for name, value in nested.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and (key not in FIELDS or key in TAGGED):
            entries |= flattened(value, f"{key}.")
        else:
            entries[key] = value
    return entries


def open_ended(config: Config) -> Config:
    """Return the config; where trainer.epochs is given, with more steps than any run has."""
    return with_settings(config, {"trainer.steps": 10**9}) if config.trainer.epochs else config


def kind_of(key: str, value: object) -> Kind:
    """Return the kind of a tagged section that a name or mapping chooses; values are unchecked."""
    entries: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)  # type: ignore[call-overload]
    name = entries.pop("name", TAGGED[key].name)
    kinds: Mapping[str, type[Kind]] = FIELDS[key].metadata["kinds"]
    return kinds[name](**entries) if name in kinds else OwnKind(name, entries)


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Return the config with these values by dotted key; a name means a kind with defaults."""
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section in TAGGED:
            kind = value_of(config, section)
            if name not in kind.plain and getattr(kind, name, None) == value:
                continue  # a constant of the kind, as the interval of a run without a KL
            key, value = section, {**({} if name == "name" else kind.plain), name: value}
            section, _, name = key.rpartition(".")
        if key in TAGGED and not isinstance(value, Kind):
            value = kind_of(key, value)
        changed: Any = dataclasses.replace(value_of(config, section), **{name: value})
        while section:
            section, _, name = section.rpartition(".")
            outer = value_of(config, section) if section else config
            changed = dataclasses.replace(outer, **{name: changed})
        config = changed
    return config


def recorded(config: Config) -> Config:
    """Return the config as records keep it: pinned names in place of their downloaded folders."""
    return dataclasses.replace(with_settings(config, config.origins), origins={})


def as_record(config: Config) -> dict[str, Any]:
    """Return all settings as nested plain values, Hub names pinned: {"optim": {"lr": 1e-06, ...}, ...}."""
    return as_nested(recorded(config))


def short_commit(name: str) -> str:
    """Return a pinned name with a short commit; other texts unchanged."""
    return re.sub(r"@([0-9a-f]{12})[0-9a-f]{28}$", r"@\1", name)


def pinned_overrides(config: Config) -> list[str]:
    """Return `key=value` arguments that make another process read the same commits."""
    # JSON is YAML on one line.
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in config.origins.items()]
