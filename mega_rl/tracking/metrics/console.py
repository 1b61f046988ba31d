"""One line for each step on the terminal, and the first sampled responses."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mega_rl.tracking.metrics.records import held_out_reward
from mega_rl.tracking.progress.terminal import TIME_WIDTH, standard_error
from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

# Metric, format and rank of a column. A narrow terminal leaves out the columns of the highest ranks first.
_COLUMNS = (
    ("reward/mean", "reward {:.4f}", 0),
    ("console/held_out_reward", "val {:.4f}", 0),
    ("kl/ref", "kl {:.4f}", 3),
    ("rollout/response_tokens_mean", "length {:.0f}", 4),
    ("console/truncated", "truncated {:.0%}", 5),
    ("actor/entropy", "entropy {:.3f}", 8),
    ("actor/lr", "lr {:.1e}", 9),
    ("actor/grad_norm", "grad {:.3f}", 7),
    ("console/tokens_per_s", "{:.0f} tok/s", 2),
    ("console/step_s", "{:.2f} s", 1),
    ("console/beside_s", "+ {:.2f} s val, save", 6),
)
# Validation and saving come at intervals and would make the pace of steps look uneven.
_SEPARATE = ("time/validate_s", "time/checkpoint_s")
LEAST_SEPARATE_S = 0.05  # shorter times get no column
MAX_SAMPLE_CHARACTERS = 400  # a longer prompt or response loses its middle


def step_line(step: int, metrics: Metrics, *, parts: Sequence[str] = (), width: int | None = None) -> str:
    """Return "step 12 | reward 0.5312 | ... | 1240 tok/s | 3.20 s".

    A metric that the step lacks has no column. Time and tokens per second exclude validation and saving, which have
    their own column. parts: names of the reward's parts, shown behind the reward. width: of the terminal, which may
    leave out columns; None keeps all.
    """
    numbers = metrics | _derived(metrics)
    of_parts = [(f"reward/{name}", f"{name} {{:.3f}}", 2) for name in parts]
    columns_of = (_COLUMNS[0], *of_parts, *_COLUMNS[1:])
    columns = [(rank, form.format(numbers[name])) for name, form, rank in columns_of if name in numbers]
    while True:
        line = " | ".join([f"step {step}", *(text for _, text in columns)])
        if width is None or not columns or len(line) <= width:
            return line
        columns.remove(max(columns))


def _derived(metrics: Metrics) -> Metrics:
    """Return the numbers that only the line has."""
    derived: Metrics = {}
    if (reward := held_out_reward(metrics)) is not None:
        derived["console/held_out_reward"] = metrics[reward]
    if "rollout/finished_fraction" in metrics:
        derived["console/truncated"] = 1.0 - metrics["rollout/finished_fraction"]
    if metrics.get("time/step_s"):
        separate = sum(metrics.get(name, 0.0) for name in _SEPARATE)
        derived["console/step_s"] = step_s = max(metrics["time/step_s"] - separate, 0.0)
        if separate >= LEAST_SEPARATE_S:
            derived["console/beside_s"] = separate
        if step_s and "rollout/response_tokens" in metrics:
            derived["console/tokens_per_s"] = metrics["rollout/response_tokens"] / step_s
    return derived


def sample_lines(row: Mapping[str, Any]) -> list[str]:
    """Return a dumped sample as lines: rewards and advantage, the prompt, the response."""
    numbers = [("reward", row.get("reward")), *((name, row[key]) for key in row if (name := _part(key)))]
    numbers.append(("advantage", row.get("advantage_mean")))
    shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers if value is not None)
    end = "" if row["finished"] else ", cut off"
    head = f"step {row['step']}, prompt {row['prompt_index']}, sample {row['sample_index']}"
    return [
        f"{head}: {shown}; {row['response_tokens']} tokens{end}",
        f"    prompt    {_one_line(row['rendered_prompt'])}",
        f"    response  {_one_line(row['response'])}",
    ]


def _one_line(text: str) -> str:
    """Return a text as JSON escapes it, its middle left out if it is long."""
    line = json.dumps(text, ensure_ascii=False)
    half = MAX_SAMPLE_CHARACTERS // 2
    return line if len(line) <= MAX_SAMPLE_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


def _part(key: str) -> str:
    """Return the reward's part that a key of a dumped row holds, else ""."""
    return key.removeprefix("reward_") if key.startswith("reward_") else ""


class ConsoleSink:
    """Sink that logs `step_line`, and samples of the first step that is dumped."""

    def __init__(self, *, samples: int = 0) -> None:
        """samples: number to show."""
        self._console, self._samples = standard_error(), samples
        self._parts: list[str] = []

    def log(self, step: int, metrics: Metrics) -> None:
        width = self._console.width - TIME_WIDTH if self._console.is_terminal else None
        line = step_line(step, metrics, parts=self._parts, width=width)
        if " | " in line:  # there is a column
            logger.info("%s", line)

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        for row in rows:
            self._parts += [name for name in map(_part, row) if name and name not in self._parts]
        if not validation:
            for row in rows[: self._samples]:
                for line in sample_lines(row):
                    logger.info("%s", line)
            self._samples = 0

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: the console is not a file of this sink."""
