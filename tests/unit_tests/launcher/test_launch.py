"""A launcher as a process, with ranks that are small programs: ends, signals, restarts, its own death."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from mega_rl.launcher.launch import Launch
from mega_rl.launcher.ranks import LOST_PEER
from mega_rl.storage.disk import lock_file
from tests.unit_tests.launcher.programs import Started, is_gone, run, start, wait_until

ENDLESS = "reached('up'); time.sleep(600)"
# Rank 0 ends as `mega_rl.cli` does with an error: its line on standard error, its last words in its record.
SAYS_WHY = """
from mega_rl.health.records import LastWords, write_record
from tests.unit_tests.health.examples import record
if rank == 0:
    words = LastWords("error", "the reward service answers 500", 2, "reward", None)
    write_record(Path("run"), record(0, world_size=2, pid=os.getpid(), ended=words))
    sys.exit("error: the reward service answers 500")
time.sleep(600)
"""


def test_ranks_get_the_variables_of_torchrun_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGA_RL_LAUNCH_KEY", "secret")
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
        "NCCL_SOCKET_IFNAME": ("lo", "lo"),
    }.items():
        assert (first[name], second[name]) == values
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert int(first["OMP_NUM_THREADS"]) >= 1
    assert not any("secret" in text for text in (*first.values(), *second.values()))


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    program = "Path(f'env{rank}').write_text(os.environ['GLOO_SOCKET_IFNAME'] + os.environ['OMP_NUM_THREADS'])"
    assert run(tmp_path, program, nproc_per_node=1)[0] == 0
    assert (tmp_path / "env0").read_text() == "eth73"


@pytest.mark.parametrize(("max_restarts", "last"), [(0, ""), (1, "; again after step 2, where it failed before")])
def test_a_rank_that_says_why_it_ends_has_the_last_word(tmp_path: Path, max_restarts: int, last: str) -> None:
    """Unless the launcher has more to say: why it does not start the ranks again."""
    code, errors = run(tmp_path, SAYS_WHY, run_dir="run", max_restarts=max_restarts)
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: rank 0" if last else "error: the reward service answers 500")
    assert last in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("sys.exit(1)", 1, "error: rank 1 (process PID) ended with exit code 1"),
        ("os._exit(0)", 1, "error: rank 1 (process PID) ended with exit code 0 before its work was done"),
        ("os._exit(2)", 1, "error: rank 1 (process PID) ended with exit code 2 before its work was done"),
        ("os._exit(75)", 1, "error: rank 1 (process PID) ended with exit code 75 before its work was done"),
        ("os._exit(143)", 1, "error: rank 1 (process PID) ended with exit code 143 before its work was done"),
        ("sys.exit(2)", 2, ""),
        ("sys.exit(143)", 143, ""),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL: perhaps the machine is out of memory"),
        ("os.kill(os.getpid(), 11)", 139, "error: rank 1 (process PID) was killed by SIGSEGV"),
    ],
)
def test_the_first_failure_gives_the_exit_code_and_ends_the_others(
    tmp_path: Path, end: str, code: int, line: str
) -> None:
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


def test_ranks_that_all_end_too_early_have_failed(tmp_path: Path) -> None:
    """Also by another program in their place; at the step that failed before, the run is given up."""
    program = "os._exit(0) if rank else os.execv('/bin/true', ['true'])"
    code, errors = run(tmp_path, program, max_restarts=2)
    assert code == 1
    assert "ended with exit code 0 before its work was done; again after step 0" in errors.splitlines()[-1]


def test_a_launcher_without_a_thread_says_so_in_one_line(tmp_path: Path) -> None:
    """Its ranks end; the interpreter's start-up file stands for a limit that is reached."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        'def start(thread): raise RuntimeError("can\'t start new thread")\n'
        "if 'mega_rl.launcher' in sys.orig_argv: threading.Thread.start = start\n"
    )
    started = start(tmp_path, "reached('up'); time.sleep(600)", run_dir="run")
    code, errors = started.end()
    assert code == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert "allows no further thread or process (can't start new thread)" in errors.splitlines()[-1]


def test_a_rank_that_only_lost_another_is_not_blamed(tmp_path: Path) -> None:
    """Though it ends first: the one at fault may still be closing its files."""
    program = f"""
        if rank == 0: sys.exit({LOST_PEER})
        time.sleep(0.5)
        sys.exit(3)
    """
    code, errors = run(tmp_path, program)
    assert code == 3
    assert "error: rank 1 " in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_ranks_which_end_by_themselves(tmp_path: Path, number: signal.Signals) -> None:
    program = """
        def stop(number, frame):
            Path(f"saved.{rank}").write_text(str(number)); sys.exit(128 + number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, stop)
        reached("up"); time.sleep(600)
    """
    started = start(tmp_path, program, max_restarts=3, run_dir="run")
    up(started)
    started.process.send_signal(number)
    assert started.end()[0] == 128 + number
    assert [(tmp_path / f"saved.{rank}").read_text() for rank in range(2)] == [str(number.value)] * 2


