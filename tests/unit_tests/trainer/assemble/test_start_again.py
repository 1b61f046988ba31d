"""What a second run in the same folder does, and says: with the same settings, from step 0, beyond the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.checkpoint import folders
from tests.helpers.distributed import run_ranks
from tests.unit_tests.test_bad_inputs import SETTINGS, write_good_inputs
from tests.unit_tests.trainer.assemble.start_cases import run_all

RUNS = {
    "first": [],
    "again": ["checkpoint.hf_final=true"],
    "shorter": ["trainer.steps=1"],
    "other settings": ["trainer.steps=2", "optim.lr=0.5", "metrics.rollout_samples=3", "model.path=./linked"],
    "other data": ["data.train_files=[other.jsonl]"],
    "never": ["checkpoint.resume=never", "trainer.steps=1", "checkpoint.save_interval=1"],
    "no saves": ["checkpoint.save_final=false", "trainer.run_dir=lost", "rollout.top_k=3"],
    "epochs": ["trainer.steps=100", "trainer.epochs=0.1"],
    "another's": ["checkpoint.resume=run/previous/001", "trainer.steps=3", "checkpoint.save_interval=1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_good_inputs(folder)
    (folder / "linked").symlink_to(folder / "m")
    (folder / "other.jsonl").write_text((folder / "d.jsonl").read_text() * 2)
    return folder


@pytest.fixture(scope="module")
def logs(folder: Path) -> dict[str, list[str]]:
    """What each run said, one after the other in one folder."""
    said = run_ranks(1, run_all, str(folder), [[*SETTINGS, *changes] for changes in RUNS.values()], timeout_s=120)[0]
    return dict(zip(RUNS, said, strict=True))


def steps(run: Path) -> list[int]:
    return [folders.step_of(folder) for folder in folders.complete(run / "checkpoints")]


def recorded(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_step_0_keeps_the_checkpoints_that_are_there(folder: Path, logs: dict[str, list[str]]) -> None:
    [line] = [line for line in logs["never"] if "earlier run" in line]
    assert line == (
        "WARNING run held files of an earlier run (step_000002, config.yaml, hf, metrics.jsonl, rollouts): "
        "moved to run/previous/001"
    )
    first, second = (folder / "run" / "previous" / name for name in ("001", "002"))
    assert (steps(first), recorded(first)) == ([2], [1, 2])
    assert (steps(second), recorded(second)) == ([1], [1])
    assert not any("earlier run" in line for line in logs["first"])


def test_a_run_from_another_runs_checkpoint_keeps_them_too(folder: Path, logs: dict[str, list[str]]) -> None:
    assert any("(step_000001, config.yaml" in line for line in logs["another's"])
    assert any("resumed after step 2" in line for line in logs["another's"])
    assert (steps(folder / "run"), recorded(folder / "run")) == ([3], [3])


def test_a_run_saves_at_its_end_unless_all_saving_is_off(folder: Path, logs: dict[str, list[str]]) -> None:
    nothing = "WARNING this run saves nothing: its weights are lost at its end; set checkpoint.save_final=true"
    assert not any("saves nothing" in line for line in logs["first"])
    assert nothing in logs["no saves"]
    assert steps(folder / "lost") == []


def test_a_run_warns_of_settings_that_seldom_belong_together(logs: dict[str, list[str]]) -> None:
    (line,) = [line for line in logs["no saves"] if "rollout.top_k=3" in line]
    assert line.startswith("WARNING rollout.top_k=3: training does not see what sampling cuts off. ")
    assert not any("training does not see" in line for line in logs["first"])


def test_a_finished_run_says_so_and_exports(folder: Path, logs: dict[str, list[str]]) -> None:
    """`checkpoint.hf_final` writes the weights although no step is left."""
    end = "is done: nothing is left to train; raise trainer.steps to train on"
    assert f"INFO step 2 of 2 {end}" in logs["again"]
    assert f"INFO step 2 of 1 {end}" in logs["shorter"]
    assert f"INFO step 1 of 1 {end.replace('steps', 'epochs')}" in logs["epochs"]
    assert not any(end in line for line in logs["first"] + logs["another's"])
    exported = folder / "run" / "previous" / "001" / "hf" / "step_000002"
    assert (exported / "model.safetensors").exists()


def test_a_resumed_run_names_the_settings_that_changed(logs: dict[str, list[str]]) -> None:
    """Another path to the same model is no other run."""
    assert "INFO resumed after step 2" in logs["other settings"]
    [warning] = [line for line in logs["other settings"] if "settings differ" in line]
    assert warning.startswith("WARNING settings differ from the checkpoint's: ")
    changed = ("optim.lr 1e-06 -> 0.5", "model.path m -> ./linked", "metrics.rollout_samples 16 -> 3")
    assert all(words in warning for words in changed)
    assert not any("settings differ" in line for line in logs["first"])


def test_a_checkpoint_of_other_data_names_the_files(logs: dict[str, list[str]]) -> None:
    message = logs["other data"][-1]
    assert message.startswith("ERROR checkpoint ")
    assert "(training prompts: d.jsonl is not among the files any more; other.jsonl is new)" in message
