"""The advantage estimator, policy loss and correction of a run: built-in ones, or a user's own from a file."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.corrections import CORRECTIONS, Correction
from mega_rl.algorithms.kl import KL_ESTIMATORS, KLController, RewardKL
from mega_rl.algorithms.losses.tokens import PolicyObjective
from mega_rl.algorithms.policy_losses import LOSSES
from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS, Choice, chosen, corrects
from mega_rl.config.keys import value_of
from mega_rl.config.schema import Config
from mega_rl.config.values import shown
from mega_rl.errors import UserError

log = logging.getLogger(__name__)


def build_estimator(config: Config) -> AdvantageEstimator:
    """Return the advantage estimator that the recipe chooses. Raises UserError: see `_build`."""
    estimator: AdvantageEstimator = _build(config, ADVANTAGE, ESTIMATORS)
    return estimator


def build_objective(config: Config) -> PolicyObjective:
    """Return the policy loss that the recipe chooses. Raises UserError: see `_build`."""
    objective: PolicyObjective = _build(config, LOSS, LOSSES)
    return objective


def build_correction(config: Config) -> Correction | None:
    """Return the correction that the recipe chooses, None for none. Raises UserError: see `_build`."""
    if config.algorithm.correction.name == "auto":
        log.info("algorithm.correction=auto takes %s", chosen(config, CORRECTION))
    return _build(config, CORRECTION, CORRECTIONS) if corrects(config) else None


def build_reward_kl(config: Config, controller: KLController) -> RewardKL | None:
    """Return the KL penalty in token rewards; None where the KL is a term of the loss, or there is none."""
    kl = config.algorithm.kl
    return RewardKL(controller, KL_ESTIMATORS[kl.estimator]) if kl.name == "reward" else None


def _build(config: Config, choice: Choice, registry: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the chosen one with its settings.

    Raises UserError for a user's class that refuses its settings, and for one that is not called with one argument.
    """
    name, settings = chosen(config, choice), value_of(config, choice.key).settings
    if name in registry:
        return registry[name](**settings)
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
