"""Load a recipe and overrides as a Config. OmegaConf reads, merges and interpolates; our types and ranges check."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.choices import CHOICES
from mega_rl.config.key_names import unknown_key, unknown_section
from mega_rl.config.keys import FIELDS, SECTIONS, TAGGED, TYPES, as_nested, flat, flattened, is_mapping, value_of
from mega_rl.config.needs import Unmet, unmet
from mega_rl.config.recipe import parse_value, read_recipe
from mega_rl.config.schema import Config
from mega_rl.config.schema.data import completed_sources
from mega_rl.config.values import BadValue, coerce, shown
from mega_rl.errors import UserError, UserErrors

logger = logging.getLogger(__name__)

SOURCES = "data.mixture.sources"
Overrides = Sequence[str] | Mapping[str, Any] | DictConfig
Settings = dict[str, Any]  # values by dotted key, or by key and name of a mapping's entry
UNSET = object()  # value that stands for the default
ONLY_REFERENCES = "only ${section.key} references are allowed; write the value"
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\}")


def load(recipe: str | Path | None, overrides: Overrides = ()) -> Config:
    """Return the run's Config: defaults, then the recipe, then overrides (the last one of a key wins).

    recipe: a YAML file or the name of a packaged recipe. overrides: `key=value` texts, a DictConfig, or a mapping of
    {"section.key": value} or {"section": {"key": value}}, in which a path or a tuple is a text or a list.

    A value may refer to another as ${section.key}; `key=null`, `~key` and None restore the default. A setting of the
    recipe that the overrides leave without effect takes its default, and one line of the log names all of these. (A
    setting that has no effect in the recipe already, or is itself an override, is left to `mega_rl.config.rules`.)
    Raises UserErrors with one line for each mistake.
    """
    problems: list[str] = []
    inherited: Settings = {}
    if recipe is not None:
        try:
            inherited = dict(_settings_in(read_recipe(Path(recipe)), "", problems))
        except UserError as error:
            problems.append(str(error))
    given = dict(_given(overrides, problems))
    _drop_settings_of_others(inherited, given)
    config = _config([inherited, given], problems)
    if problems:
        raise UserErrors(problems)
    kept = {key: value for key, value in inherited.items() if key not in given}
    return _set_aside(config, inherited, given) if kept and given else config


def _settings_in(content: Mapping[Any, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every setting of nested sections; unknown keys go to `problems`."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in TAGGED:
            yield from _of_tagged(key, value, problems)
        elif key in FIELDS or is_mapping(key.rpartition(".")[0]):
            yield key, UNSET if value is None else value
        elif isinstance(value, Mapping) and key in SECTIONS:
            yield from _settings_in(value, f"{key}.", problems)
        elif key in SECTIONS:
            if value is not None:
                problems.append(f"{key}={shown(value)}: is a section; give it lines of 'key: value'")
        elif isinstance(value, Mapping) or "." not in key:
            problems.append(unknown_section(key, holds_settings=isinstance(value, Mapping)))
        else:
            problems.append(unknown_key(key))


def _of_tagged(key: str, value: Any, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a tagged section one by one; a text in its place is the name."""
    if value is None or value is UNSET:
        yield key, UNSET
    elif isinstance(value, str):
        yield f"{key}.name", value
    elif isinstance(value, Mapping):
        yield from ((f"{key}.{name}", UNSET if entry is None else entry) for name, entry in value.items())
    else:
        problems.append(f"{key}={shown(value)}: needs a name, or a mapping such as {{name: {TAGGED[key].name}}}")


