"""Servers that outlive their rank: who adopts them, what they are proved by, and that nothing of them is left.

A scripted program has SGLang's place, with a real server's line of life. The launcher is this process, or a program.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mega_rl.errors import PeerError, RunError, StalledError, UserError
from mega_rl.rollout.sglang.build import _close
from mega_rl.rollout.sglang.server import group
from mega_rl.rollout.sglang.server import process as server
from mega_rl.rollout.sglang.server.group import ProcessIdentity
from mega_rl.rollout.sglang.server.kept import KEYS_FILE, KeptServer, KeptServers, keeping_servers
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings, ServerStartError
from mega_rl.rollout.sglang.weights.transport import RanksLost
from tests.helpers.kept_rank import SETTINGS, scripted
from tests.helpers.sglang import assert_gone, private_folder, wait_until
from tests.unit_tests.operations.launcher.programs import run

Rank = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]
ROOT = Path(__file__).parents[4]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ExitStack]:
    """The launcher, whose end closes it; nothing of any server may be left at its end."""
    monkeypatch.setattr(server, "PROGRAM", server.PROGRAM)
    monkeypatch.setattr(server, "require_sglang", server.require_sglang)
    monkeypatch.setenv("SCRIPTED_HOW", str(tmp_path / "how"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path / "tmp"))
    with ExitStack() as launcher:
        for name, value in launcher.enter_context(keeping_servers(possible=True)).items():
            monkeypatch.setenv(name, value)
        yield launcher
    wait_until("removal of private folders", lambda: not list((tmp_path / "tmp").iterdir()), timeout_s=10.0)


@pytest.fixture
def rank(life: ExitStack, tmp_path: Path) -> Iterator[Rank]:
    """Starts the first rank of a host; returns its program, and its server's process and URL."""
    programs: list[subprocess.Popen[str]] = []

    def begin(how: str = "well") -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "tests.helpers.kept_rank", str(tmp_path), how]
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        programs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        line = cast(Any, programs[-1].stdout).readline()
        return programs[-1], json.loads(line)

    yield begin
    for program in programs:
        end(program)


def end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.wait()
    cast(Any, program.stdout).close()


def asked(tmp_path: Path) -> list[str]:
    return re.findall(r"asked for (\S+)", (tmp_path / "server-0.log").read_text("utf-8"))