def test_a_stop_while_ranks_import_is_said_in_one_line(tmp_path: Path) -> None:
    started = start(tmp_path, ENDLESS)
    up(started)
    started.process.send_signal(signal.SIGTERM)
    code, errors = started.end()
    assert code == 143
    assert errors.splitlines()[-1] == "error: stopped by SIGTERM before the ranks could save"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_signals_that_ranks_do_not_catch_end_them(tmp_path: Path, number: signal.Signals) -> None:
    started = start(tmp_path, f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {ENDLESS}")
    up(started)
    started.process.send_signal(number)
    code, errors = started.end()
    assert code == 128 + number
    assert "error" not in errors


def test_a_second_signal_is_handed_on_as_well(tmp_path: Path) -> None:
    program = """
        count = 0
        def stop(number, frame):
            global count
            count += 1
            reached(f"signal{count}")
            if count == 2: sys.exit(130)
        signal.signal(signal.SIGINT, stop)
        reached("up")
        while True: time.sleep(0.01)
    """
    started = start(tmp_path, program)
    up(started)
    for count in (1, 2):
        started.process.send_signal(signal.SIGINT)
        started.reached(f"signal{count}", 0)
    assert started.end()[0] == 130


def test_a_signal_before_the_ranks_have_started_starts_none(tmp_path: Path) -> None:
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


def test_sighup_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    program = "reached('up'); wait_for('go', 0); sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_DFL)"
    started = start(tmp_path, program, nohup=True)
    up(started)
    started.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert started.process.poll() is None
    (tmp_path / "go.0.0").write_text("")
    assert started.end()[0] == 0, "ranks are ended by SIGHUP"


@pytest.mark.parametrize("warden_lives", [True, False])
def test_ranks_of_a_killed_launcher_are_asked_to_end(tmp_path: Path, warden_lives: bool) -> None:
    """By the kernel; and by the warden, should it be there."""
    program = """
        def stop(number, frame): reached("saved"); sys.exit(143)
        signal.signal(signal.SIGTERM, stop)
        from mega_rl.storage.disk import lock_file
        held = lock_file(Path(f"lock{rank}"))
        reached("up")
        time.sleep(600)
    """
    started = start(tmp_path, program)
    pids = up(started)
    below = psutil.Process(started.process.pid).children(recursive=True)
    if not warden_lives:
        next(process for process in below if "mega_rl.launcher.warden" in process.cmdline()).kill()
    started.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    assert all((tmp_path / f"saved.{rank}.0").exists() for rank in range(2))
    os.close(lock_file(tmp_path / "lock0"))
    wait_until(lambda: all(is_gone(process.pid) for process in below))  # the store and the warden
    assert len(below) == 4


def test_a_killed_ranks_processes_end_with_it(tmp_path: Path) -> None:
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


def test_ranks_are_restarted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    code, errors = run(tmp_path, RESTARTED, max_restarts=2, run_dir="run")
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


def test_restarts_can_be_used_up(tmp_path: Path) -> None:
    code, errors = run(tmp_path, RESTARTED, max_restarts=1, run_dir="run")
    assert code == 137
    assert errors.splitlines()[-1].endswith("; after step 2: --max-restarts=1 are used up")


def test_what_was_there_before_is_not_resumed(tmp_path: Path) -> None:
    """With checkpoint.resume=never the ranks would not have: they begin anew as they did."""
    folder = tmp_path / "run/checkpoints/step_000009"
    program = """
        Path(f"arguments.{rank}.{generation}").write_text(" ".join(sys.argv[1:]))
        if generation == 0: os.kill(os.getpid(), 9)
    """
    folder.mkdir(parents=True)
    write_complete(folder)
    code, _ = run(tmp_path, program, nproc_per_node=1, max_restarts=1, run_dir="run")
    assert code == 0
    assert (tmp_path / "arguments.0.1").read_text() == ""


def test_a_fault_that_comes_back_at_the_same_step_is_given_up(tmp_path: Path) -> None:
    program = "save(4) if generation == 0 else None; os.kill(os.getpid(), 11)"
    code, errors = run(tmp_path, program, nproc_per_node=1, max_restarts=9, run_dir="run")
    assert code == 139
    assert errors.count("restart 1 of at most 9") == 1
    assert errors.splitlines()[-1].endswith(
        "was killed by SIGSEGV; again after step 4, where it failed before the restart: given up"
    )


@pytest.mark.parametrize("code", [1, 2])
def test_a_program_that_says_why_it_cannot_begin_is_not_asked_again(tmp_path: Path, code: int) -> None:
    actual, errors = run(tmp_path, f"sys.exit({code})", max_restarts=3, run_dir="run")
    assert actual == code
    assert "restart" not in errors


def test_a_stop_between_two_starts_is_the_end(tmp_path: Path) -> None:
    """The signal comes while the ranks of the first generation are being ended."""
    program = """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        reached("up")
        if rank == 1: save(1); os.kill(os.getpid(), 9)
        time.sleep(600)
    """
    started = start(tmp_path, program, max_restarts=3, run_dir="run")
    pid = started.reached("up", 1)
    started.reached("up", 0)
    wait_until(lambda: is_gone(pid))
    started.process.send_signal(signal.SIGTERM)
    code, errors = started.end()
    assert code in (137, 143), errors
    assert "restart" not in errors
    assert not (tmp_path / "up.0.1").exists()


def test_a_launch_travels_as_json() -> None:
    settings = Launch(("m", "a b", 'c="ä"'), 3, max_restarts=2, run_dir="runs/x")
    assert Launch.parse(settings.command[-1]) == settings


def up(started: Started) -> list[int]:
    """Wait until two ranks run; return their processes."""
    return [started.reached("up", rank) for rank in range(2)]


def write_complete(folder: Path) -> None:
    from mega_rl.checkpoint.format.manifest import commit_text

    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "COMMIT").write_text(commit_text(b"{}"))
