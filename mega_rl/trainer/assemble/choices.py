"""Classes and functions that a recipe chooses: built-in, registered, or in a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.config.choices import Choice, chosen
from mega_rl.config.keys import value_of
from mega_rl.config.schema import Config
from mega_rl.config.values import shown
from mega_rl.errors import UserError


def build_choice(config: Config, choice: Choice, builtin: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the chosen part of an algorithm with its settings.

    builtin: makes the built-in ones. Raises UserError for a class that refuses its settings, or is not called with one
    argument.
    """
    name, settings = chosen(config, choice), value_of(config, choice.key).settings
    if name in builtin:
        return builtin[name](**settings)
    made: Any = choice.own(config)
    if isinstance(made, type):
        try:
            made = made(**settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{choice.key}={shown(settings)}: {name} refuses it: {error}") from error
        try:
            inspect.signature(made).bind(None)
        except TypeError as error:
            raise UserError(f"{choice.key}={name!r}: it is called with one {choice.argument}, but {error}") from error
    return made


def source_maker(config: Config, choice: Choice) -> Callable[[object], object] | None:
    """Return the function that makes a user's source from its context; None for a built-in source.

    Raises UserError as `Choice.own` does.
    """
    if chosen(config, choice) in choice.builtin:
        return None
    made, settings = choice.own(config), value_of(config, choice.key).settings
    return lambda context: made(context, **settings)
