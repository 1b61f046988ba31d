"""Recipe sections and command-line overrides -> (key, value); what is no setting is answered with the key that is."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mega_rl.config.keys import FIELDS, SECTIONS, TYPES, is_mapping
from mega_rl.config.peer_names import in_peers
from mega_rl.config.recipe import parse_yaml
from mega_rl.config.values import shown
from mega_rl.errors import UserError

NULL = "null"  # as an override: the key's default
UNSET = object()


@dataclasses.dataclass(frozen=True)
class Entry:
    """An override of one entry of a mapping: section.key.name=value."""

    name: str
    value: Any

    def put_into(self, mapping: object) -> object:
        """Return the mapping with this entry; what is no mapping is left for its own error."""
        if mapping is None or mapping is UNSET:
            mapping = {}
        if not isinstance(mapping, dict):
            return mapping
        others = {name: value for name, value in mapping.items() if name != self.name}
        return others if self.value is UNSET else {**others, self.name: self.value}


def recipe_settings(content: Mapping[Any, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every setting of nested sections, UNSET for null; mistakes go to `problems`."""
    yield from _settings_in(content, "", problems)


def given_settings(overrides: Sequence[str] | Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each override, UNSET for null and None; mistakes go to `problems`."""
    if isinstance(overrides, Mapping):
        yield from recipe_settings(_plain_python(overrides), problems)
        return
    for override in overrides:
        try:
            yield _override_setting(override)
        except UserError as error:
            problems.append(str(error))


def nearest_key(key: str) -> str:
    """Return words that help who wrote the unknown `key`: the nearest legal one, or all of its section."""
    section, _, leaf = key.rpartition(".")
    if not section and (sections := difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.75)):
        return f"did you mean {sections[0]}? {_contents(sections[0])}"
    initials = "".join(word[:1] for word in leaf.removesuffix("_size").split("_"))  # learning_rate -> lr
    inside = [name for name in FIELDS if name.rpartition(".")[0] == section]
    same_leaf = [name for name in inside or FIELDS if _leaf(name) in (leaf, initials)]
    same_leaf = same_leaf or [name for name in FIELDS if _leaf(name) in (leaf, initials)]
    near = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)
    if not near and inside:
        leaves = difflib.get_close_matches(leaf, map(_leaf, inside), n=1, cutoff=0.5)
        near = [f"{section}.{leaves[0]}"] if leaves else []
    elif not near:
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


def _unknown_section(name: str) -> str:
    near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else nearest_key(name)


def _legible(key: str) -> str:
    return key if re.fullmatch(r"[\w.\-+~]{1,80}", key) else shown(key)


def _settings_in(content: Mapping[Any, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        mapping, _, entry = key.rpartition(".")
        if key in FIELDS:
            yield key, UNSET if value is None else value
        elif is_mapping(mapping):
            yield mapping, Entry(entry, UNSET if value is None else value)
        elif isinstance(value, dict) and key in SECTIONS:
            yield from _settings_in(value, f"{key}.", problems)
        elif key in SECTIONS:
            if value is not None:
                problems.append(f"{key}={shown(value)}: is a section; give it lines of 'key: value'")
        elif name_here := in_peers(key):
            problems.append(f"{_legible(key)}: unknown key; {name_here}")
        elif isinstance(value, dict) or "." not in key:
            guess = _unknown_section(key) if isinstance(value, dict) else nearest_key(key)
            problems.append(f"{_legible(key)}: unknown section; {guess}")
        else:
            problems.append(f"{_legible(key)}: unknown key; {nearest_key(key)}")


def _plain_python(value: Any) -> Any:
    """Return a mapping of a Python program as YAML would give it: paths as texts, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain_python(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_python(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _override_setting(override: str) -> tuple[str, Any]:
    """Return key and value of one `section.key=value`, UNSET for `section.key=null` and `~section.key`.

    Raises UserError.
    """
    key, equals, text = override.partition("=")
    if override.startswith("~") and not equals:
        key, equals, text = override[1:], "=", NULL
    if not equals or not key:
        raise UserError(f"override {shown(override)}: needs the form section.key=value")
    mapping, _, name = key.rpartition(".")
    if mapping in FIELDS and is_mapping(mapping):
        return mapping, Entry(name, UNSET if text == NULL else _parsed(override, text))
    if key not in FIELDS:
        raise UserError(_no_setting(override, key))
    if text == NULL:
        return key, UNSET
    value = _parsed(override, text)
    if TYPES[key] is str and not isinstance(value, str):
        value = text  # a folder named 2026 or ~ is still a name
    return key, value


def _no_setting(override: str, key: str) -> str:
    """Return the answer to an override of something that is no setting."""
    if key in SECTIONS:
        return f"override {shown(override)}: {key} is a section; set one of its keys, as {key}.key=value"
    return f"{_legible(key)}: unknown key; {in_peers(key) or nearest_key(key)}"


def _parsed(override: str, text: str) -> Any:
    """Return the value in an override's text. Raises UserError."""
    try:
        return parse_yaml(text)
    except UserError as error:
        raise UserError(f"override {shown(override)}: {error}") from error
