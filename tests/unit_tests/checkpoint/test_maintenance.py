"""`mega-rl checkpoint list | verify | prune`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import RunLock
from mega_rl.cli import app as cli
from mega_rl.cli import checkpoint as verbs
from mega_rl.errors import UserError
from tests.unit_tests.checkpoint.written import flip, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three checkpoints and a torn save."""
    run = tmp_path / "run"
    for step, value in ((10, 0.5), (20, 0.75), (30, 0.25)):
        save(run / "checkpoints", step, metrics={"val/reward_mean": value, "loss": 1.0})
    (run / "checkpoints" / ".step_000040.tmp").mkdir()
    return run


def last_shard(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}" / "shard_00002.safetensors"


def steps(run: Path) -> list[int]:
    return [folders.step_of(folder) for folder in folders.complete(run / "checkpoints")]


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.list_(run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "saved", "at", "size", "layout", "val/reward_mean", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30", ".step_000040.tmp"]
    assert "tp1 dp3" in lines[1]
    assert "0.75" in lines[2]
    assert lines[2].rstrip().endswith("complete")
    assert "torn: a pending or interrupted save" in lines[4]
    assert verbs.list_(run / "checkpoints", metric="loss") == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["loss", "state"]


def test_verify_takes_run_root_or_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    for path, count in ((run, 3), (root, 3), (root / "step_000020", 1)):
        assert verbs.verify(path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(": whole: 8 tensors, 13 pieces" in line for line in lines) == count
        assert sum(".step_000040.tmp: ignored" in line for line in lines) == (count > 1)


def test_verify_lists_every_fault(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(file := last_shard(run, 20))
    os.truncate(run / "checkpoints" / "step_000030" / "shard_00000.safetensors", 50)
    (run / "checkpoints" / "step_000030" / "shard_00001.safetensors").unlink()
    (run / "checkpoints" / "step_000010" / "COMMIT").write_text("{}")
    assert verbs.verify(run) == 1
    out = capsys.readouterr().out
    assert out.count("damaged") == 4
    assert ": whole" not in out
    assert f"{file.parent}: damaged: {file.name}: " in out
    assert verbs.verify(run, as_json=True) == 1
    reports = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [len(report["faults"]) for report in reports] == [1, 1, 2]
    [fault] = reports[1]["faults"]
    assert all(word in fault for word in (str(file), ": actor/", "checksum", "expected"))
    assert verbs.verify(run / "checkpoints" / "step_000010") == 1


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.prune(run, keep=1, keep_best="val/reward_mean", dry_run=True)
    assert steps(run) == [10, 20, 30]
    assert capsys.readouterr().out.count("would remove") == 2
    verbs.prune(run, keep=1, keep_best="val/reward_mean", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [Path(each["path"]).name for each in report["removed"]] == [".step_000040.tmp", "step_000010"]
    assert [Path(path).name for path in report["kept"]] == ["step_000020", "step_000030"]
    assert steps(run) == [20, 30]
    assert not (run / "checkpoints" / ".step_000040.tmp").exists()
    verbs.prune(run / "checkpoints", keep=1, keep_interval=20)
    assert steps(run) == [20, 30]
    verbs.prune(run, keep=1)
    assert steps(run) == [30]


def test_prune_is_refused_while_a_run_writes(run: Path) -> None:
    with RunLock(run / "checkpoints"):
        with pytest.raises(UserError, match=f"{run}: another run .*pid {os.getpid()}.*stop it first"):
            verbs.prune(run, keep=1)
        verbs.prune(run, keep=1, dry_run=True)
    assert steps(run) == [10, 20, 30]


def test_prune_removes_nothing_where_newest_is_damaged(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step_000030" / "shard_00000.safetensors", 50)
    with pytest.raises(UserError, match=r"the newest checkpoint is damaged: .*shard_00000.*nothing is removed"):
        verbs.prune(run, keep=1)
    assert steps(run) == [10, 20, 30]
    for step in (10, 20, 30):
        (run / "checkpoints" / f"step_{step:06d}" / "COMMIT").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        verbs.prune(run, keep=1)
    assert len(list((run / "checkpoints").glob("step_*"))) == 3


OF_A_RUN = "belongs to a run; export its weights by 'mega-rl checkpoint export RUN OUT'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("checkpoint export run out --step 15", "--step=15: run has no complete checkpoint"),
        ("checkpoint export run out --role judge", "'--role': Value error, 'judge' is not one of 'actor', 'critic'"),
        ("checkpoint export run out", "is not here; name a folder with its config.json"),
        ("checkpoint export nothing out", "nothing: no such folder"),
        ("convert export run/checkpoints/step_000010 out", OF_A_RUN),
        ("convert inspect run/checkpoints/step_000010", OF_A_RUN),
    ],
)
def test_mistakes_in_export(
    arguments: str, message: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    assert cli.main(arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not (run.parent / "out").exists()
