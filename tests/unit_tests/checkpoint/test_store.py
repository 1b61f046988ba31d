"""What counts as a checkpoint, what is kept, what a resume refuses, and what a failed save leaves."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl import disk
from mega_rl.checkpoint.run_state import RunState
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.boxes import Box, EngineState, Piece
from tests.helpers.distributed import run_ranks
from tests.unit_tests.checkpoint.stores import Kept, SmallEngine, names, settings, steps, store, values
from tests.unit_tests.checkpoint.watching import instrumented


def refusal(actual: RunCheckpoints) -> str:
    """The message of the UserError; no engine may have been touched."""
    before = values(actual)
    with pytest.raises(UserError) as caught:
        actual.restore()
    assert values(actual) == before
    return str(caught.value)


def test_saved_state_is_restored(tmp_path: Path) -> None:
    saved = store(tmp_path, actor=3, critic=4)
    saved.save(3, {"kl": {"value": 0.5}}, metrics={"val/reward_mean": 0.25, "bad": float("nan")})
    folder = tmp_path / "step_000003"
    assert names(folder) == ["COMMIT", "manifest.json", "shard_00000.safetensors"]
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    actual = store(tmp_path)
    manifest = actual.restore()
    assert manifest is not None
    assert (manifest.step, manifest.state, manifest.metrics) == (3, {"kl": {"value": 0.5}}, {"val/reward_mean": 0.25})
    assert (manifest.world_size, manifest.layout, manifest.config) == (1, "tp1-dp1", {"trainer": {"steps": 3}})
    assert set(manifest.versions) == {"mega_rl", "torch", "megatron-core", "python"}
    assert values(actual) == [3, 4]
    assert actual.poll() == {}
    metrics = saved.poll()
    assert set(metrics) == {"checkpoint/seconds", "checkpoint/bytes", "checkpoint/stall_s"}
    assert metrics["checkpoint/bytes"] == 2 * (12 * 4 + 5 * 2 + 4)


def test_newest_is_restored_and_last_are_kept(tmp_path: Path) -> None:
    """By number: 100 comes after 20."""
    for step in (5, 20, 100):
        store(tmp_path, actor=step).save(step, {})
    assert names(tmp_path) == ["step_000020", "step_000100"]
    actual = store(tmp_path)
    assert actual.restore().step == 100  # type: ignore[union-attr]
    assert values(actual) == [100, 0]


def test_never_and_paths(tmp_path: Path) -> None:
    """A checkpoint's folder, the run's, and the one of its checkpoints."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        store(root, actor=step).save(step, {})
    assert store(root, resume="never").restore() is None
    for resume, step in ((root / "step_000001", 1), (root, 2), (tmp_path, 2)):
        actual = store(tmp_path / "elsewhere", resume=str(resume))
        assert actual.restore().step == step  # type: ignore[union-attr]
        assert values(actual) == [step, 0]


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    store(tmp_path).save(1, {})
    message = refusal(store(tmp_path, identity={"seed": 8, "data": "abc", "engine": "fsdp"}))
    assert "(seed: 7 -> 8, engine: None -> 'fsdp')" in message
    assert "set checkpoint.resume=never to start anew (old files are kept, in previous/)" in message
    assert "abc" not in message


def test_a_checkpoint_of_a_run_with_other_models(tmp_path: Path) -> None:
    """GRPO has no critic; PPO cannot go on from it, nor the other way round."""
    store(tmp_path / "grpo", engines={"actor": SmallEngine(1)}).save(1, {})
    assert "step_000001 has no critic; it is of a run with other models" in refusal(store(tmp_path / "grpo"))
    store(tmp_path / "ppo").save(1, {})
    grpo = store(tmp_path / "ppo", engines={"actor": SmallEngine(1)})
    assert "step_000001 has a critic that this run lacks; it is of a run with other models" in refusal(grpo)


def test_rank_states_need_the_same_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store(tmp_path, rank_states={"random": Kept(5)}).save(1, {})
    same, other, new = Kept(0), Kept(0), Kept(0)
    store(tmp_path, rank_states={"random": same, "rollout": new}).restore()
    assert same.restored == {"x": [5, 7]}
    assert new.restored is None
    assert "layout" not in caplog.text
    store(tmp_path, rank_states={"random": other}, layout="tp2-dp1").restore()
    assert other.restored is None
    assert caplog.text.count("is of the layout tp1-dp1") == 1


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("at", [4, 300, -3])
def test_a_flipped_bit_is_found_before_anything_changes(tmp_path: Path, at: int) -> None:
    """In the header and in the data."""
    store(tmp_path, actor=1).save(1, {})
    store(tmp_path, actor=2).save(2, {})
    flip(tmp_path / "step_000002" / "shard_00000.safetensors", at)
    kept = Kept(0)
    message = refusal(store(tmp_path, rank_states={"random": kept}, actor=9))
    assert "step_000002/shard_00000.safetensors" in message
    assert "checkpoint.fallback=true" in message
    assert kept.restored == "nothing"


