"""What a launcher sees of a run's progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.checkpoint.format.manifest import commit_text
from mega_rl.checkpoint.memory import place
from mega_rl.launcher.health import NoRecords
from mega_rl.launcher.steps import RunProgress


class Records(NoRecords):
    def __init__(self, step: int | None = None) -> None:
        self.done = step

    def step(self) -> int | None:
        return self.done


def save(run_dir: Path, step: int) -> None:
    save_in(run_dir / "checkpoints", step)


def save_in_memory(run_dir: Path, step: int, *, history: str = "a" * 16) -> None:
    """Save as a run does whose hosts' memory is `run_dir / "shm"`."""
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    place.write_history(run_dir / "checkpoints", history)
    (run_dir / "shm").mkdir(exist_ok=True)
    folder = place.folder_of(run_dir / "shm", str(run_dir.resolve()), history)
    place.make(folder, str(run_dir.resolve()))
    save_in(folder, step)


def save_in(root: Path, step: int) -> None:
    folder = root / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "COMMIT").write_text(commit_text(b"{}"))


def test_a_program_without_a_run_folder_makes_none() -> None:
    progress = RunProgress(None, NoRecords())
    assert (progress.step, progress.is_saved, progress.is_made) == (0, False, False)
    assert progress.next_start == "the beginning"


def test_a_checkpoint_of_this_launch_is_progress_an_earlier_one_is_not(tmp_path: Path) -> None:
    save(tmp_path, 3)
    progress = RunProgress(tmp_path, NoRecords())
    assert (progress.step, progress.is_saved, progress.is_made) == (3, False, False)
    save(tmp_path, 4)
    assert (progress.step, progress.is_saved, progress.is_made) == (4, True, True)


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


@pytest.mark.parametrize(
    ("resume", "on_disk", "in_memory", "words"),
    [
        ("auto", None, None, "the beginning"),
        ("auto", 4, None, "the checkpoint of step 4 on disk"),
        ("auto", 4, 6, "the checkpoint of step 6 in memory"),
        ("auto", 6, 6, "the checkpoint of step 6 on disk"),
        ("never", None, 6, "the checkpoint of step 6 in memory"),
        ("never", None, None, "the beginning"),
        ("elsewhere/step_000007", None, None, "checkpoint.resume=elsewhere/step_000007"),
        ("elsewhere/step_000007", 8, None, "the checkpoint of step 8 on disk"),
    ],
)
def test_the_next_start_is_named_with_its_place(
    tmp_path: Path, resume: str, on_disk: int | None, in_memory: int | None, words: str
) -> None:
    progress = RunProgress(tmp_path, NoRecords(), resume=resume, shm=tmp_path / "shm")
    if on_disk is not None:
        save(tmp_path, on_disk)
    if in_memory is not None:
        save_in_memory(tmp_path, in_memory)
    assert progress.next_start == words
    assert progress.is_saved == (on_disk is not None or in_memory is not None)


def test_what_an_earlier_launch_has_left_in_memory_is_where_the_next_start_goes_on_but_no_progress(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3)
    save_in_memory(tmp_path, 7)
    progress = RunProgress(tmp_path, Records(7), shm=tmp_path / "shm")
    assert (progress.is_saved, progress.is_made) == (False, False)
    assert progress.next_start == "the checkpoint of step 7 in memory"
    never = RunProgress(tmp_path, NoRecords(), resume="never", shm=tmp_path / "shm")
    assert never.next_start == "the beginning"
    save_in_memory(tmp_path, 1, history="b" * 16)  # the run has begun another history
    assert never.is_saved


def test_memory_that_another_user_could_write_to_is_not_looked_into(tmp_path: Path) -> None:
    save_in_memory(tmp_path, 7)
    place.user_folder(tmp_path / "shm").chmod(0o777)
    assert RunProgress(tmp_path, NoRecords(), shm=tmp_path / "shm").next_start == "the beginning"
