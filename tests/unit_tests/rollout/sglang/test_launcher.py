"""Ends of a trainer while its server starts: nothing of the server is left, whatever the kind of end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mega_rl.rollout.sglang.server import group, launcher
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.helpers.sglang import assert_gone, needs_sglang, owner, private_folder, shared_files, wait_until

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
        assert not group.end(process_group, deadline_s=10.0)


@pytest.mark.parametrize("how", ["exit", "exception", "SIGTERM", "SIGKILL"])
def test_starting_server_ends_with_its_trainer(start: Owner, how: str) -> None:
    program, server = start(how if how.islower() else "wait")
    if not how.islower():
        assert group.members(server)
        program.send_signal(getattr(signal, how))
    expected = {"exit": 0, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[how]
    assert program.wait(60) == expected
    assert_gone(server, set())


@pytest.mark.skipif(not FULL, reason="make test-full: starts of two more servers")
def test_starting_server_ends_whoever_is_killed(start: Owner) -> None:
    """SIGKILL of the trainer, and in another server SIGKILL of the main process while its trainer lives on."""
    (first, orphaned), (_, headless) = start("wait"), start("wait")

    def grown(process_group: int) -> bool:
        """The main process, the scheduler, the detokenizer."""
        return len(group.members(process_group)) >= 3

    files = {}
    for server in (orphaned, headless):
        wait_until("SGLang's own processes", lambda server=server: grown(server), timeout_s=200.0)
        files[server] = shared_files(server)
    files[orphaned] |= {private_folder(orphaned)}
    its_trainers_to_remove = private_folder(headless)
    first.kill()
    os.kill(headless, signal.SIGKILL)
    for server in (orphaned, headless):
        assert_gone(server, files[server])
    shutil.rmtree(its_trainers_to_remove, ignore_errors=True)


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
        assert not group.end(server, deadline_s=10.0)


def prepared(tmp_path: Path, code: str) -> str:
    """What `code` prints first in a launcher that was started by hand and has not imported SGLang."""
    code = (
        "import gc, os\nfrom mega_rl.rollout.sglang.server import launcher\n"
        f"launcher.use_private_files = lambda _: None\nlauncher.prepare(leads=True)\n{code}\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGA_RL_SGLANG")}
    environment[launcher.SCRATCH_VARIABLE] = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as launched:
        assert launched.stdout is not None
        return launched.stdout.readline().strip()


def test_launcher_started_by_hand_leads_its_group(tmp_path: Path) -> None:
    """Else the end of its standard input would take the caller along."""
    assert prepared(tmp_path, "print(os.getpgrp() == os.getpid())") == "True"


def test_garbage_is_collected_after_the_import_only(tmp_path: Path) -> None:
    code = (
        "before = gc.isenabled()\nkept = [object() for _ in range(3)]\nlauncher.collect_again()\n"
        "frozen = gc.get_freeze_count()\nprint(before, gc.isenabled(), frozen > 1000, len(gc.get_objects()) < 100)"
    )
    assert prepared(tmp_path, code) == "False True True True"