def test_next_rank_adopts_and_ends_a_left_server(rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is left as in the middle of an update: paused, with a request that waits for its end."""
    first, own = rank()
    for path in ("/pause_generation", "/generate"):
        request = urllib.request.Request(own["url"] + path, data=b"{}", method="POST")
        with suppress(TimeoutError):
            urllib.request.urlopen(request, timeout=0.3)
    end(first)
    before = len(asked(tmp_path))
    folder = private_folder(own["pid"])
    adopted = scripted(tmp_path)
    with caplog.at_level(logging.INFO):
        adopted.start()
        endpoint = adopted.wait_ready()
    assert (adopted.pid, endpoint.url, adopted.alive) == (own["pid"], own["url"], True)
    assert "SGLang server 0 is kept after" in caplog.text
    assert asked(tmp_path)[before:] == [
        "/continue_generation",
        "/pause_generation",
        "/continue_generation",
        "/update_weight_version",
        "/flush_cache",
        "/health",
        "/generate",
    ]
    record = KeptServer.read(folder)
    assert record is not None
    assert record.owner == ProcessIdentity.of(os.getpid())
    os.kill(own["pid"], signal.SIGKILL)
    wait_until("end", lambda: not adopted.alive, timeout_s=10.0)
    assert adopted.exit_code is not None
    adopted.stop()
    assert not group.members(own["pid"])
    assert not folder.exists()
    adopted.start()  # as after its loss in a run: a new one, and no search for an old one
    adopted.wait_ready()
    assert adopted.pid != own["pid"]
    adopted.stop()


def stopped(own: dict[str, Any], tmp_path: Path) -> ServerSettings:
    os.kill(own["pid"], signal.SIGSTOP)
    return SETTINGS


def killed(own: dict[str, Any], tmp_path: Path) -> ServerSettings:
    os.kill(own["pid"], signal.SIGKILL)
    wait_until("end", lambda: not group.members(own["pid"]), timeout_s=10.0)
    return SETTINGS


def unhealthy(own: dict[str, Any], tmp_path: Path) -> ServerSettings:
    (tmp_path / "how").write_text(f"/health {own['pid']}")
    return SETTINGS


def without_keys(own: dict[str, Any], tmp_path: Path) -> ServerSettings:
    (private_folder(own["pid"]) / KEYS_FILE).write_text("{}")
    return SETTINGS


def of_another_run(own: dict[str, Any], tmp_path: Path) -> ServerSettings:
    return replace(SETTINGS, seed=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (stopped, "/continue_generation: "),
        (killed, "its process has ended"),
        (unhealthy, "/health did not answer 200 within 1 s"),
        (without_keys, "cannot be read as a file of keys"),
        (of_another_run, "it runs with other settings"),
    ],
)
def test_server_that_cannot_be_adopted_is_replaced(
    rank: Rank,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any], Path], ServerSettings],
    reason: str,
) -> None:
    monkeypatch.setattr(server, "_ADOPT_S", 1.0)
    monkeypatch.setattr(server, "_HEALTH_S", 0.5)
    first, own = rank()
    end(first)
    process = scripted(tmp_path, settings=change(own, tmp_path))
    with process:
        process.wait_ready()
        assert process.pid != own["pid"]
        assert not group.members(own["pid"])
        assert "SGLang server 0 is not kept: " in caplog.text
        assert reason in caplog.text
        assert len(list((tmp_path / "tmp").glob("*/s-*"))) == 1


def test_aborted_adoption_starts_no_other_server(rank: Rank, tmp_path: Path) -> None:
    first, own = rank()
    end(first)
    process = scripted(tmp_path)
    process.start()
    os.kill(own["pid"], signal.SIGSTOP)
    threading.Timer(0.3, process.abort).start()
    with pytest.raises(ServerStartError, match="is not kept"):
        process.wait_ready()
    assert process.pid is None


def test_server_before_readiness_ends_with_its_rank(rank: Rank) -> None:
    first, own = rank("never starts")
    folder = private_folder(own["pid"])
    end(first)
    assert_gone(own["pid"], {folder}, timeout_s=10.0)
    assert KeptServers.of_launcher() is not None, "the launcher's folder stays for the next server"


def test_left_server_ends_with_the_launcher(rank: Rank, life: ExitStack) -> None:
    first, own = rank()
    end(first)
    assert group.members(own["pid"])
    life.close()
    assert not group.members(own["pid"])


LAUNCHER = """
import os, subprocess, sys, time
from mega_rl.rollout.sglang.server.kept import keeping_servers
with keeping_servers(possible=True) as variables:
    rank = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.kept_rank", sys.argv[1], "well"], env={**os.environ, **variables}
    )
    print(rank.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("first", ["launcher", "rank"])
def test_server_ends_after_launcher_and_rank_are_killed(life: ExitStack, tmp_path: Path, first: str) -> None:
    """A rank whose launcher was killed still ends its step, with its server, and saves."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    own = json.loads(launcher.stdout.readline())
    kills = [launcher.kill, lambda: os.kill(rank, signal.SIGKILL)]
    try:
        (kills if first == "launcher" else kills[::-1])[0]()
        with pytest.raises(AssertionError, match="not within"):
            assert_gone(own["pid"], set(), timeout_s=0.8)  # it looks every half second
    finally:
        for kill in kills:
            with suppress(ProcessLookupError):
                kill()
        launcher.wait()
    assert_gone(own["pid"], set(), timeout_s=10.0)
    launcher.stdout.close()


def test_program_with_a_ranks_environment_adopts_nothing(rank: Rank, tmp_path: Path) -> None:
    first, own = rank()
    process = scripted(tmp_path)
    process.start()
    process.wait_ready()
    pid = cast(int, process.pid)
    assert pid != own["pid"]
    process.leave()
    assert not group.members(pid), "it is not kept, and so ends with whoever has started it"
    assert first.poll() is None
    (record,) = cast(KeptServers, KeptServers.of_launcher()).records().values()
    assert record.main.pid == own["pid"]


def test_server_numbered_on_another_host_is_ended(rank: Rank) -> None:
    first, own = rank()
    servers = cast(KeptServers, KeptServers.of_launcher())
    servers.end_others(set())
    assert group.members(own["pid"]), "its rank lives"
    end(first)
    servers.end_others({0})
    assert group.members(own["pid"])
    servers.end_others({1})
    assert not group.members(own["pid"])


@pytest.mark.parametrize("change", [{"nodes": 2, "tp": 2}, {"memory_saver": True}])
def test_spanning_and_colocated_servers_are_not_kept(life: ExitStack, tmp_path: Path, change: dict[str, Any]) -> None:
    assert scripted(tmp_path)._kept is not None
    assert ServerProcess(replace(SETTINGS, **change), 0, tmp_path)._kept is None


def test_record_that_is_no_record_counts_for_nothing(tmp_path: Path) -> None:
    assert KeptServer.read(tmp_path) is None
    (tmp_path / "kept.json").write_text('{"index": 0, "url"')
    assert KeptServer.read(tmp_path) is None


def test_reused_process_id_is_another_process() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    assert own.runs
    another = replace(own, ticks=own.ticks + 1)
    assert not another.runs
    assert another.end_group(deadline_s=1.0) == [], "this process is not its group"
    child = subprocess.Popen(["true"])
    wait_until("zombie", lambda: ProcessIdentity.of(child.pid) is None, timeout_s=10.0)
    child.wait()


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_launcher_that_restarts_ranks_keeps_servers(life: ExitStack, tmp_path: Path, max_restarts: int) -> None:
    """Else its ranks may not leave theirs to those of a launcher further up, which is this process here."""
    program = """
        from tests.helpers.kept_rank import scripted
        with scripted(Path(".")) as server:
            server.wait_ready()
            Path(f"server.{generation}").write_text(str(server.pid))
            if generation == 0:
                save(1)
                os.kill(os.getpid(), signal.SIGKILL)
    """
    code, errors = run(tmp_path, program, nproc_per_node=1, max_restarts=max_restarts, run_dir="run")
    pids = [int(file.read_text()) for file in sorted(tmp_path.glob("server.*"))]
    assert (code, len(pids), len(set(pids))) == ((0, 2, 1) if max_restarts else (137, 1, 1)), errors
    assert_gone(pids[0], set(), timeout_s=10.0)
    assert not cast(KeptServers, KeptServers.of_launcher()).records()


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (None, False),
        (UserError("a mistake"), False),
        (RunError("servers may have a part in it"), False),
        (KeyboardInterrupt(), False),
        (RanksLost("a rank is gone"), True),
        (PeerError("as health.guard leaves a connection that another rank has lost"), True),
        (StalledError("a rank makes no progress"), True),
        (RuntimeError("Connection closed by peer"), True),
    ],
)
def test_errors_of_others_leave_servers(error: BaseException | None, left: bool) -> None:
    calls: list[str] = []

    class Pool:
        def leave(self) -> None:
            calls.append("leave")

        def close(self) -> None:
            calls.append("close")

    _close(cast(Any, Pool()), None if error is None else type(error), error, None)
    assert calls == ["leave" if left else "close"]
