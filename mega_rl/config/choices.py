"""Choices that a recipe makes by name, algorithms and sources: their settings, and what each needs of a run."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from mega_rl.config.keys import value_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, DataSettings, Settings
from mega_rl.config.user_files import load_from_file
from mega_rl.config.values import BadValue, coerce, shown
from mega_rl.errors import UserError

# a class whose fields are settings, or a function
Registered = type | Callable[..., object]


@dataclass(frozen=True)
class Choice:
    """A part of a run that a recipe chooses: a built-in one by name, or a class in a user's file."""

    key: str  # "algorithm.advantage"; its settings are in "algorithm.advantage_settings"
    builtin: Mapping[str, type[Settings]]  # name -> dataclass of its settings
    argument: str  # type that it is called with, or made with
    given: tuple[str, ...] = ()  # fields of its class that are no settings: the run gives them when it makes one
    registered: dict[str, Registered] = field(default_factory=dict)  # by a Python program

    @property
    def settings_key(self) -> str:
        """Return the key of the mapping that holds the chosen one's settings."""
        return f"{self.key}_settings"

    def completed(self, name: str, given: Mapping[str, object], problems: list[str]) -> dict[str, object]:
        """Return every setting of a choice by name, defaults for those not given; mistakes go to `problems`.

        The settings of a class in a file are as given: `own` checks their names.
        """
        area = self.builtin.get(name) or self.registered.get(name)
        if area is None:
            if ".py" not in name:
                problems.append(f"{self.key}={shown(name)}: {self._legal(name)}")
            return dict(given)
        entries = dataclasses.fields(area) if dataclasses.is_dataclass(area) else ()
        fields = {entry.name: entry for entry in entries if entry.init and entry.name not in self.given}
        problems += [self._unknown(name, setting, fields) for setting in given if setting not in fields]
        hints = get_type_hints(area) if fields else {}
        settings: dict[str, object] = {}
        for setting, entry in fields.items():
            value = given.get(setting, _default(entry))
            try:
                settings[setting] = coerce(value, hints[setting], entry) if entry.metadata else value
            except BadValue as error:
                problems.append(f"{self.settings_key}.{setting}={shown(value)}: {error}")
            if value is dataclasses.MISSING:
                problems.append(f"{self.key}={name} needs {self.settings_key}.{setting}")
        return settings

    def register(self, name: str, chosen_by_it: Registered) -> None:
        """Let a recipe choose this class or function by name. Raises UserError for a name that is taken or none."""
        if not name.isidentifier() or name in self.builtin:
            reason = "is a built-in one" if name in self.builtin else "is no name: letters, digits and _"
            raise UserError(f"{self.key}: {shown(name)} {reason}; take another name")
        self.registered[name] = chosen_by_it

    def needs(self, config: Config, need: str) -> bool:
        """Return a class variable of the chosen class; False if it has none, or if its file fails to import."""
        name = chosen(config, self)
        area = self.builtin.get(name) or self.registered.get(name)
        if area is None:
            with suppress(UserError):  # `own_problems` has it
                area = load_from_file(name, key=self.key, kind="class")
        return bool(getattr(area, need, False))

    def own(self, config: Config) -> Registered:
        """Return the user's class or function that a recipe chooses, from its file or as registered.

        Raises UserError for a file that fails to import, and for a class or function that refuses its settings.
        """
        name, given = chosen(config, self), settings_of(config, self)
        area: Registered = self.registered.get(name) or load_from_file(name, key=self.key, kind="class")
        setting, is_class = f"{self.key}={name!r}", isinstance(area, type)
        if not callable(area):
            raise UserError(f"{setting}: is {type(area).__name__}; it must be a class or a function")
        if given and not (is_class or self.given):
            raise UserError(
                f"{self.settings_key}={shown(given)}: {name} is a function, which has no settings; make it a dataclass "
                "with __call__, whose fields are settings"
            )
        argument = f"one {self.argument}" * bool(self.given or not is_class)
        settings = f"the settings {shown(given)}" if given else "no settings"
        try:
            inspect.signature(area).bind(*([None] if argument else []), **given)
        except (TypeError, ValueError) as error:
            with_what = " and ".join(filter(None, (argument, settings)))
            raise UserError(f"{setting}: it is made or called with {with_what}, but {error}") from error
        return area

    def own_problems(self, config: Config) -> Iterator[str]:
        """Yield why the user's class or function cannot be used; its file runs."""
        if chosen(config, self) not in self.builtin:
            try:
                self.own(config)
            except UserError as error:
                yield str(error)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield what is wrong with the settings of a built-in choice together."""
        name = chosen(config, self)
        if name in self.builtin:
            settings = self.builtin[name](**settings_of(config, self))
            yield from (f"{self.settings_key}.{line}" for line in settings.problems())

    def with_need(self, need: str) -> str:
        """Return the built-in choices that have a need, as one writes them: "algorithm.advantage=gae"."""
        return f"{self.key}=" + " or ".join(name for name, area in self.builtin.items() if getattr(area, need))

    def _unknown(self, name: str, setting: str, fields: Mapping[str, object]) -> str:
        near = difflib.get_close_matches(setting, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields) or 'none'}"
        return f"{self.settings_key}.{setting} has no effect: {self.key}={name} has no such setting; {hint}"

    def _legal(self, name: str) -> str:
        near = difflib.get_close_matches(name, [*self.builtin, *self.registered], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"legal: {', '.join([*self.builtin, *self.registered])} or path/to/file.py:class{hint}"


ADVANTAGE = Choice("algorithm.advantage", ADVANTAGES, "AdvantageInputs")
LOSS = Choice("algorithm.loss", LOSSES, "PolicyTokens")
CORRECTION = Choice("algorithm.correction", CORRECTIONS, "SampledTokens")
ALGORITHM_CHOICES = (ADVANTAGE, LOSS, CORRECTION)
ROLLOUT = Choice("rollout.source", {"single_turn": Settings}, "RolloutContext", given=("context",))
DATA = Choice("data.source", {"files": DataSettings}, "DataContext", given=("context",))
CHOICES = (*ALGORITHM_CHOICES, ROLLOUT, DATA)


def chosen(config: Config, choice: Choice) -> str:
    """Return the name that a recipe chooses; for algorithm.correction=auto the name of what it takes."""
    name: str = value_of(config, choice.key)
    if (choice.key, name) != ("algorithm.correction", "auto"):
        return name
    algorithm, other_engine = config.algorithm, config.rollout.backend == "sglang"
    differs = other_engine and ("bf16" in (config.model.dtype, config.rollout.dtype) or config.trainer.async_steps > 0)
    if not differs or algorithm.old_logprobs == "rollout" or algorithm.loss == "distillation":
        return "none"
    return "icepop" if _has_experts(Path(config.model.path)) else "tis"


def settings_of(config: Config, choice: Choice) -> dict[str, object]:
    """Return the settings of the chosen one as the config has them.

    `load` writes every setting of the chosen one. In a config of which only the name was changed stand the defaults of
    the default choice, which are not its own: none are returned.
    """
    settings: dict[str, object] = value_of(config, choice.settings_key)
    default = Config()
    is_default = chosen(config, choice) == chosen(default, choice)
    return {} if settings == value_of(default, choice.settings_key) and not is_default else settings


def needs_critic(config: Config) -> bool:
    """Return whether the advantage estimator reads the values of a critic."""
    return ADVANTAGE.needs(config, "needs_critic")


def has_reference(config: Config) -> bool:
    """Return whether a run has a reference: for a KL to it, an estimator that reads its log-probs, or a teacher."""
    return reads_reference(config) or LOSS.needs(config, "needs_teacher")


def reads_reference(config: Config) -> bool:
    """Return whether a step evaluates the reference, for its log-probs of the sampled tokens."""
    # The loss of the same name reads no advantages.
    of_tokens = ADVANTAGE.needs(config, "needs_reference") and config.algorithm.loss != "distillation"
    return config.algorithm.kl.placement != "none" or of_tokens


def corrects(config: Config) -> bool:
    """Return whether token losses are weighted for what sampled the tokens."""
    return chosen(config, CORRECTION) != "none"


def _has_experts(folder: Path) -> bool:
    """Return whether a checkpoint is a mixture of experts, by the names in its config.json."""
    try:
        return bool(
            re.search(r'"(num_(local_)?experts|n_routed_experts)"', (folder / "config.json").read_text("utf-8"))
        )
    except OSError:
        return False


def _default(field: dataclasses.Field[object]) -> object:
    """Return the default of a field, MISSING without."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
