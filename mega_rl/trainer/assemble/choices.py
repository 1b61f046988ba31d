"""Classes and functions that a recipe chooses: built-in, registered, or in a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mega_rl.config.plugins.choices import Choice, Registered, chosen, settings_of
from mega_rl.config.schema import Config
from mega_rl.config.values import shown
from mega_rl.errors import UserError
from mega_rl.workers.user_files import load_from_file


def build_choice(
    config: Config, choice: Choice, builtin: Mapping[str, Callable[..., Any]], traits: Iterable[str] = ()
) -> Any:
    """Return the chosen part of an algorithm with its settings.

    builtin: makes the built-in ones. traits: class variables that the run reads before the class runs. Raises UserError
    for a class that refuses its settings, is not called with one argument, or has traits that its text lacks.
    """
    name, settings = chosen(config, choice), settings_of(config, choice)
    if name in builtin:
        return builtin[name](**settings)
    made = _load(name, choice)
    if isinstance(made, type):
        try:
            made = made(**settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{choice.settings_key}={shown(settings)}: {name} refuses it: {error}") from error
    try:
        inspect.signature(made).bind(None)
    except TypeError as error:
        raise UserError(f"{choice.key}={name!r}: it is called with one {choice.argument}, but {error}") from error
    _check_traits(config, choice, made, traits)
    return made


def source_maker(config: Config, choice: Choice) -> tuple[object, Callable[[object], object]]:
    """Return the chosen class or function, and a function that makes the source from its context.

    Raises UserError for a file that fails to import, a class that does not take the context and these settings, or has
    traits that its text lacks.
    """
    name, settings = chosen(config, choice), settings_of(config, choice)
    made: object = _load(name, choice)
    setting = f"{choice.key}={name!r}"
    if not callable(made):
        raise UserError(f"{setting}: is {type(made).__name__}; it must be a class or a function")
    try:
        inspect.signature(made).bind(None, **settings)
    except TypeError as error:
        what = f"the settings {shown(settings)}" if settings else "no settings"
        raise UserError(f"{setting}: it is made with one {choice.argument} and {what}, but {error}") from error
    _check_traits(config, choice, made, choice.traits)
    return made, lambda context: made(context, **settings)


def _load(name: str, choice: Choice) -> Registered:
    return choice.registered.get(name) or load_from_file(name, key=choice.key, kind="class")


def _check_traits(config: Config, choice: Choice, made: object, traits: Iterable[str]) -> None:
    """Raise UserError where class variables differ from those that the text of the class says."""
    for trait in traits:
        value = bool(getattr(made, trait, False))
        if value != choice.needs(config, trait):
            raise UserError(
                f"{choice.key}={chosen(config, choice)!r}: its {trait} is not what the text of its class says; write "
                f"{trait} = {value} into the body of the class, where it is read before anything runs"
            )