def test_falling_back_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        store(tmp_path, actor=step, keep=5).save(step, {})
    flip(tmp_path / "step_000003" / "shard_00000.safetensors", -3)
    (tmp_path / "step_000002" / "shard_00000.safetensors").write_bytes(b"")
    actual = store(tmp_path, fallback=True)
    assert actual.restore().step == 1  # type: ignore[union-attr]
    assert values(actual) == [1, 0]
    assert caplog.text.count("FALLING BACK") == 2
    flip(tmp_path / "step_000001" / "shard_00000.safetensors", -3)
    assert "step_000003/shard" in refusal(store(tmp_path, fallback=True))  # the newest is the one to tell of


class FailingDisk:
    """Makes the call number `number` that changes the disk fail."""

    def __init__(self, number: int, code: int) -> None:
        self.left, self.code, self.fired = number, code, ""

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == -1:
            self.fired = name
            raise OSError(self.code, os.strerror(self.code))
        return call()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on with its state; what is there is complete, the old one or the new; the next save succeeds."""
    kinds = set()
    for number in range(200):
        root = tmp_path / str(number)
        saving = store(root, keep=1, on_error="continue", actor=1)
        saving.save(1, {})
        failing = FailingDisk(number, code)
        monkeypatch.setattr(disk, "os", instrumented(failing))
        caplog.clear()
        saving.save(2, {})
        monkeypatch.undo()
        if not failing.fired:
            break
        kinds.add(failing.fired)
        assert values(saving) == [1, 0]
        metrics = saving.poll()
        if "checkpoint/failed_saves" in metrics:
            assert "the checkpoint of step 2 failed: " in caplog.text
            assert f"({os.strerror(code)})" in caplog.text
            assert steps(root) in ([1], [2], [1, 2])
        else:
            assert steps(root)[-1] == 2
        actual = store(root)
        assert actual.restore().step in (1, 2)  # type: ignore[union-attr]
        assert values(actual) == [1, 0]
        saving.save(3, {})
        assert "checkpoint/failed_saves" not in saving.poll()
        assert names(root) == ["step_000003"]
    assert number > 20
    assert kinds >= {"mkdir", "open", "pwritev", "fsync", "rename", "unlink"}


def test_too_little_space_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: (1 << 20) + 123)
    saving = store(tmp_path, on_error="continue")
    saving.save(1, {})
    assert "0.001 GB are needed and 0.001 GB are free" in caplog.text
    assert names(tmp_path) == []
    assert saving.poll()["checkpoint/failed_saves"] == 1


@pytest.mark.parametrize(("box", "what"), [(Box((2, 0), (1, 3)), "lack 3"), (Box((1, 0), (2, 3)), ".* overlap")])
def test_a_state_with_a_hole_is_no_checkpoint(tmp_path: Path, box: Box, what: str) -> None:
    """An engine that owns rows 0 and 1 and, of the rest, a piece that is too short or in the wrong place."""

    class Holed(SmallEngine):
        def state(self) -> EngineState:
            parts = [(Box((0, 0), (2, 3)), self.matrix[:2]), (box, self.matrix[: box.shape[0]])]
            return EngineState([Piece("weights/matrix", (4, 3), at, data, owned=True) for at, data in parts], {})

    message = rf"actor/weights/matrix \[4, 3\]: its pieces {what}"
    with pytest.raises(RunError, match=message):
        store(tmp_path, engines={"actor": Holed(1)}).save(1, {})
    assert names(tmp_path) == []


def test_strided_and_odd_tensors(tmp_path: Path) -> None:
    """Views, no elements, bool and int16 are written as they are."""
    odd = Kept(0)
    odd.tensors = {
        "turned": torch.arange(12).view(3, 4).t(),
        "sliced": torch.arange(20.0)[::3],
        "empty": torch.zeros(0, 5, dtype=torch.int16),
        "bool": torch.tensor([True, False]),
        "wide": torch.tensor(1.5, dtype=torch.float64),
    }
    for mode in (True, False):
        root = tmp_path / str(mode)
        saving = store(root, rank_states={"odd": odd}, async_save=mode)
        saving.save(1, {})
        saving.finish()
        saving.close()
        back = Kept(0)
        store(root, rank_states={"odd": back}).restore()
        assert back.restored == {name: tensor.tolist() for name, tensor in odd.tensors.items()}


def saved_by_two(rank: int, root: str) -> dict[str, Any]:
    """What two ranks find: saves of both kinds, a failure on one rank, and another layout's rank states."""
    from datetime import timedelta

    import torch.distributed as dist

    from mega_rl.parallel.comm import GroupRanks

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    assert group is not None
    ranks = GroupRanks(group)
    actual: dict[str, Any] = {}
    for mode in (False, True):

        def opened(engine: SmallEngine, kept: Kept, mode: bool = mode) -> RunCheckpoints:
            run = RunState({"actor": engine}, {"random": kept}, ranks, {}, "tp2-dp1", {})
            return RunCheckpoints(Path(root) / str(mode), run, settings(async_save=mode))

        with opened(SmallEngine(4, rank=rank, size=2), Kept(rank)) as saving:
            saving.save(1, {})
            if rank == 1:
                saving.run = Twice(**vars(saving.run))
            failed = refused = ""
            try:
                saving.save(2, {})
                saving.finish()
            except RunError as error:
                failed = str(error)
            try:
                opened(SmallEngine(0), Kept(0)).lock()
            except UserError as error:
                refused = str(error)
        engine, kept = SmallEngine(0, rank=rank, size=2), Kept(9)
        manifest = opened(engine, kept).restore()
        assert manifest is not None
        actual[str(mode)] = [manifest.step, engine.values, kept.restored, failed, refused]
    dist.destroy_process_group()
    return actual


