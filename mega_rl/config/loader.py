"""Recipe file and overrides -> Config; every mistake found is reported at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl.config.conditions import Unmet
from mega_rl.config.keys import FIELDS, SECTIONS, TYPES, flat, value_of
from mega_rl.config.needs import unmet
from mega_rl.config.overrides import UNSET, Entry, given_settings, recipe_settings
from mega_rl.config.plugins.choices import CHOICES
from mega_rl.config.recipe import read_recipe
from mega_rl.config.references import resolve
from mega_rl.config.schema import Config
from mega_rl.config.values import BadValue, coerce, shown
from mega_rl.errors import UserError, UserErrors

logger = logging.getLogger(__name__)


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
            inherited = _without_unset(_merged(recipe_settings(read_recipe(Path(recipe)), problems), {}))
        except UserError as error:
            problems.append(str(error))
    arguments = list(given_settings(overrides, problems))
    _drop_settings_of_others(inherited, dict(arguments))
    given = _merged(arguments, inherited)
    kept = {key: value for key, value in inherited.items() if key not in given}
    config = _config({**kept, **_without_unset(given)}, problems)
    if problems:
        raise UserErrors(problems)
    return _set_aside(config, inherited, given) if kept and given else config


def _merged(settings: Iterable[tuple[str, object]], below: Mapping[str, object]) -> dict[str, object]:
    """Return the last value of each key; an entry of a mapping joins the mapping before it, or that of `below`."""
    merged: dict[str, object] = {}
    for key, value in settings:
        merged[key] = value.put_into(merged.get(key, below.get(key))) if isinstance(value, Entry) else value
    return merged


def _drop_settings_of_others(inherited: dict[str, object], arguments: Mapping[str, object]) -> None:
    """Drop the recipe's settings of an algorithm in whose place the arguments choose another; the log names them.

    A setting may mean something else to another algorithm: a clip of 0.2 suits the ratio of a token and clips next to
    nothing of a sequence's.
    """
    for choice in CHOICES:
        before = inherited.get(choice.key, value_of(Config(), choice.key))
        if arguments.get(choice.key, before) != before and choice.settings_key in inherited:
            logger.info(
                "the arguments leave these settings of the recipe without effect, which take their defaults: %s=%s "
                "(needs %s=%s)",
                choice.settings_key, shown(inherited.pop(choice.settings_key)), choice.key, before,
            )  # fmt: skip


def _without_unset(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not UNSET}


def _config(settings: Mapping[str, Any], problems: list[str]) -> Config:
    """Return the Config of some settings, defaults for the others and for those that go to `problems`."""
    defaults = flat(Config())
    merged = {**defaults, **settings}
    values: dict[str, Any] = {}
    for key, field in FIELDS.items():
        try:
            values[key] = coerce(resolve(merged[key], merged, above=(key,)), TYPES[key], field)
        except BadValue as error:
            problems.append(f"{key}={shown(merged[key])}: {error}")
            values[key] = defaults[key]
    for choice in CHOICES:
        given = values[choice.settings_key] if choice.settings_key in settings else {}
        values[choice.settings_key] = choice.completed(values[choice.key], given, problems)
    # sections inside others come after them, so that going backwards each finds those in it
    for section in reversed(SECTIONS):
        values[section] = SECTIONS[section](**_entries(values, f"{section}."))
    return Config(**_entries(values, ""))


def _entries(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the settings and sections right below a prefix out of `values`, by their last name."""
    keys = [key for key in values if key.startswith(prefix) and "." not in key.removeprefix(prefix)]
    return {key.removeprefix(prefix): values.pop(key) for key in keys}


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
