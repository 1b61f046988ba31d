"""Real runs that a lockstep follows, on ranks of the tests, as they are or with a fault in the real trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch


def record_runs(rank: int, runs: Sequence[tuple[dict[str, Any], Path]], fault: str = "") -> None:
    """Record runs (settings, folder) as `mega_rl.verify.launcher` does, with a fault of `faults()`."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config.keys import with_settings
    from mega_rl.config.schema import Config
    from mega_rl.verify.rl.record import record

    with faults()[fault] if fault else nullcontext():
        for settings, folder in runs:
            record(with_settings(Config(), settings), folder, accelerator)


def faults() -> dict[str, Any]:
    """Things that the real trainer could get wrong, by name."""
    from mega_rl.parallel.divergence import TeacherHead
    from mega_rl.rewards.role import RewardComponents, TextScorer
    from mega_rl.trainer import policy_gradient, rows, selection
    from mega_rl.workers.models import LearningWorker
    from mega_rl.workers.stream import ServerFlow

    built = policy_gradient.build_experience
    first: Any = selection.StepVersions.first
    update, choose, teacher_logits = LearningWorker.update, selection.choose, TeacherHead.logits
    taken: Any = ServerFlow._taken
    score, settings = TextScorer.score, RewardComponents.__init__

    def early(*args: Any, **kwargs: Any) -> Any:
        batch = built(*args, **kwargs)
        batch.advantages = batch.advantages.roll(-1, 1) * batch.loss_mask
        return batch

    def late(self: Any, minibatch: Any, *, step: int, **more: Any) -> Any:
        return update(self, minibatch, step=step + 1, **more)

    def cold(self: Any, some: slice, columns: Any) -> Any:
        return teacher_logits(self, some, columns).div_(columns.scale)

    def rolled(self: Any, rollout: Any, prompts: Any) -> Any:
        rewards = score(self, rollout, prompts)
        return rewards.with_columns(rewards.columns().roll(1, 0))

    def unweighted(self: Any, weights: Any, **more: Any) -> None:
        settings(self, None, **more)

    def last(tickets: Any, oldest: Any, **more: Any) -> Any:
        chosen = choose(-tickets, oldest, **more)
        return None if chosen is None else chosen.flip(0)

    def newest_first(tickets: Any, oldest: Any, *, count: int, **more: Any) -> Any:
        if choose(tickets, oldest, count=count, **more) is None:
            return None
        chosen = oldest.argsort(descending=True, stable=True)[:count]
        return chosen[tickets[chosen].argsort()]

    def one_later(self: Any, later: int = 0) -> int:
        return int(first(self, min(later, self.limit) + 1))

    def newest(self: Any, complete: Any) -> Any:
        arrived = taken(self, complete)
        versions = arrived.rollout.token_versions
        arrived.rollout.token_versions = versions.amax(1, keepdim=True) * arrived.rollout.loss_mask
        return arrived

    return {
        "newest version on all tokens": patch.object(ServerFlow, "_taken", newest),
        "newest groups first": patch.object(selection, "choose", newest_first),
        "groups dropped a step early": patch.object(selection.StepVersions, "first", one_later),
        "rewards of the row before": patch.object(TextScorer, "score", rolled),
        "advantages one token early": patch.object(policy_gradient, "build_experience", early),
        "rate of the next step": patch.object(LearningWorker, "update", late),
        "groups of equal rewards kept ahead": patch.object(rows, "has_spread", _all_spread),
        "groups of equal rewards kept": patch.object(rows, "has_spread", _all_spread),
        "last groups instead of the first": patch.object(selection, "choose", last),
        "weights of parts left out": patch.object(RewardComponents, "__init__", unweighted),
        "divergence of one temperature": patch.object(TeacherHead, "logits", cold),
    }


def _all_spread(prompt_index: Any, rewards: Any, *, count: int) -> Any:
    """Return that the rewards of every prompt differ."""
    return rewards.new_ones(count).bool()