class Twice(RunState):
    """The state of a rank whose shard cannot be written: one name twice."""

    def collect(self) -> Any:
        pieces, numbers = super().collect()
        return [*pieces, pieces[0]], numbers


def saves(root: Path, monkeypatch: pytest.MonkeyPatch, fails: Sequence[bool]) -> None:
    """Save after steps 1, 2, ... in a run that ends well, on a disk that is full for some of them."""
    with store(root, on_error="continue", actor=1) as saving:
        for step, is_full in enumerate(fails, 1):
            with monkeypatch.context() as patched:
                if is_full:
                    patched.setattr(disk, "os", instrumented(FailingDisk(6, errno.ENOSPC)))
                saving.save(step, {})


def test_failed_last_save_ends_run_with_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though `on_error` is continue: a failed save before the last one costs itself alone."""
    with pytest.raises(RunError, match=r"the checkpoint of step 3 failed: .*it was the run's last one"):
        saves(tmp_path / "last", monkeypatch, [False, True, True])
    assert steps(tmp_path / "last") == [1]
    saves(tmp_path / "earlier", monkeypatch, [True, False])
    assert steps(tmp_path / "earlier") == [2]


def test_two_ranks_agree(tmp_path: Path) -> None:
    """A rank that fails is known on all; each gets its own state back."""
    both = run_ranks(2, saved_by_two, str(tmp_path), device="cpu")
    for rank, actual in enumerate(both):
        for mode in ("False", "True"):
            step, engine, kept, failed, refused = actual[mode]
            assert (step, engine, kept) == (1, [4.0] * 4, {"x": [rank, 7]})
            assert failed.startswith("the checkpoint of step 2 failed: ")
            assert "written twice: ['actor/weights/matrix@2,0']" in failed
            assert "another run" in refused
    for mode in ("False", "True"):
        assert names(tmp_path / mode) == ["step_000001"]
        whole = store(tmp_path / mode, engines={"actor": SmallEngine(0)}, identity={})
        kept = Kept(0)
        whole.run.rank_states["random"] = kept
        whole.restore()
        matrix = whole.run.engines["actor"].matrix  # type: ignore[attr-defined]
        assert matrix.tolist() == [[4.0] * 3] * 2 + [[5.0] * 3] * 2
        assert kept.restored is None
        manifest = json.loads((tmp_path / mode / "step_000001" / "manifest.json").read_text())
        assert [shard["file"] for shard in manifest["shards"]] == ["shard_00000.safetensors", "shard_00001.safetensors"]
