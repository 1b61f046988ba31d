"""A launcher as a process, with ranks that are small programs: ends, signals, restarts, its own death."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from mega_rl.disk import lock_file
from mega_rl.errors import RunError
from mega_rl.operations.launcher.ranks import rank_store
from tests.unit_tests.operations.launcher.programs import Started, is_gone, run, start, wait_until

ENDLESS = "reached('up'); time.sleep(600)"
# Rank 0 ends as `mega_rl.cli` does with an error: its line on standard error, its last words in its record.
SAYS_WHY = """
from mega_rl.tracking.health.records import LastWords, write_record
from tests.unit_tests.operations.diagnosis.examples import record
if rank == 0:
    words = LastWords("error", "the reward service answers 500", 2, "reward", None)
    write_record(Path("run"), record(0, world_size=2, pid=os.getpid(), ended=words))
    sys.exit("error: the reward service answers 500")
time.sleep(600)
"""


def test_ranks_get_torchrun_variables_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGA_RL_LAUNCH_KEY", "secret")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # set by the user, it stays
    code, errors = run(tmp_path, "import json; Path(f'env{rank}').write_text(json.dumps(dict(os.environ)))")
    assert code == 0, errors
    first, second = (json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(2))
    for name, values in {
        "RANK": ("0", "1"),
        "LOCAL_RANK": ("0", "1"),
        "WORLD_SIZE": ("2", "2"),
        "LOCAL_WORLD_SIZE": ("2", "2"),
        "GROUP_RANK": ("0", "0"),
        "MASTER_ADDR": ("127.0.0.1", "127.0.0.1"),
        "MEGA_RL_GENERATION": ("0", "0"),
        "TORCHELASTIC_USE_AGENT_STORE": ("True", "True"),
        "GLOO_SOCKET_IFNAME": ("lo", "lo"),
        "NCCL_SOCKET_IFNAME": ("eth7", "eth7"),
    }.items():
        assert (first[name], second[name]) == values
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert int(first["OMP_NUM_THREADS"]) >= 1
    assert not any("secret" in text for text in (*first.values(), *second.values()))


@pytest.mark.parametrize(("max_restarts", "last"), [(0, ""), (1, "; again after step 2, where it failed before")])
def test_rank_that_explains_its_end_has_the_last_word(tmp_path: Path, max_restarts: int, last: str) -> None:
    """Unless the launcher has more to say: why it does not start the ranks again."""
    code, errors = run(tmp_path, SAYS_WHY, max_restarts=max_restarts)
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: rank 0" if last else "error: the reward service answers 500")
    assert last in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("sys.exit(1)", 1, "error: rank 1 (process PID) ended with exit code 1"),
        ("os._exit(0)", 1, "error: rank 1 (process PID) ended with exit code 0 before its work was done"),
        ("sys.exit(2)", 2, ""),
        ("sys.exit(143)", 143, ""),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL: perhaps the machine is out of memory"),
        ("os.kill(os.getpid(), 11)", 139, "error: rank 1 (process PID) was killed by SIGSEGV"),
    ],
)
def test_first_failure_gives_the_exit_code(tmp_path: Path, end: str, code: int, line: str) -> None:
    program = f"""
        if rank == 1:
            wait_for("up", 0); reached("up"); {end}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({"143" if code == 143 else "0"}))
        reached("up")
        {"sys.exit(143)" if code == 143 else "time.sleep(600)"}
    """
    started = start(tmp_path, program)
    pid = started.reached("up", 1)
    actual, errors = started.end()
    assert actual == code
    assert line.replace("PID", str(pid)) in errors
    assert bool(line) == ("error:" in errors)


SAVES = """
    def stop(number, frame): reached(f"saved{number}"); sys.exit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, stop)
    reached("up"); time.sleep(600)
