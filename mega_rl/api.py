"""The Python interface: load a config, build a trainer, fit. A trainer imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_rl.config.choices import ADVANTAGE, CORRECTION, DATA, LOSS, ROLLOUT
from mega_rl.config.loader import Overrides, load
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.operations.diagnosis import investigate
from mega_rl.operations.schedulers.slurm import become_rank
from mega_rl.plan.preflight import check_run, check_together
from mega_rl.tracking.metrics.records import StepMetrics, read_metrics

if TYPE_CHECKING:
    from mega_rl.parallel.accelerator import Accelerator
    from mega_rl.rewards.builtin import RewardFunction
    from mega_rl.trainer import Trainer as Loop


def load_config(recipe: str | Path | None = None, overrides: str | Overrides = ()) -> Config:
    """Return the config of a recipe with overrides, every value checked for type and range.

    Arguments as of `mega_rl.config.loader.load`; one override may stand without a list. Raises UserError with one line
    for each mistake.
    """
    return load(recipe, [overrides] if isinstance(overrides, str) else overrides)


def prepared(config: Config) -> Accelerator:
    """Return the prepared accelerator of a run; import Megatron-Core only afterwards."""
    from mega_rl.parallel.accelerator import prepare, variables_of

    return prepare(
        config.trainer.device,
        variables=variables_of(config.engine, config.rollout, config.trainer),
        deepep=config.engine.megatron.moe.dispatcher == "deepep",
    )


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    steps: int  # done in all, those before a resume included
    exit_code: int  # 0, or 128 plus the number of the signal that ended the run early
    run_dir: Path  # everything that the run wrote

    def history(self) -> list[StepMetrics]:
        """Return every step's metrics from the run's metrics.jsonl, which rank 0 writes; else none."""
        path = self.run_dir / "metrics.jsonl"
        return list(read_metrics(path)) if path.exists() else []


class Trainer:
    """A run with all its parts, from process groups to servers; a context manager.

    Under torchrun, or as tasks of srun, every rank builds one; without a launcher the run has a single rank. A process
    has one at a time.
    """

    _open: Trainer | None = None

    def __init__(self, config: Config, *, reward: RewardFunction | None = None) -> None:
        """Check the config against files and machine, load the models and resume what config.checkpoint says.

        reward: scores responses in place of config.reward.function; config.reward.source must be "function".

        Raises:
            UserError: every mistake found, or a trainer that is still open in this process.
        """
        if Trainer._open is not None:
            raise UserError("another mega_rl.Trainer is open in this process; close it, or use it in a with block")
        become_rank()
        config = _checked(config, reward)
        accelerator = prepared(config)
        from mega_rl.trainer.assemble import running

        self.config = config
        self._fitted = False
        with ExitStack() as resources:  # takes down what was built if a later part fails
            parts = resources.enter_context(running([config], accelerator, investigate, rewards=[reward]))
            (self._loop,), self._stop = parts
            self._resources = resources.pop_all()
        Trainer._open = self

    @property
    def loop(self) -> Loop:
        """The trainer of this rank; its parts may be replaced before `fit`."""
        return self._loop

    def fit(self) -> Outcome:
        """Train to the last step, or until a signal ends the run after a step; collective.

        Raises:
            RunError: the run cannot go on; the same on all ranks.
            UserError: the trainer is closed or has been fitted.
        """
        if Trainer._open is not self or self._fitted:
            state = "is closed" if Trainer._open is not self else "has been fitted"
            raise UserError(f"this mega_rl.Trainer {state}; build another one")
        self._fitted = True
        steps = self._loop.fit()
        return Outcome(steps, self._stop.exit_code, Path(self.config.trainer.run_dir))

    def close(self) -> None:
        """End process groups, servers and open files; a second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        if Trainer._open is self:
            Trainer._open = None
            self._resources.__exit__(*error)


# Decorators' arguments are names; the classes are called with AdvantageInputs, PolicyTokens and SampledTokens, or made
# with RolloutContext and DataContext.
register_advantage, register_loss, register_correction = ADVANTAGE.register, LOSS.register, CORRECTION.register
register_rollout_source, register_data_source = ROLLOUT.register, DATA.register


def train(config: Config, *, reward: RewardFunction | None = None) -> Outcome:
    """Build a trainer, fit it and close it; see `Trainer`."""
    with Trainer(config, reward=reward) as trainer:
        return trainer.fit()


def train_together(configs: Sequence[Config], *, rewards: Sequence[RewardFunction | None] = ()) -> list[Outcome]:
    """Train runs with adapters on one base, a step of each in turn: docs/lora.md.

    rewards: one for each run, as of `Trainer`. Raises as `Trainer` does.
    """
    if Trainer._open is not None:
        raise UserError("another mega_rl.Trainer is open in this process; close it first")
    become_rank()
    check_together(configs)
    checked = [_checked(config, reward) for config, reward in zip_longest(configs, rewards)]
    accelerator = prepared(checked[0])
    from mega_rl.trainer.assemble import running
    from mega_rl.trainer.loop import fit_together

    with running(checked, accelerator, investigate, rewards=rewards) as (trainers, stop):
        done = fit_together(trainers)
    pairs = zip(checked, done, strict=True)
    return [Outcome(steps, stop.exit_code, Path(config.trainer.run_dir)) for config, steps in pairs]


def _checked(config: Config, reward: RewardFunction | None) -> Config:
    """Return the config of a run that can start, with its function's name for the run's own records."""
    if reward is None:
        return check_run(config)
    if config.reward.source.name != "function":
        raise UserError(
            f"reward: a function is given, but reward.source={config.reward.source}; set reward.source=function"
        )
    name = f"{getattr(reward, '__module__', '')}.{getattr(reward, '__qualname__', type(reward).__qualname__)}"
    named = dataclasses.replace(config.reward, function=f"python:{name}")
    return check_run(dataclasses.replace(config, reward=named), has_reward=True)
