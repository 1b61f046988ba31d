"""What counts as a checkpoint, what is kept, and what a resume refuses; with engines that are a text file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl.checkpoint.store import DistCheckpointStore, complete_checkpoints
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank


class TextEngine:
    """An engine whose state is a string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "state.txt").write_text(self.text)

    def load(self, directory: Path) -> None:
        self.text = (directory / "state.txt").read_text()


def store(root: Path, *, actor: str = "a", critic: str = "c", **changes: Any) -> DistCheckpointStore:
    settings: dict[str, Any] = {
        "root": root,
        "engines": {"actor": TextEngine(actor), "critic": TextEngine(critic)},
        "ranks": SingleRank(),
        "keep": 2,
        "resume": "auto",
        "identity": {"seed": 7, "data": "abc"},
    }
    return DistCheckpointStore(**(settings | changes))


def texts(found: DistCheckpointStore) -> list[str]:
    return [engine.text for engine in found.engines.values()]  # type: ignore[attr-defined]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def refusal(found: DistCheckpointStore) -> str:
    """The message of the UserError; no engine may have been touched."""
    before = texts(found)
    with pytest.raises(UserError) as caught:
        found.restore()
    assert texts(found) == before
    return str(caught.value)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = store(tmp_path, actor="actor of 3", critic="critic of 3").save(3, {"kl": {"value": 0.5}})
    assert folder == tmp_path / "step_000003"
    assert names(folder) == ["actor", "critic", "trainer.json"]
    found = store(tmp_path)
    record = found.restore()
    assert record is not None
    assert (record["step"], record["state"]) == (3, {"kl": {"value": 0.5}})
    assert texts(found) == ["actor of 3", "critic of 3"]


def test_a_new_folder_starts_afresh(tmp_path: Path) -> None:
    assert store(tmp_path / "none").restore() is None
    assert not (tmp_path / "none").exists()


def test_the_newest_is_taken_and_the_last_are_kept(tmp_path: Path) -> None:
    """By number: 100 comes after 20."""
    for step in (5, 20, 100):
        store(tmp_path, actor=f"of {step}").save(step, {})
    assert names(tmp_path) == ["step_000020", "step_000100"]
    found = store(tmp_path)
    assert found.restore()["step"] == 100  # type: ignore[index]
    assert texts(found) == ["of 100", "c"]


def test_keep_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        store(tmp_path, keep=1).save(step, {})
        assert names(tmp_path) == [f"step_{step:06d}"]


def test_never_and_a_path(tmp_path: Path) -> None:
    for step in (1, 2):
        store(tmp_path, actor=f"of {step}").save(step, {})
    assert store(tmp_path, resume="never").restore() is None
    found = store(tmp_path, resume=str(tmp_path / "step_000001"))
    assert found.restore()["step"] == 1  # type: ignore[index]
    assert texts(found) == ["of 1", "c"]


def test_what_is_not_complete_is_no_checkpoint(tmp_path: Path) -> None:
    """A torn save, a folder without its last file, a file, and names that only look alike."""
    good = store(tmp_path, actor="good").save(2, {})
    record = (good / "trainer.json").read_text()
    for name in (".step_000009.tmp", "step_000008x", "my_step_000007", "step_"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text(record)
    (tmp_path / "step_000006" / "actor").mkdir(parents=True)
    (tmp_path / "step_000005").write_text("a file")
    assert complete_checkpoints(tmp_path) == [good]
    found = store(tmp_path)
    assert found.restore()["step"] == 2  # type: ignore[index]
    assert texts(found) == ["good", "c"]


def test_a_save_that_fails_leaves_no_checkpoint_and_the_next_removes_its_remains(tmp_path: Path) -> None:
    class FullDisk(TextEngine):
        def save(self, directory: Path) -> None:
            super().save(directory)
            raise OSError("no space left")

    store(tmp_path).save(1, {})
    with pytest.raises(OSError, match="no space left"):
        store(tmp_path, engines={"actor": TextEngine("a"), "critic": FullDisk("c")}).save(2, {})
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step_000001"]
    store(tmp_path).save(3, {})
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_run_that_went_back_leaves_its_later_checkpoints_behind(tmp_path: Path) -> None:
    """Else a resume would take up the history that was left, and retention would remove what was just saved."""
    for step in (2, 4, 6):
        store(tmp_path, keep=9).save(step, {})
    back = store(tmp_path, resume=str(tmp_path / "step_000002"))
    back.restore()
    back.save(3, {})
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    for text in ("old", "new"):
        store(tmp_path, actor=text).save(2, {})
    found = store(tmp_path)
    found.restore()
    assert texts(found) == ["new", "c"]


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step_000001").mkdir()
    message = refusal(store(tmp_path, resume=str(tmp_path / "step_000001")))
    assert (
        message == f"checkpoint.resume={tmp_path}/step_000001: no complete checkpoint there (trainer.json is missing)"
    )


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    store(tmp_path).save(1, {})
    message = refusal(store(tmp_path, identity={"seed": 8, "data": "abc", "model": "m"}))
    assert "(seed: 7 -> 8, model: None -> 'm')" in message
    assert "set checkpoint.resume=never or another trainer.run_dir" in message
    assert "abc" not in message


def test_a_checkpoint_of_a_run_with_other_models(tmp_path: Path) -> None:
    """GRPO has no critic; PPO cannot go on from it."""
    store(tmp_path, engines={"actor": TextEngine("a")}).save(1, {})
    assert "step_000001 has no critic; it is of a run with other models" in refusal(store(tmp_path))


def without(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != key})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: json.dumps(json.loads(text) | {"step": "one"}),
        lambda text: json.dumps(json.loads(text) | {"identity": []}),
        *(without(key) for key in ("step", "identity", "state")),
    ],
)
def test_a_damaged_record(tmp_path: Path, damage: Callable[[str], str]) -> None:
    record = store(tmp_path).save(1, {}) / "trainer.json"
    record.write_text(damage(record.read_text()))
    message = refusal(store(tmp_path))
    assert f"checkpoint file {record} is damaged" in message
    assert "remove that folder or set checkpoint.resume=never" in message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    record = store(tmp_path).save(1, {}) / "trainer.json"
    record.write_bytes(b"\xff\xfe\x00")
    assert "is damaged" in refusal(store(tmp_path))


def test_only_rank_0_writes_the_record(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Second(SingleRank):
        rank: int = 1
        size: int = 2

    (tmp_path / ".step_000001.tmp").mkdir(parents=True)
    store(tmp_path, ranks=Second()).save(1, {})
    assert names(tmp_path) == [".step_000001.tmp"]
    assert names(tmp_path / ".step_000001.tmp") == ["actor", "critic"]
