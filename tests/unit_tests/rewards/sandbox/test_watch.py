"""Memory of a sandbox, looked at while bubblewrap changes the root and processes end."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

import pytest

from mega_rl.rewards.sandbox import local
from tests.helpers.sandboxes import local_sandbox


def test_process_with_the_root_of_the_machine_counts_nothing() -> None:
    """As bubblewrap's child before it changes its root: its /proc would list all processes of the host."""
    assert local.used_bytes(os.getpid()) == 0


def test_memory_seen_after_the_end_of_a_sandbox_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its first process may be another's by then."""

    def look(pid: int) -> int:
        with suppress(ProcessLookupError):  # the program may have ended by itself
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            assert select.select([process], [], [], 10.0)[0]  # it has ended
            os.close(process)
        return 1 << 40

    sandbox = local_sandbox()
    monkeypatch.setattr(local, "used_bytes", look)
    assert sandbox.run("print(1)", b"", timeout_s=5).status == "finished"
