"""Child processes: output, deadlines, ends of whole groups, and the end with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mega_rl.environment import python_module
from mega_rl.processes import DEVNULL, PIPE, Child, ChildDeadlineError, ChildStartError

WITH_CHILD = """
import subprocess
inner = subprocess.Popen(["sleep", "100"])
print(inner.pid, flush=True)
"""
OUTPUT = (DEVNULL, PIPE, None)
IN_PARTS = """
import time
print("one", flush=True)
print("tw", end="", flush=True)
time.sleep(0.2)
print("o\\nrest", end="")
"""
PARENT = """
import sys, time
from mega_rl.processes import Child
child = Child("child", ["/bin/sleep", "100"], dies_by=15)
print(child.pid, flush=True)
time.sleep(100)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_until(condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_lines_come_whole_with_their_last_one() -> None:
    with Child("writer", python(IN_PARTS), streams=OUTPUT) as child:
        assert list(child.lines()) == ["one", "two", "rest"]
        assert child.wait(20.0) == 0


def test_deadline_names_the_child() -> None:
    late = r"server 3 \(process \d+\) has not ended within 0\.1 s"
    with Child("server 3", ["sleep", "100"]) as child, pytest.raises(ChildDeadlineError, match=late):
        child.wait(0.1)


def test_missing_program_is_named() -> None:
    with pytest.raises(ChildStartError, match="the writer cannot be started: No such file or directory"):
        Child("the writer", ["/no/such/program"])


@pytest.mark.parametrize(
    ("code", "words"), [("exit(3)", "ended with exit code 3"), ("import os; os.abort()", "died of SIGABRT")]
)
def test_exit_code_is_known_before_it_is_waited_for(code: str, words: str) -> None:
    child = Child("child", python(code), streams=(DEVNULL, DEVNULL, DEVNULL))
    assert wait_until(lambda: child.exit_code is not None)
    assert os.getpgid(child.pid) == child.pid  # its number is still its own
    assert child.end_in_words() == words
    assert child.end() == child.exit_code


def test_end_kills_what_a_child_has_started() -> None:
    child = Child("child", python(WITH_CHILD), streams=OUTPUT)
    inner = int(next(child.lines()))
    assert wait_until(lambda: child.exit_code == 0)
    assert not is_gone(inner)
    assert child.end() == 0
    assert wait_until(lambda: is_gone(inner))


def test_end_asks_first_and_then_kills() -> None:
    polite = python("import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); signal.pause()")
    stubborn = python("import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()")
    codes = []
    for command in (polite, stubborn):
        child = Child("child", command, streams=OUTPUT)
        next(child.lines())
        codes.append(child.end(1.0))
    assert codes == [7, -signal.SIGKILL]


def test_child_dies_with_its_killed_parent() -> None:
    with Child("parent", python(PARENT), streams=OUTPUT) as parent:
        inner = int(next(parent.lines()))
        assert not is_gone(inner)
        parent.signal(signal.SIGKILL)
        assert wait_until(lambda: is_gone(inner))


def test_child_of_an_ended_parent_does_not_start(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    command = python_module("mega_rl.processes", "1", str(int(signal.SIGTERM)), "/bin/touch", str(touched))
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM
    assert not touched.exists()


def test_child_does_not_get_blocked_signals() -> None:
    child = Child("child", ["sleep", "0.3"], blocks=[signal.SIGTERM])
    child.signal(signal.SIGTERM)
    assert child.wait(20.0) == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
