"""Recipe file and dotlist overrides -> Config; every mistake found is reported at once."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mega_rl.config.recipe import parse_yaml, read_recipe
from mega_rl.config.schema import Config
from mega_rl.config.values import BadValue, coerce, shown
from mega_rl.errors import UserError, UserErrors

_HINTS: dict[str, type] = get_type_hints(Config)
SECTIONS: dict[str, type] = {name: hint for name, hint in _HINTS.items() if dataclasses.is_dataclass(hint)}
FIELDS: dict[str, dataclasses.Field[Any]] = {
    **{field.name: field for field in dataclasses.fields(Config) if field.name not in SECTIONS},
    **{f"{section}.{field.name}": field for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)},
}
_TYPES: dict[str, Any] = {
    **_HINTS,
    **{f"{section}.{name}": hint for section, cls in SECTIONS.items() for name, hint in get_type_hints(cls).items()},
}
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\}")  # ${section.key}


def load(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The run's Config: defaults, then the recipe, then `key=value` overrides (the last one of a key wins).

    A value may refer to another as ${section.key}. Raises UserErrors with one line for each mistake.
    """
    problems: list[str] = []
    settings: dict[str, Any] = {}
    if recipe is not None:
        try:
            settings.update(_recipe_settings(read_recipe(recipe), problems))
        except UserError as error:
            problems.append(str(error))
    for override in overrides:
        try:
            key, value = _override_setting(override)
        except UserError as error:
            problems.append(str(error))
        else:
            settings[key] = value
    values = _resolve(settings, problems)
    if problems:
        raise UserErrors(problems)
    sections: dict[str, Any] = {name: cls(**values.pop(name)) for name, cls in SECTIONS.items()}
    return Config(**sections, **values[""])


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
            problems.append(f"{_key_shown(section)}: unknown section; {guess}")
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


def _override_setting(override: str) -> tuple[str, Any]:
    """Key and value of one `section.key=value`. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {shown(override)}: needs the form section.key=value")
    if key in SECTIONS:
        raise UserError(f"override {shown(override)}: {key} is a section; set one of its keys, as {key}.key=value")
    if key not in FIELDS:
        raise UserError(f"{_key_shown(key)}: unknown key; {nearest_key(key)}")
    try:
        value = parse_yaml(text)
    except UserError as error:
        raise UserError(f"override {shown(override)}: {error}") from error
    if _TYPES[key] is str and not isinstance(value, str):
        value = text  # a folder named 2026 or null is still a name
    return key, value


def _harmless(value: object) -> bool:
    """Whether OmegaConf would take it as it is or look up a key, and not call a resolver (say, for the environment)."""
    entries = value if isinstance(value, list) else [value]
    return not any(isinstance(entry, str) and "${" in _REFERENCE.sub("", entry) for entry in entries)


def _flat(value: object) -> bool:
    """Whether it is a scalar or a list of scalars, the only kinds of setting."""
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
