"""Ends of a trainer while its server starts: nothing of the server is left, whatever the kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mega_rl.rollout.sglang.server import launcher
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.sglang import assert_gone, needs_sglang, owner

pytestmark = needs_sglang

Owner = Callable[[str], tuple[subprocess.Popen[str], int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Owner]:
    """Starts a program that owns a server, which it does not wait for; the program and the server's process group."""
    started: list[subprocess.Popen[str]] = []
    groups: list[int] = []

    def begin(how: str) -> tuple[subprocess.Popen[str], int]:
        program = owner(checkpoint, tmp_path / str(len(started)), how)
        started.append(program)
        assert program.stdout is not None
        groups.append(json.loads(program.stdout.readline())["pid"])
        return program, groups[-1]

    yield begin
    for program in started:
        program.kill()
        program.communicate()
    for process_group in groups:
        assert not launcher.end_group(process_group, deadline_s=10.0)


@pytest.mark.parametrize("how", ["exit", "exception", "SIGTERM", "SIGKILL"])
def test_starting_server_ends_with_its_trainer(start: Owner, how: str) -> None:
    program, server = start(how if how.islower() else "wait")
    if not how.islower():
        assert launcher.group_members(server)
        program.send_signal(getattr(signal, how))
    expected = {"exit": 0, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[how]
    assert program.wait(60) == expected
    assert_gone(server, set())


def test_forked_child_does_not_keep_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """Workers of a data loader are forked and have a copy of all that their parent has open."""
    program = f"""
import os, time
from pathlib import Path
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
server = ServerProcess(ServerSettings(Path({str(checkpoint)!r})), index=0, folder=Path({str(tmp_path)!r}))
server.start()
child = os.fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print(server.pid, child, flush=True)
time.sleep(120)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    server, child = map(int, trainer.stdout.readline().split())
    try:
        trainer.kill()
        trainer.wait()
        assert_gone(server, set())
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.kill()
        assert not launcher.end_group(server, deadline_s=10.0)
