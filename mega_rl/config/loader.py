"""Load a recipe and overrides as a Config. OmegaConf reads and interpolates; the schema checks.

An unknown key is answered with the nearest one, or our name for a setting of TRL, verl, OpenRLHF or slime.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.choices import CHOICES
from mega_rl.config.keys import FIELDS, SECTIONS, TAGGED, TYPES, as_nested, is_mapping, with_settings
from mega_rl.config.needs import Unmet, implied, unmet
from mega_rl.config.packaged import parse_value, read_recipe, rows_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.data import SOURCES, completed_sources
from mega_rl.config.values import ONLY_REFERENCES, BadValue, coerce, shown
from mega_rl.errors import UserError, UserErrors

logger = logging.getLogger(__name__)

Overrides = Sequence[str] | Mapping[str, Any] | DictConfig
Settings = dict[str, Any]  # values by dotted key, or by key and name of a mapping's entry
UNSET = object()  # value that stands for the default
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\}")


def load(recipe: str | Path | None, overrides: Overrides = ()) -> Config:
    """Return the run's Config: defaults, then recipe, then overrides (the last of a key wins).

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
    return _set_aside(config, inherited, given) if inherited and given else config


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
        elif key not in SECTIONS:
            problems.append(unknown_key(key, is_section=isinstance(value, Mapping)))
        elif value is not None:
            problems.append(f"{key}={shown(value)}: is a section; give it lines of 'key: value'")


def _of_tagged(key: str, value: Any, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a tagged section; a text in its place is the name."""
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
    """Return a Python mapping as YAML would give it: paths as texts, tuples as lists."""
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
    """Drop the recipe's settings of a kind that the overrides replace; the log names them.

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
                ", ".join(f"{entry}={shown(inherited.pop(entry))}" for entry in others), key, before
            )  # fmt: skip


def _config(layers: Sequence[Settings], problems: list[str]) -> Config:
    """Return the Config of merged settings; the default stands for a setting that goes to `problems`."""
    chosen = _merged(layers)
    chosen = _merged([implied(str(chosen.get("algorithm.kind", {}).get("name", "rl"))), *layers])
    resolved = _with_references(chosen, problems)
    values: Settings = {}
    for key in (key for key in FIELDS if key in chosen):
        if key in TAGGED:
            values[key] = CHOICES[key].made(resolved[key], problems)
        elif key in resolved:
            try:
                values[key] = coerce(resolved[key], TYPES[key], FIELDS[key])
            except BadValue as error:
                problems.append(f"{key}={shown(chosen[key])}: {error}")
    if SOURCES in values:
        values[SOURCES] = completed_sources(SOURCES, values[SOURCES], problems)
    return with_settings(Config(), values)


def _merged(layers: Sequence[Settings]) -> Settings:
    """Return the raw value of every setting that a layer gives; entries of mappings are joined."""
    merged: Settings = {}
    for key, value in (entry for layer in layers for entry in layer.items()):
        setting, _, name = (key, "", "") if key in FIELDS else key.rpartition(".")
        if name:
            before = merged.get(setting, {})
            if not isinstance(before, dict):
                continue  # the value in the mapping's place has its own error
            value = {own: entry for own, entry in before.items() if own != name} | (
                {} if value is UNSET else {name: value}
            )
        if value is UNSET:
            merged.pop(setting, None)
        else:
            merged[setting] = value
    return merged


def _with_references(chosen: Settings, problems: list[str]) -> Settings:
    """Return raw values with references replaced; mappings stay, wrong references are left out."""
    texts = {
        key: [text for text in (raw if isinstance(raw, list) else [raw]) if isinstance(text, str) and "${" in text]
        for key, raw in chosen.items()
    }
    if not any(texts.values()):
        return chosen
    wrong = {key for key, own in texts.items() if any("${" in _REFERENCE.sub("", text) for text in own)}  # a resolver
    problems += [f"{key}={shown(chosen[key])}: {ONLY_REFERENCES}" for key in chosen if key in wrong]
    resolved = {key: value for key, value in chosen.items() if key not in wrong}
    whole = OmegaConf.create(as_nested(Config()))
    for key, value in resolved.items():
        if key not in TAGGED:
            OmegaConf.update(whole, key, value, merge=False)
    for key in (key for key in texts if texts[key] and key not in wrong):
        try:
            value = OmegaConf.select(whole, key)
            resolved[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError):
            problems.append(f"{key}={shown(chosen[key])}: refers to a key that does not exist or to itself")
            del resolved[key]
    return resolved


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
            ", ".join(f"{entry.setting} (needs {entry.needs})" for entry in dropped),
        )
    return config


def _kept(kept: Settings, entry: Unmet) -> list[str]:
    """Return the keys by which a recipe gives a setting: its own or a tagged section's."""
    return [key for key in kept if key == entry.key or (is_mapping(entry.key) and key.startswith(f"{entry.key}."))]


# peer -> its name -> the setting here, with a value or a remark behind it
NAMES: dict[str, dict[str, str]] = {}
for _peer, _name, _setting in rows_of("peer_names.tsv"):
    NAMES.setdefault(_peer, {})[_name] = _setting


def unknown_key(key: str, *, is_section: bool = False) -> str:
    """Return the error for a key that is no setting; is_section: a mapping stands under it."""
    legible = key if re.fullmatch(r"[\w.\-+~]{1,80}", key) else shown(key)
    near = difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.5) if is_section else []
    hint = in_peers(key) or (f"did you mean {near[0]}?" if near else nearest_key(key))
    return f"{legible}: unknown key; {hint}"


def nearest_key(key: str) -> str:
    """Return the legal key nearest to an unknown one, or its section's keys, in words."""
    section, _, leaf = key.rpartition(".")
    if not section and (sections := difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.75)):
        return f"did you mean {sections[0]}? {_contents(sections[0])}"
    initials = "".join(word[:1] for word in leaf.removesuffix("_size").split("_"))  # learning_rate -> lr
    inside = [name for name in FIELDS if name.rpartition(".")[0] == section]
    for names in (inside, FIELDS):
        same_leaf = [name for name in names if _leaf(name) in (leaf, initials)]
        if near := difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0):
            return f"did you mean {near[0]}?"
    if inside:
        near = [f"{section}.{name}" for name in difflib.get_close_matches(leaf, map(_leaf, inside), n=1, cutoff=0.5)]
    else:
        near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else _contents(section)


def _contents(section: str) -> str:
    """Return the names in a section, or those of all sections if it is none."""
    if section not in SECTIONS:
        return "the sections are " + ", ".join(name for name in SECTIONS if "." not in name)
    below = [*FIELDS, *SECTIONS]
    return f"{section} has " + ", ".join(_leaf(name) for name in below if name.rpartition(".")[0] == section)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def in_peers(key: str) -> str:
    """Return our setting for a peer's key: "TRL's num_generations is rollout.n here"; "" if unknown.

    The longest ending of the key that a peer has decides; dashes count as underscores.
    """
    words = key.replace("-", "_").split(".")
    for name in (".".join(words[start:]) for start in range(len(words))):
        owners: dict[str, list[str]] = {}  # setting -> peers in the genitive
        for peer, names in NAMES.items():
            if name in names:
                owners.setdefault(names[name], []).append(f"{peer}'s")
        if owners:
            return "; ".join(f"{' and '.join(owners[own])} {name} is {own} here" for own in sorted(owners))
    return ""
