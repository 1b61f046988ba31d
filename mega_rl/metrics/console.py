"""What a person at the terminal sees: one line per step, and a progress bar below it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

# Metric, label and format of the line's columns, in order; a metric that a step has not got is left out.
_COLUMNS = (
    ("reward/mean", "reward", "{:.4f}"),
    ("val/reward_mean", "val", "{:.4f}"),
    ("actor/loss", "loss", "{:.4f}"),
    ("critic/loss", "critic", "{:.4f}"),
    ("kl/ref", "kl", "{:.4f}"),
    ("actor/grad_norm", "grad", "{:.3f}"),
    ("rollout/logprob_diff_max", "diff", "{:.1e}"),
    ("time/step_s", "time", "{:.2f}s"),
)


def step_line(step: int, metrics: Metrics) -> str:
    """ "step 12 | reward 0.5312 | loss -0.0021 | ... | time 3.20s | 1240 tok/s"."""
    columns = [f"{label} {form.format(metrics[name])}" for name, label, form in _COLUMNS if name in metrics]
    if metrics.get("time/step_s") and "rollout/response_tokens" in metrics:
        columns.append(f"{metrics['rollout/response_tokens'] / metrics['time/step_s']:.0f} tok/s")
    return " | ".join([f"step {step}", *columns])


class GenerationBar:
    """How far a generation is, as a second bar below the run's, while it lasts; nothing away from a terminal.

    `show` may come from any thread, before there is a bar and after it.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def attach(self, progress: Progress | None) -> None:
        """Show in `progress` from now on; None: nowhere."""
        self._progress, self._task = progress, None

    def show(self, done: int, total: int, tokens_per_second: float) -> None:
        """done, total: samples of this rank."""
        progress = self._progress
        if progress is None:
            return
        if self._task is None:
            self._task = progress.add_task("", total=total)
        description = f"samples, {tokens_per_second:.0f} tok/s"
        progress.update(self._task, total=total, completed=done, description=description, visible=done < total)


class ConsoleSink:
    """Logs `step_line`; on a terminal, with a progress bar that stays below the log."""

    def __init__(
        self,
        *,
        progress_bar: bool = False,
        total_steps: int | None = None,
        console: Console | None = None,
        generation: GenerationBar | None = None,
    ) -> None:
        """total_steps: length of the bar; without it the bar only counts. console: standard error unless given.
        generation: shows itself below the bar.
        """
        self._generation = generation or GenerationBar()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._moved_handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        console = console or Console(stderr=True)
        if progress_bar and console.is_terminal:
            self._start_bar(console, total_steps)

    def _start_bar(self, console: Console, total_steps: int | None) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=total_steps)
        self._generation.attach(self._progress)
        before = sys.stderr
        self._progress.start()
        # The bar puts its own stream in place of standard error, which keeps it below what is written; handlers that
        # took hold of the old one would write through the bar.
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler and handler.stream is before:
                handler.setStream(sys.stderr)
                self._moved_handlers.append((handler, before))

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the line of a step and move the bar."""
        logger.info("%s", step_line(step, metrics))
        if self._progress is not None and self._task is not None:
            reward = metrics.get("reward/mean")
            description = "" if reward is None else f"reward {reward:.3f}"
            self._progress.update(self._task, completed=step, description=description)

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: rollouts are too long for a line."""

    def close(self) -> None:
        """Take the bar away."""
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []
        self._generation.attach(None)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
