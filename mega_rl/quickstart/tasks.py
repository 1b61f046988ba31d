"""Tasks of `mega-rl quickstart`: what each writes, how its warm start runs, and the settings of its training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mega_rl.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """Length of a supervised warm start."""

    steps: int
    batch_size: int
    lr: float


@dataclass(frozen=True)
class QuickstartTask:
    """One task of the quickstart."""

    recipe: Path  # a packaged recipe
    run_dir: Path  # that the recipe names
    warm: Sizes
    settings: Callable[[Path], list[str]]  # run folder -> overrides that name data and rewards in it
    write: Callable[[Path, int], None]  # run folder, seed: data and a fresh model


def setting(key: str, value: str | int | list[str]) -> str:
    """Return `key=value` so that any text, say a path with a comma, is read back as it is."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _settings_of_sums(run_dir: Path) -> list[str]:
    return [
        setting("data.train_files", [str(run_dir / "data" / "train.jsonl")]),
        setting("data.val_files", [str(run_dir / "data" / "held_out.jsonl")]),
        setting("reward.function", f"{run_dir / 'data' / 'reward.py'}:points"),
    ]


def _write_sums(run_dir: Path, seed: int) -> None:
    from mega_rl.quickstart import task  # brings torch and transformers in

    task.write_dataset(run_dir / "data", task.make_task(seed))
    task.write_checkpoint(run_dir / "fresh_model", seed=seed)


def _settings_of_word_problems(run_dir: Path) -> list[str]:
    folder = run_dir / "data" / "word_problems"
    return [
        setting("data.train_files", [f"{folder}:main:train"]),
        setting("data.val_files", [f"{folder}:main:test"]),
    ]


def _settings_of_programs(run_dir: Path) -> list[str]:
    folder = run_dir / "data" / "programs"
    return [
        setting("data.train_files", [f"{folder}:default:train"]),
        setting("data.val_files", [f"{folder}:default:test"]),
    ]


def _write_problems(task: Literal["gsm8k", "code"], run_dir: Path, seed: int) -> None:
    from mega_rl.quickstart import code_model, gsm8k_model  # bring torch and transformers in

    model = gsm8k_model if task == "gsm8k" else code_model
    model.write_data(run_dir / "data", seed=seed)
    model.write_checkpoint(run_dir / "fresh_model", seed=seed)


TASKS: Mapping[str, QuickstartTask] = {
    "sums": QuickstartTask(
        Path("quickstart"), Path("runs/quickstart"), Sizes(400, 256, 3e-3), _settings_of_sums, _write_sums
    ),
    "gsm8k": QuickstartTask(
        Path("quickstart_gsm8k"),
        Path("runs/quickstart_gsm8k"),
        Sizes(250, 128, 3e-3),
        _settings_of_word_problems,
        partial(_write_problems, "gsm8k"),
    ),
    "code": QuickstartTask(
        Path("quickstart_code"),
        Path("runs/quickstart_code"),
        Sizes(250, 64, 3e-3),
        _settings_of_programs,
        partial(_write_problems, "code"),
    ),
}


def task_named(name: str) -> QuickstartTask:
    """Return a task. Raises UserError for a name that there is not."""
    if name not in TASKS:
        raise UserError(f"--task={name}: must be one of {', '.join(TASKS)}")
    return TASKS[name]