"""
NO_CORE = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {ENDLESS}"


@pytest.mark.parametrize(
    ("program", "number", "error"),
    [
        (SAVES, signal.SIGTERM, ""),
        (SAVES, signal.SIGINT, ""),
        (SAVES, signal.SIGUSR1, ""),
        (ENDLESS, signal.SIGTERM, "error: stopped by SIGTERM before the ranks could save"),  # as while they import
        (NO_CORE, signal.SIGHUP, ""),
        (NO_CORE, signal.SIGQUIT, ""),
    ],
)
def test_signals_reach_the_ranks(tmp_path: Path, program: str, number: signal.Signals, error: str) -> None:
    started = start(tmp_path, program, max_restarts=3)
    up(started)
    started.process.send_signal(number)
    code, errors = started.end()
    assert code == 128 + number
    assert [line for line in errors.splitlines() if "error" in line] == ([error] if error else [])
    if program == SAVES:
        assert all((tmp_path / f"saved{number.value}.{rank}.0").exists() for rank in range(2))


def test_early_signal_starts_no_ranks(tmp_path: Path) -> None:
    """As one that came while the command became the launcher, and was blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        started = start(tmp_path, ENDLESS)
        started.process.send_signal(signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code, errors = started.end()
    assert code == 143
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("up.*"))


def test_sighup_stays_ignored_under_nohup(tmp_path: Path) -> None:
    program = "reached('up'); wait_for('go', 0); sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_DFL)"
    started = start(tmp_path, program, nohup=True)
    up(started)
    started.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert started.process.poll() is None
    (tmp_path / "go.0.0").write_text("")
    assert started.end()[0] == 0, "ranks are ended by SIGHUP"


def test_ranks_of_a_killed_launcher_save_and_end(tmp_path: Path) -> None:
    program = """
        def stop(number, frame): reached("saved"); sys.exit(143)
        signal.signal(signal.SIGTERM, stop)
        from mega_rl.disk import lock_file
        held = lock_file(Path(f"lock{rank}"))
        reached("up")
        time.sleep(600)
    """
    started = start(tmp_path, program)
    pids = up(started)
    below = psutil.Process(started.process.pid).children(recursive=True)
    started.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    assert all((tmp_path / f"saved.{rank}.0").exists() for rank in range(2))
    os.close(lock_file(tmp_path / "lock0"))
    wait_until(lambda: all(is_gone(process.pid) for process in below))  # the store too
    assert len(below) == 3


def test_processes_of_a_killed_rank_end(tmp_path: Path) -> None:
    program = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        Path(f"child{rank}").write_text(str(child.pid))
        reached("up"); time.sleep(600)
    """
    started = start(tmp_path, program)
    pids = up(started)
    os.kill(pids[1], signal.SIGKILL)
    assert started.end()[0] == 137
    wait_until(lambda: all(is_gone(int((tmp_path / f"child{rank}").read_text())) for rank in range(2)))


RESTARTED = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reached("up")
    Path(f"arguments.{rank}.{generation}").write_text(" ".join(sys.argv[1:]))
    if generation == 2: sys.exit(0)
    if rank == 1:
        wait_for("up", 0)
        save(generation + 1)
        os.kill(os.getpid(), 9)
    time.sleep(600)
"""


def test_ranks_restart_from_the_newest_checkpoint(tmp_path: Path) -> None:
    code, errors = run(tmp_path, RESTARTED, max_restarts=2)
    assert code == 0, errors
    arguments = [(tmp_path / f"arguments.0.{generation}").read_text() for generation in range(3)]
    assert arguments == ["", "checkpoint.resume=auto", "checkpoint.resume=auto"]
    lines = [line for line in errors.splitlines() if "restart" in line]
    assert [line.partition("; ")[2] for line in lines] == [
        "after step 1: restart 1 of at most 2, from the checkpoint of step 1 on disk",
        "after step 2: restart 2 of at most 2, from the checkpoint of step 2 on disk",
    ]
    assert all("was killed by SIGKILL" in line for line in lines)
    assert "error" not in errors


@pytest.mark.parametrize("code", [1, 2])
def test_program_that_cannot_begin_is_not_restarted(tmp_path: Path, code: int) -> None:
    actual, errors = run(tmp_path, f"sys.exit({code})", max_restarts=3)
    assert actual == code
    assert "restart" not in errors


def up(started: Started) -> list[int]:
    """Wait until two ranks run; return their processes."""
    return [started.reached("up", rank) for rank in range(2)]


def test_machine_without_further_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = os.listdir("/proc/self/fd")
    error = pytest.raises(RunError, match="cannot be started: Resource temporarily unavailable")
    with error, rank_store("127.0.0.1"):
        pass
    assert os.listdir("/proc/self/fd") == before
