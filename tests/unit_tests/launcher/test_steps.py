"""What a launcher sees of a run's progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.checkpoint.format.manifest import commit_text
from mega_rl.launcher.health import NoRecords
from mega_rl.launcher.steps import RunProgress


class Records(NoRecords):
    def __init__(self, step: int | None = None) -> None:
        self.done = step

    def step(self) -> int | None:
        return self.done


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "COMMIT").write_text(commit_text(b"{}"))


def test_a_program_without_a_run_folder_makes_none() -> None:
    progress = RunProgress(None, NoRecords())
    assert (progress.step, progress.saved, progress.is_made) == (0, "", False)


def test_a_checkpoint_of_this_launch_is_progress_an_earlier_one_is_not(tmp_path: Path) -> None:
    save(tmp_path, 3)
    progress = RunProgress(tmp_path, NoRecords())
    assert (progress.step, progress.saved, progress.is_made) == (3, "", False)
    save(tmp_path, 4)
    assert (progress.step, progress.saved, progress.is_made) == (4, "step_000004", True)


@pytest.mark.parametrize(
    ("resume", "recorded", "made"),
    [
        ("auto", 3, False),
        ("auto", 4, True),
        ("never", 0, False),
        ("never", 1, True),
        ("elsewhere/step_000007", 7, False),
        ("elsewhere/step_000007", 8, True),
    ],
)
def test_recorded_steps_are_progress_from_where_the_run_began(
    tmp_path: Path, resume: str, recorded: int, made: bool
) -> None:
    save(tmp_path, 3)
    progress = RunProgress(tmp_path, Records(recorded), resume=resume)
    assert (progress.step, progress.is_made) == (recorded, made)
