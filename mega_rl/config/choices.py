"""Algorithms and sources that a recipe chooses by name: their settings and needs of a run."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mega_rl.config.keys import FIELDS, TAGGED, value_of
from mega_rl.config.schema import Config
from mega_rl.config.setting import Kind, OwnKind
from mega_rl.config.user_files import load_from_file
from mega_rl.config.values import settings_of, shown
from mega_rl.errors import UserError

# a class whose fields are settings, or a function
Registered = type | Callable[..., object]
Own = TypeVar("Own", bound=Registered)


@dataclass(frozen=True)
class Choice:
    """A part of a run that a recipe chooses: built-in by name, or a user's class."""

    key: str  # "algorithm.advantage"
    argument: str = ""  # type that a user's class is called with, or made with; "": built-in kinds only
    is_source: bool = False  # made with its argument and its settings; others are called with it
    registered: dict[str, Registered] = field(default_factory=dict)  # a Python program's

    @property
    def builtin(self) -> Mapping[str, type[Kind]]:
        """Return the built-in kinds by name."""
        kinds: Mapping[str, type[Kind]] = FIELDS[self.key].metadata["kinds"]
        return kinds

    def made(self, entries: Mapping[str, object], problems: list[str]) -> Kind:
        """Return the chosen kind with defaults for what a recipe leaves out; mistakes go to `problems`.

        The settings of a user's class are as given: `own` checks their names.
        """
        given = dict(entries)
        name = str(given.pop("name", TAGGED[self.key].name))
        kind = self.builtin.get(name)
        if kind is None:
            if name not in self.registered and not (self.argument and ".py" in name):
                problems.append(f"{self.key}={shown(name)}: {self._legal(name)}")
            return OwnKind(name, given)
        return kind(**settings_of(kind, given, self.key, problems, lambda setting: self._unknown(kind, setting)))

    def register(self, name: str) -> Callable[[Own], Own]:
        """Return a decorator that lets recipes name a class or function. Raises UserError: taken."""
        if not name.isidentifier() or name in self.builtin:
            reason = "is a built-in one" if name in self.builtin else "is not a name: letters, digits and _"
            raise UserError(f"{self.key}: {shown(name)} {reason}; take another name")

        def decorate(own: Own) -> Own:
            self.registered[name] = own
            return own

        return decorate

    def needs(self, config: Config, need: str) -> bool:
        """Return the chosen class's variable `need`; False without one or if its file fails to import."""
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
        name, given = chosen(config, self), value_of(config, self.key).settings
        area: Registered = self.registered.get(name) or load_from_file(name, key=self.key, kind="class")
        with_argument = self.is_source or not isinstance(area, type)
        try:
            inspect.signature(area).bind(*([None] if with_argument else []), **given)
        except (TypeError, ValueError) as error:
            with_what = f"one {self.argument} and " * with_argument + f"the settings {shown(given)}"
            raise UserError(f"{self.key}={name!r}: it is made or called with {with_what}, but {error}") from error
        return area

    def own_problems(self, config: Config) -> Iterator[str]:
        """Yield why the user's class or function cannot be used; its file runs."""
        if chosen(config, self) not in self.builtin:
            try:
                self.own(config)
            except UserError as error:
                yield str(error)

    def build(self, config: Config) -> Any:
        """Return the chosen part of an algorithm with its settings.

        Raises UserError as `own` does, and for a class that refuses its values or is not called with one argument.
        """
        name, kind = chosen(config, self), value_of(config, self.key)
        if name in self.builtin:
            return kind if kind.name == name else self.builtin[name]()  # algorithm.correction=auto
        made: Any = self.own(config)
        try:
            made = made(**kind.settings) if isinstance(made, type) else made
            inspect.signature(made).bind(None)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"{self.key}={name!r}: it refuses its settings {shown(kind.settings)} or a call with one "
                f"{self.argument}: {error}"
            ) from error
        return made

    def maker(self, config: Config) -> Callable[[object], object] | None:
        """Return the function that makes a user's source from its context; None for a built-in one."""
        if chosen(config, self) in self.builtin:
            return None
        return partial(self.own(config), **value_of(config, self.key).settings)

    def with_need(self, need: str) -> str:
        """Return the built-in choices that have a need, as one writes them: "algorithm.advantage=gae"."""
        return f"{self.key}=" + " or ".join(name for name, area in self.builtin.items() if getattr(area, need))

    def _unknown(self, kind: type[Kind], setting: str) -> str:
        fields = list(getattr(kind, "__dataclass_fields__", ()))
        near = difflib.get_close_matches(setting, fields, n=1)
        others = [own.name for own in self.builtin.values() if setting in getattr(own, "__dataclass_fields__", ())]
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields) or 'none'}"
        hint = f"it belongs to {self.key}={' or '.join(others)}" if others else hint
        return f"{self.key}.{setting} has no effect: {self.key}={kind.name} has no such setting; {hint}"

    def _legal(self, name: str) -> str:
        near = difflib.get_close_matches(name, [*self.builtin, *self.registered], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        own = " or path/to/file.py:class" * bool(self.argument)
        return f"legal: {', '.join([*self.builtin, *self.registered])}{own}{hint}"


ADVANTAGE = Choice("algorithm.advantage", "AdvantageInputs")
LOSS = Choice("algorithm.loss", "PolicyTokens")
CORRECTION = Choice("algorithm.correction", "SampledTokens")
ALGORITHM_CHOICES = (ADVANTAGE, LOSS, CORRECTION)
ROLLOUT = Choice("rollout.source", "RolloutContext", is_source=True)
DATA = Choice("data.source", "DataContext", is_source=True)
OWN_CHOICES = (*ALGORITHM_CHOICES, ROLLOUT, DATA)  # a user's class may take their place
CHOICES = {choice.key: choice for choice in OWN_CHOICES}
CHOICES |= {key: Choice(key) for key in TAGGED if key not in CHOICES}


def chosen(config: Config, choice: Choice) -> str:
    """Return the name that a recipe chooses; for algorithm.correction=auto the name of what it takes."""
    name: str = value_of(config, choice.key).name
    if (choice.key, name) != ("algorithm.correction", "auto"):
        return name
    algorithm, other_engine = config.algorithm, config.rollout.backend == "sglang"
    differs = config.trainer.async_steps or (other_engine and "bf16" in (config.model.dtype, config.rollout.dtype))
    if not differs or algorithm.old_logprobs == "rollout" or algorithm.loss.name == "distillation":
        return "none"
    return "icepop" if _has_experts(Path(config.model.path)) else "tis"


def needs_critic(config: Config) -> bool:
    """Return whether the advantage estimator reads the values of a critic."""
    return ADVANTAGE.needs(config, "needs_critic")


def has_reference(config: Config) -> bool:
    """Return whether a run has a reference model: for a KL, an estimator or a teacher."""
    if config.model.adapter.rank and not config.model.ref_path:
        return False  # the policy without its adapters
    return reads_reference(config) or LOSS.needs(config, "needs_teacher")


def reads_reference(config: Config) -> bool:
    """Return whether a step evaluates the reference, for its log-probs of the sampled tokens."""
    # The loss of the same name reads no advantages.
    of_tokens = ADVANTAGE.needs(config, "needs_reference") and config.algorithm.loss.name != "distillation"
    return config.algorithm.kl.name != "none" or of_tokens or bool(kind_of_run(config).reference)


def kind_of_run(config: Config) -> Any:
    """Return the kind of training, an `algorithms.preferences.TrainingKind`."""
    return config.algorithm.kind


def is_sampled(config: Config) -> bool:
    """Return whether a run learns from its own samples."""
    return bool(kind_of_run(config).form == "prompts")


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
