"""Real runs that a lockstep follows, on ranks of the tests, as they are or with a fault in the real trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch


def record_plan(rank: int, path: str, fault: str = "") -> None:
    """Record the runs of a plan as `mega_rl.verify.rank` does, with a fault of `faults()`."""
    from mega_rl.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.tasks import run_task

    with faults()[fault] if fault else nullcontext():
        run_task(Path(path), accelerator)


def faults() -> dict[str, Any]:
    """Things that the real trainer could get wrong, by name."""
    from mega_rl.trainer import experience
    from mega_rl.workers.models import LearningWorker

    built = experience.build_experience
    update = LearningWorker.update

    def early(*args: Any, **kwargs: Any) -> Any:
        batch = built(*args, **kwargs)
        batch.advantages = batch.advantages.roll(-1, 1) * batch.loss_mask
        return batch

    def late(self: Any, minibatch: Any, *, step: int, **more: Any) -> Any:
        return update(self, minibatch, step=step + 1, **more)

    @contextmanager
    def early_everywhere() -> Iterator[None]:
        with patch("mega_rl.trainer.loop.build_experience", early):
            yield

    return {
        "advantages one token early": early_everywhere(),
        "rate of the next step": patch.object(LearningWorker, "update", late),
    }
