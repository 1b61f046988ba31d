"""Saves beside training: what stalls, what a dying process leaves, and that the writer never outlives its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.checkpoint.saving.writer import WriterProcess
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.errors import RunError
from tests.helpers.selection import covering
from tests.unit_tests.checkpoint.stores import Kept, names, steps, store, values

PATIENCE_S = 20.0

# A writer that hangs at its fourth operation on the disk.
HANGING = """
    import os
    from mega_rl.checkpoint.saving import writer
    from mega_rl import disk

    class Hanging:
        left = 3
        def __getattr__(self, name):
            real = getattr(os, name)
            if name not in ("mkdir", "open", "pwritev", "fsync", "rename", "unlink"):
                return real
            def call(*args, **kwargs):
                Hanging.left -= 1
                if Hanging.left == -1:
                    import time
                    time.sleep(600)
                return real(*args, **kwargs)
            return call

    disk.os = Hanging()
    import sys
    writer.main(sys.argv[1:])
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has writers started from now on hang in the middle of a save; undone by `monkeypatch.undo()`."""
    script = tmp_path / "hanging.py"
    script.write_text(textwrap.dedent(HANGING))
    monkeypatch.setattr(WriterProcess, "command", (sys.executable, str(script)))
    return script


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether its parent could not collect it yet; a killed process is a zombie before its last thread has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z" or threads > 1


def pid_of(saving: RunCheckpoints) -> int:
    pid: Any = saving._writing.pid  # type: ignore[attr-defined]
    return int(pid)


def test_training_goes_on_beside_a_save(tmp_path: Path) -> None:
    """What was saved is the state at the save; the process is the same for the next, whose state is larger."""
    root = tmp_path / "run"
    with store(root, actor=1, async_save=True) as saving:
        saving.save(1, {"of": 1})
        saving._run.engines["actor"].matrix.fill_(99.0)  # type: ignore[attr-defined]
        actual: dict[str, float] = {}
        until(lambda: "checkpoint/seconds" in actual or bool(actual.update(saving.poll())))
        assert set(actual) == {"checkpoint/seconds", "checkpoint/bytes", "checkpoint/stall_s"}
        assert actual["checkpoint/stall_s"] < actual["checkpoint/seconds"]
        first = pid_of(saving)
        large = Kept(0)
        large.tensors = {"x": torch.arange(100_000)}
        saving.add_rank_state("large", large)
        saving.save(2, {"of": 2})
        saving.finish()
        assert pid_of(saving) == first
    assert not alive(first)
    assert steps(root) == [1, 2]
    back = store(root, resume=str(root / "step_000001"))
    assert back.restore().state == {"of": 1}  # type: ignore[union-attr]
    assert values(back) == [1, 0]
    kept = Kept(0)
    store(root, rank_states={"large": kept}).restore()
    assert kept.restored == {"x": list(range(100_000))}


def test_the_writer_imports_no_torch() -> None:
    code = "import sys, mega_rl.checkpoint.saving.writer; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_it_stays_in_the_background(tmp_path: Path) -> None:
    """Signals for the trainer's process group do not end it; it is nice; it has nothing of the console."""
    with store(tmp_path, async_save=True) as saving:
        saving.save(1, {})
        pid = pid_of(saving)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
        saving.finish()
        assert steps(tmp_path) == [1]
        assert os.getpriority(os.PRIO_PROCESS, pid) == 10
        assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1)] == ["/dev/null"] * 2
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
        saving.save(2, {})
        saving.finish()
        assert pid_of(saving) == pid
    assert steps(tmp_path) == [1, 2]


def test_a_writer_that_is_killed(
    tmp_path: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next poll tells, the checkpoint before stays, the next save has a new writer."""
    root = tmp_path / "run"
    store(root, actor=1).save(1, {})
    with store(root, actor=1, async_save=True, on_error="continue", keep=1) as saving:
        saving.save(2, {})
        hung = pid_of(saving)
        assert saving.poll().keys() == {"checkpoint/stall_s"}
        os.kill(hung, signal.SIGKILL)
        until(lambda: not alive(hung))
        assert saving.poll() == {"checkpoint/failed_saves": 1}
        assert f"the checkpoint of step 2 failed: the writer (process {hung}) died of SIGKILL" in caplog.text
        assert names(root) == ["step_000001"]
        monkeypatch.undo()
        saving.save(3, {})
        saving.finish()
        assert "checkpoint/seconds" in saving.poll()
        assert names(root) == ["step_000003"]


def test_a_writer_that_died_between_two_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No save is lost for it."""
    with store(tmp_path, async_save=True) as saving:
        saving.save(1, {})
        saving.finish()
        pid = pid_of(saving)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        saving.save(2, {})
        saving.finish()
    assert f"the writer (process {pid}) ended between two saves" in caplog.text
    assert steps(tmp_path) == [1, 2]


def test_ctrl_c_does_not_wait_for_save(tmp_path: Path, hanging: Path) -> None:
    saving = store(tmp_path / "run", async_save=True)
    saving.save(1, {})
    pid = pid_of(saving)
    begin = time.monotonic()
    saving.__exit__(KeyboardInterrupt, None, None)
    assert time.monotonic() - begin < PATIENCE_S
    assert not alive(pid)


def test_last_words_of_writer_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriterProcess, "command", (sys.executable, "-c", "import nothing_of_this_name"))
    with store(tmp_path, async_save=True) as saving:
        saving.save(1, {})
        with pytest.raises(RunError, match=r"ended with exit code 1(?s:.)*No module named 'nothing_of_this_name'"):
            saving.finish()
        monkeypatch.setattr(WriterProcess, "command", ("/no/such/program",))
        with pytest.raises(RunError, match="cannot be started: No such file or directory"):
            saving.save(2, {})


def test_a_save_that_takes_too_long(tmp_path: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.checkpoint.store.BEAT_S", 0.2)
    with store(tmp_path, async_save=True, timeout_s=1.0) as saving:
        saving.save(1, {})
        hung = pid_of(saving)
        with pytest.raises(RunError, match=r"rank 0 did not end within checkpoint.timeout_s=1"):
            saving.finish()
        assert not alive(hung)


PARENT = """
    import sys, time, torch
    from pathlib import Path
    from tests.unit_tests.checkpoint.stores import store
    saving = store(Path(sys.argv[1]), actor=1, async_save=True)
    saving.lock()
    saving.save(1, {})
    saving.finish()
    print(saving._writing.pid, flush=True)
    if len(sys.argv) > 2:
        from mega_rl.checkpoint.saving.writer import WriterProcess
        saving._writing.stop()
        WriterProcess.command = (sys.executable, sys.argv[2])
        saving.save(2, {})
        print(saving._writing.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "during"),
    covering(product((signal.SIGKILL, signal.SIGTERM), (False, True))),
    ids=lambda value: {False: "idle", True: "writing"}.get(value, str(value)),
)
def test_the_writer_does_not_outlive_its_run(tmp_path: Path, hanging: Path, during: bool, number: int) -> None:
    """The trainer killed, at rest and in the middle of a write that never ends."""
    arguments = [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "run")]
    if during:
        arguments.append(str(hanging))
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(1 + during)]
    assert alive(pids[-1])
    parent.send_signal(number)
    parent.wait(PATIENCE_S)
    until(lambda: not any(map(alive, pids)))
    parent.stdout.close()
    with store(tmp_path / "run") as actual:
        assert actual.restore().step == 1  # type: ignore[union-attr]
        assert values(actual) == [1, 0]
        actual.save(2, {})
    assert names(tmp_path / "run") == ["step_000001", "step_000002"]
