"""A node's launcher as a process, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mega_rl.cli.app import main
from mega_rl.disk import lock_file
from mega_rl.operations.schedulers.ray.node import LINES_PER_CALL, NodeLauncher, NodeOutput
from tests.unit_tests.operations.launcher.programs import is_gone, wait_until

WAIT_S = 60.0


def launcher(program: str) -> NodeLauncher:
    return NodeLauncher((sys.executable, "-S", "-u", "-c", textwrap.dedent(program)))


def output_of(node: NodeLauncher, *, lines: int | None = None) -> NodeOutput:
    """Lines until the end, or as many."""
    read: list[str] = []
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        output = node.poll(1.0)
        read += output.lines
        if output.exit_code is not None or (lines is not None and len(read) >= lines):
            return NodeOutput(tuple(read), output.exit_code)
    raise AssertionError(f"no end after {read}")


def test_output_and_exit_code_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    node = launcher(f"""
        import os, sys
        print(sys.argv[1], os.getcwd(), os.environ["A"], os.environ.get("OMP_NUM_THREADS"), flush=True)
        for i in range({2 * LINES_PER_CALL}): print(i)
        sys.exit(3)
    """)
    node.start(["--x"], {"A": "1"}, str(tmp_path))
    output = output_of(node)
    assert output.lines[0] == f"--x {tmp_path} 1 None"  # what Ray sets for its actor is not for the ranks
    assert output.lines[1:] == tuple(map(str, range(2 * LINES_PER_CALL)))
    assert output.exit_code == 3


def test_signals_reach_the_launcher(tmp_path: Path) -> None:
    node = launcher("""
        import signal, sys
        signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))
        print("ready")
        signal.pause()
    """)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        node.start([], {}, str(tmp_path))
        assert output_of(node, lines=1).lines == ("ready",)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    node.signal(signal.SIGINT)
    assert output_of(node).exit_code == 130


def test_killed_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    node = launcher("""
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        import time; time.sleep(600)
    """)
    node.start([], {}, str(tmp_path))
    child = int(output_of(node, lines=1).lines[0])
    node.signal(signal.SIGKILL)
    assert output_of(node).exit_code == -signal.SIGKILL
    wait_until(lambda: is_gone(child))


def test_launcher_ends_with_its_killed_actor(tmp_path: Path) -> None:
    actor = f"""
        import sys, time
        from mega_rl.operations.schedulers.ray.node import NodeLauncher
        node = NodeLauncher((sys.executable, "-S", "-c", "import time; time.sleep(600)"))
        node.start([], {{}}, {str(tmp_path)!r})
        while node._child is None: time.sleep(0.01)
        print(node._child.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(actor)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        wait_until(lambda: b"mega_rl.processes" not in Path(f"/proc/{pid}/cmdline").read_bytes())
        process.kill()
    wait_until(lambda: is_gone(pid))


def test_launcher_waits_for_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    held = lock_file(folder / ".lock")
    node = launcher("print('started')")
    node.start([], {}, str(tmp_path), str(tmp_path))
    assert node.poll(1.0) == NodeOutput()
    os.close(held)
    assert output_of(node) == NodeOutput(("started",), 0)


def test_stop_ends_the_wait_for_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    held = lock_file(folder / ".lock")
    node = launcher("print('started')")
    node.start([], {}, str(tmp_path), str(tmp_path))
    node.signal(signal.SIGTERM)
    assert output_of(node) == NodeOutput((), 143)
    os.close(held)


def test_missing_folder_is_a_mistake(tmp_path: Path) -> None:
    node = launcher("")
    node.start([], {}, str(tmp_path / "nowhere"))
    output = output_of(node)
    assert output.exit_code == 2
    assert "the launcher cannot be started: No such file or directory in the run's folder" in output.lines[0]


def test_missing_ray_is_one_line() -> None:
    program = "import sys; sys.modules['ray'] = None; sys.path[:] = [p for p in sys.path if not p.endswith('ray')]\n"
    program += "from mega_rl.cli.app import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "launch", "ray", "quickstart", "--nodes=1", "--nproc-per-node=2"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert outcome.returncode == 2
    assert outcome.stderr.strip() == (
        "error: Ray is not installed; install it here and on every node: pip install 'mega_rl[ray]'"
    )


def test_mistake_in_the_settings_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ray", "quickstart", "--nodes=3", "--nproc-per-node=1"]) == 2
    assert "tp" in capsys.readouterr().err