def _given(overrides: Overrides, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each override; mistakes go to `problems`."""
    if isinstance(overrides, DictConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]
    if isinstance(overrides, Mapping):
        yield from _settings_in(_plain(overrides), "", problems)
        return
    for override in overrides:
        try:
            key, value = _override(override)
        except UserError as error:
            problems.append(str(error))
        else:
            yield from _of_tagged(key, value, problems) if key in TAGGED else [(key, value)]


def _plain(value: Any) -> Any:
    """Return a mapping of a Python program as YAML would give it: paths as texts, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _override(override: str) -> tuple[str, Any]:
    """Return key and value of `section.key=value`, None for `section.key=null` and `~section.key`. Raises UserError."""
    key, equals, text = override.partition("=")
    if override.startswith("~") and not equals:
        key, equals, text = override[1:], "=", "null"
    if not equals or not key:
        raise UserError(f"override {shown(override)}: needs the form section.key=value")
    if key in SECTIONS:
        raise UserError(f"override {shown(override)}: {key} is a section; set one of its keys, as {key}.key=value")
    if not (key in FIELDS or is_mapping(key.rpartition(".")[0])):
        raise UserError(unknown_key(key))
    if text == "null":
        return key, UNSET
    try:
        value = parse_value(text)
    except UserError as error:
        if "${" in text and key in FIELDS:
            return key, text  # refused with its key when references are resolved
        raise UserError(f"override {shown(override)}: {error}") from error
    if TYPES.get(key) is str and not isinstance(value, str):
        value = text  # a folder named 2026 or ~ is still a name
    return key, value


def _drop_settings_of_others(inherited: Settings, given: Settings) -> None:
    """Drop the recipe's settings of a kind in whose place the overrides choose another; the log names them.

    A setting may mean something else to another kind: a clip of 0.2 suits the ratio of a token and clips next to
    nothing of a sequence's.
    """
    for key, default in TAGGED.items():
        before = inherited.get(f"{key}.name", default.name)
        others = [entry for entry in inherited if entry.startswith(f"{key}.") and entry != f"{key}.name"]
        if given.get(f"{key}.name", before) != before and others:
            logger.info(
                "the arguments leave these settings of the recipe without effect, which take their defaults: %s "
                "(need %s=%s)",
                ", ".join(f"{entry}={shown(inherited.pop(entry))}" for entry in others), key, before,
            )  # fmt: skip


def _config(layers: Sequence[Settings], problems: list[str]) -> Config:
    """Return the Config of merged settings; the default stands for a setting that goes to `problems`."""
    merged, chosen = _merged(layers, problems)
    raw = flattened(OmegaConf.to_container(merged))  # type: ignore[arg-type]
    values: Settings = {}
    for key, field in FIELDS.items():
        if key in TAGGED:
            entries: Any = OmegaConf.to_container(OmegaConf.select(merged, key)) if key in chosen else {}
            values[key] = CHOICES[key].made(entries, problems)
            continue
        try:
            values[key] = coerce(_resolved(merged, key, raw[key]), TYPES[key], field)
        except BadValue as error:
            problems.append(f"{key}={shown(raw[key])}: {error}")
            values[key] = value_of(Config(), key)
    values[SOURCES] = completed_sources(SOURCES, values[SOURCES], problems)
    # Sections inside others come after them, so that going backwards each finds those in it.
    for section in reversed(SECTIONS):
        values[section] = SECTIONS[section](**_entries(values, f"{section}."))
    return Config(**_entries(values, ""))


def _merged(layers: Sequence[Settings], problems: list[str]) -> tuple[DictConfig, set[str]]:
    """Return defaults and layers in one container, and the keys that a layer has set."""
    merged = OmegaConf.create(as_nested(Config()))
    chosen: set[str] = set()
    for key, value in (entry for layer in layers for entry in layer.items()):
        setting = key if key in FIELDS else key.rpartition(".")[0]
        if setting != key:
            value = _with_entry(merged, setting, chosen, key.rpartition(".")[2], value)
        chosen = chosen - {setting} if value is UNSET else chosen | {setting}
        value = flat(Config())[setting] if value is UNSET else value
        try:
            OmegaConf.update(merged, setting, value, merge=False)
        except OmegaConfBaseException:
            problems.append(f"{setting}={shown(value)}: {ONLY_REFERENCES}")
    return merged, chosen


def _with_entry(merged: DictConfig, setting: str, chosen: set[str], name: str, value: object) -> object:
    """Return a mapping with one more entry, or without it for UNSET; a value in its place stays for its own error."""
    before = OmegaConf.select(merged, setting) if setting in chosen else {}
    before = OmegaConf.to_container(before) if OmegaConf.is_config(before) else before
    if not isinstance(before, dict):
        return before
    others = {own: entry for own, entry in before.items() if own != name}
    return others if value is UNSET else {**others, name: value}


def _resolved(merged: DictConfig, key: str, raw: Any) -> Any:
    """Return a setting's raw value with its references replaced; a mapping stands as it is. Raises BadValue."""
    texts = [text for text in (raw if isinstance(raw, list) else [raw]) if isinstance(text, str) and "${" in text]
    if not texts:
        return raw
    if any("${" in _REFERENCE.sub("", text) for text in texts):  # a resolver, such as one of the environment
        raise BadValue(ONLY_REFERENCES)
    try:
        value = OmegaConf.select(merged, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError):
        raise BadValue("refers to a key that does not exist or to itself") from None


def _entries(values: Settings, prefix: str) -> Settings:
    """Take the settings and sections right below a prefix out of `values`, by their last name."""
    keys = [key for key in values if key.startswith(prefix) and "." not in key.removeprefix(prefix)]
    return {key.removeprefix(prefix): values.pop(key) for key in keys}


def _set_aside(config: Config, inherited: Settings, given: Settings) -> Config:
    """Return the Config without the recipe's settings (`inherited`) that the overrides (`given`) leave without effect.

    Dropping one may leave another without effect, so this is repeated until nothing changes.
    """
    idle_anyway = {entry.key for entry in unmet(_config([inherited], []))}
    kept = {key: value for key, value in inherited.items() if key not in given}
    dropped: list[Unmet] = []
    while idle := [entry for entry in unmet(config) if _kept(kept, entry) and entry.key not in idle_anyway]:
        dropped += idle
        for key in [key for entry in idle for key in _kept(kept, entry)]:
            del kept[key]
        problems: list[str] = []
        config = _config([kept, given], problems)
        if problems:  # a value that refers to a dropped setting
            raise UserErrors(problems)
    if dropped:
        logger.info(
            "the arguments leave these settings of the recipe without effect, which take their defaults: %s",
            ", ".join(f"{entry.setting} (needs {entry.need.condition})" for entry in dropped),
        )
    return config


def _kept(kept: Settings, entry: Unmet) -> list[str]:
    """Return the keys by which a recipe gives a setting: its own, or those of a tagged section."""
    return [key for key in kept if key == entry.key or (is_mapping(entry.key) and key.startswith(f"{entry.key}."))]
