"""Runs that record their steps, and replays of these, on ranks of the tests, as they are or with a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from mega_rl.verify.replay import ReplayPlan


def some_left_out(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reward without one for some responses."""

    def masked(prompt: str, response: str, answer: str) -> Any:
        return None if len(response) % 3 == 1 else reward(prompt, response, answer)

    return masked


def record_runs(rank: int, runs: Sequence[tuple[dict[str, Any], bool]]) -> None:
    """Train runs one after the other, with log-probs of another engine, as a lockstep has them.

    runs: settings of each, and whether its reward leaves some responses out.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config.keys import with_settings
    from mega_rl.config.schema import Config
    from mega_rl.trainer.assemble import running
    from mega_rl.verify.rl.inputs import reward_of
    from mega_rl.verify.rl.record import shifted

    for settings, masks in runs:
        config = with_settings(Config(), settings)
        reward = reward_of(config)
        assert reward is not None or not masks
        rewards = [some_left_out(reward) if masks and reward else reward]
        with running([config], accelerator, rewards=rewards) as ((trainer,), _):
            batches: Any = trainer.batches
            batches.watch = partial(shifted, batches.watch)
            trainer.fit()


def replay_plans(rank: int, plans: Sequence[ReplayPlan], fault: str = "") -> None:
    """Replay plans as `mega_rl.verify.launcher` does, with a fault of `faults()`."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.replay_step import replay

    for plan in plans:
        with faults()[fault] if fault else nullcontext():
            replay(plan, accelerator)


def faults() -> dict[str, Any]:
    """Things that a replay's layout could get wrong, by name."""
    from mega_rl.engines.models import attention
    from mega_rl.trainer import policy_gradient
    from mega_rl.workers.models import LearningWorker

    evaluate, built, attend = LearningWorker.evaluate, policy_gradient.build_experience, attention.attend_packed

    def early_values(self: Any, batch: Any) -> Any:
        outputs = evaluate(self, batch)
        if outputs.values is None:
            return outputs
        return replace(outputs, values=outputs.values.roll(-1, 1) * batch.loss_mask)

    def early_advantages(*args: Any, **kwargs: Any) -> Any:
        batch = built(*args, **kwargs)
        batch.advantages = batch.advantages.roll(-1, 1) * batch.loss_mask
        return batch

    def flat_attention(*args: Any, scale: float, **kwargs: Any) -> Any:
        return attend(*args, scale=scale / 2, **kwargs)

    return {
        "values one token early": patch.object(LearningWorker, "evaluate", early_values),
        "advantages one token early": patch.object(policy_gradient, "build_experience", early_advantages),
        "attention of half the scale": patch.object(attention, "attend_packed", flat_attention),
    }
