"""Recipe file and dotlist overrides -> Config; every mistake found is reported at once."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mega_rl.config.needs import Unmet, unmet
from mega_rl.config.recipe import parse_yaml, read_recipe
from mega_rl.config.schema import Config
from mega_rl.config.values import BadValue, coerce, shown
from mega_rl.errors import UserError, UserErrors

logger = logging.getLogger(__name__)

_HINTS: dict[str, type] = get_type_hints(Config)
SECTIONS: dict[str, type] = {name: hint for name, hint in _HINTS.items() if dataclasses.is_dataclass(hint)}
FIELDS: dict[str, dataclasses.Field[Any]] = {
    **{field.name: field for field in dataclasses.fields(Config) if field.name not in SECTIONS and field.metadata},
    **{f"{section}.{field.name}": field for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)},
}
_TYPES: dict[str, Any] = {
    **_HINTS,
    **{f"{section}.{name}": hint for section, cls in SECTIONS.items() for name, hint in get_type_hints(cls).items()},
}
_NULL = "null"  # as an override: the key's default
_UNSET = object()
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\}")  # ${section.key}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An override of one entry of a mapping: section.key.name=value."""

    name: str
    value: Any

    def put_into(self, mapping: object) -> object:
        """Return the mapping with this entry; what is no mapping is left for its own error."""
        if mapping is None or mapping is _UNSET:
            mapping = {}
        if not isinstance(mapping, dict):
            return mapping
        others = {name: value for name, value in mapping.items() if name != self.name}
        return others if self.value is _UNSET else {**others, self.name: self.value}


def load(recipe: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Return the run's Config: defaults, then the recipe, then overrides (the last one of a key wins).

    recipe: a YAML file or the name of a packaged recipe. overrides: `key=value` texts, or a mapping of
    {"section.key": value} or {"section": {"key": value}}, in which a path or a tuple is a text or a list.

    A value may refer to another as ${section.key}; `key=null`, `~key` and None restore the default. A setting of the
    recipe that the overrides leave without effect takes its default, and one line of the log names all of these. (One
    that has no effect in the recipe alone, or was itself given as an override, is left to `mega_rl.config.rules`.)
    Raises UserErrors with one line for each mistake.
    """
    problems: list[str] = []
    inherited: dict[str, Any] = {}
    if recipe is not None:
        try:
            inherited.update(_recipe_settings(read_recipe(Path(recipe)), problems))
        except UserError as error:
            problems.append(str(error))
    given: dict[str, Any] = {}
    for key, value in _given_settings(overrides, problems):
        given[key] = value.put_into(given.get(key, inherited.get(key))) if isinstance(value, _Entry) else value
    kept = {key: value for key, value in inherited.items() if key not in given}
    config = _config({**kept, **_without_unset(given)}, problems)
    if problems:
        raise UserErrors(problems)
    return _set_aside(config, inherited, given) if kept and given else config


def _without_unset(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not _UNSET}


def _config(settings: Mapping[str, Any], problems: list[str]) -> Config:
    """Return the Config of some settings, defaults for the others and for those that go to `problems`."""
    values = _resolve(settings, problems)
    sections: dict[str, Any] = {name: cls(**values.pop(name)) for name, cls in SECTIONS.items()}
    return Config(**sections, **values[""])


def _set_aside(config: Config, inherited: Mapping[str, Any], given: Mapping[str, Any]) -> Config:
    """Return the Config without the recipe's settings (`inherited`) that the overrides (`given`) leave without effect.

    Dropping one may leave another without effect, so this is repeated until nothing changes.
    """
    idle_anyway = {entry.key for entry in unmet(_config(inherited, []))}
    kept = {key: value for key, value in inherited.items() if key not in given}
    dropped: list[Unmet] = []
    while idle := [entry for entry in unmet(config) if entry.key in kept and entry.key not in idle_anyway]:
        dropped += idle
        for entry in idle:
            del kept[entry.key]
        problems: list[str] = []
        config = _config({**kept, **_without_unset(given)}, problems)
        if problems:  # a value that refers to one that was dropped
            raise UserErrors(problems)
    if dropped:
        logger.info(
            "the arguments leave these settings of the recipe without effect, which take their defaults: %s",
            ", ".join(f"{entry.setting} (needs {entry.need.condition})" for entry in dropped),
        )
    return config


def nearest_key(key: str) -> str:
    """Words that help who wrote the unknown `key`: the nearest legal one, or all of its section."""
    section, _, leaf = key.rpartition(".")
    initials = "".join(word[:1] for word in leaf.removesuffix("_size").split("_"))  # learning_rate -> lr
    same_leaf = [known for known in FIELDS if known.rpartition(".")[2] in (leaf, initials)]
    inside = [known for known in FIELDS if known.startswith(f"{section}.")]
    if not same_leaf and inside:
        near = difflib.get_close_matches(leaf, [known.rpartition(".")[2] for known in inside], n=1, cutoff=0.5)
        return f"did you mean {section}.{near[0]}?" if near else f"{section} has {_leaves(inside)}"
    near = difflib.get_close_matches(key, same_leaf or FIELDS, n=1, cutoff=0.0 if same_leaf else 0.6)
    return f"did you mean {near[0]}?" if near else "the sections are " + ", ".join(SECTIONS)


def _leaves(keys: Sequence[str]) -> str:
    return ", ".join(key.rpartition(".")[2] for key in keys)


def _recipe_settings(content: Mapping[Any, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) of every known key, section.key of those in one; the others go to `problems`."""
    for section, entries in content.items():
        if section in FIELDS:
            yield section, entries
        elif section not in SECTIONS:
            near = difflib.get_close_matches(str(section), SECTIONS, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]}?" if near and isinstance(entries, dict) else nearest_key(str(section))
            kind = "key" if "." in str(section) else "section"
            problems.append(f"{_key_shown(section)}: unknown {kind}; {guess}")
        elif entries is not None and not isinstance(entries, dict):
            problems.append(f"{section}={shown(entries)}: is a section; give it lines of 'key: value'")
        else:
            yield from _section_settings(section, entries or {}, problems)


