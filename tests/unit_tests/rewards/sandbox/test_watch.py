"""Memory of a sandbox, looked at while processes end and bubblewrap changes the root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mega_rl.rewards.sandbox import local
from tests.helpers.sandboxes import local_sandbox

HOG = "import time; x = bytearray(64 << 20); print(1, flush=True); time.sleep(60)"


@pytest.fixture
def hog() -> Iterator[int]:
    """A process of this machine with 64 MiB, which belongs to no sandbox."""
    process = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_root_that_changes_during_a_look_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap: at the first read the path is an empty file system of its own, at the next one the host's disk."""
    before, stat = local.used_bytes(os.getpid()), os.stat

    def other_device(path: object, **rest: object) -> object:
        return stat("/proc" if str(path).endswith("root/tmp") else path, **rest)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", other_device)
    assert abs(local.used_bytes(os.getpid()) - before) < 64 << 20


def test_process_that_got_the_number_of_a_child_does_not_count(hog: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE) as init:
        assert init.stdout is not None
        init.stdout.read(1)
        alone = local.used_bytes(init.pid)
        children = local._children
        monkeypatch.setattr(local, "_children", lambda *which: [hog] if which[1] == init.pid else children(*which))
        assert abs(local.used_bytes(init.pid) - alone) < 1 << 20
        init.kill()


def test_memory_seen_after_the_end_of_a_sandbox_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its first process may be another's by then."""

    def look(pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # bubblewrap, which waits for it
        return 1 << 40

    sandbox = local_sandbox()
    monkeypatch.setattr(local, "used_bytes", look)
    assert sandbox.run("print(1)", b"", timeout_s=5).status == "finished"