def _section_settings(section: str, entries: Mapping[Any, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        key = f"{section}.{name}"
        if key in FIELDS:
            yield key, value
        else:
            problems.append(f"{_key_shown(key)}: unknown key; {nearest_key(key)}")


def _given_settings(overrides: Sequence[str] | Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each override, _UNSET for null and None; the mistakes go to `problems`."""
    if isinstance(overrides, Mapping):
        for key, value in _recipe_settings(_plain_python(overrides), problems):
            yield key, _UNSET if value is None else value
        return
    for override in overrides:
        try:
            yield _override_setting(override)
        except UserError as error:
            problems.append(str(error))


def _plain_python(value: Any) -> Any:
    """Return a mapping of a Python program as YAML would give it: paths as texts, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain_python(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_python(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _override_setting(override: str) -> tuple[str, Any]:
    """Return key and value of one `section.key=value`, _UNSET for `section.key=null` and `~section.key`.

    Raises UserError.
    """
    key, equals, text = override.partition("=")
    if override.startswith("~") and not equals:
        key, equals, text = override[1:], "=", _NULL
    if not equals or not key:
        raise UserError(f"override {shown(override)}: needs the form section.key=value")
    if key in SECTIONS:
        raise UserError(f"override {shown(override)}: {key} is a section; set one of its keys, as {key}.key=value")
    mapping, _, name = key.rpartition(".")
    if mapping in FIELDS and _is_mapping(mapping):
        return mapping, _Entry(name, _UNSET if text == _NULL else _parsed(override, text))
    if key not in FIELDS:
        raise UserError(f"{_key_shown(key)}: unknown key; {nearest_key(key)}")
    if text == _NULL:
        return key, _UNSET
    value = _parsed(override, text)
    if _TYPES[key] is str and not isinstance(value, str):
        value = text  # a folder named 2026 or ~ is still a name
    return key, value


def _parsed(override: str, text: str) -> Any:
    """Return the value in an override's text. Raises UserError."""
    try:
        return parse_yaml(text)
    except UserError as error:
        raise UserError(f"override {shown(override)}: {error}") from error


def _is_mapping(key: str) -> bool:
    return getattr(_TYPES[key], "__origin__", None) is dict


def _harmless(value: object) -> bool:
    """Whether OmegaConf would take it as it is or look up a key, and not call a resolver (say, for the environment)."""
    entries = value if isinstance(value, list) else [value]
    return not any(isinstance(entry, str) and "${" in _REFERENCE.sub("", entry) for entry in entries)


def _flat(value: object) -> bool:
    """Return whether it is a scalar or a list of scalars, which may refer to other keys; a mapping stands as it is."""
    entries = value if isinstance(value, list) else [value]
    return not any(isinstance(entry, (dict, list)) for entry in entries)


def _resolve(settings: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Section -> key -> typed value, defaults included; "" has the keys of no section.

    What does not fit goes to `problems`.
    """
    merged = OmegaConf.create(dataclasses.asdict(Config()))
    for key, value in settings.items():
        if _flat(value) and _harmless(value):
            OmegaConf.update(merged, key, value, merge=False)
    values: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for key, field in FIELDS.items():
        section, _, name = key.rpartition(".")
        given = settings.get(key)
        if not _harmless(given):
            problems.append(f"{key}={shown(given)}: only ${{section.key}} references are allowed; write the value")
            continue
        try:
            value = _plain(merged, key) if _flat(given) else given
            values[section][name] = coerce(value, _TYPES[key], field)
        except BadValue as error:
            problems.append(f"{key}={shown(given)}: {error}")
        except MissingMandatoryValue:
            problems.append(f"{key}={shown(given)}: is only a place-holder; write the value")
        except (OmegaConfBaseException, RecursionError):
            problems.append(f"{key}={shown(given)}: refers to a key that does not exist or to itself")
    return values


def _plain(merged: DictConfig, key: str) -> Any:
    """The value of a key as plain Python, references resolved."""
    value = OmegaConf.select(merged, key, throw_on_missing=True, throw_on_resolution_failure=True)
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def _key_shown(key: object) -> str:
    text = str(key)
    return text if re.fullmatch(r"[\w.\-+~]{1,80}", text) else shown(text)
