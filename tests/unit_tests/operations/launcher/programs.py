"""Programs that stand for ranks: small, without torch, started and ended in hundredths of a second."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mega_rl.checkpoint.format.manifest import commit_text
from mega_rl.cli.launch import command
from mega_rl.operations.launcher.launch import Launch
from mega_rl.operations.launcher.ranks import KEY

ROOT = Path(__file__).parents[4]
WAIT_S = 60.0  # for events that take a tenth of a second on an idle machine
# Start of every rank's program: its place, and functions to leave files that tests wait for.
PREAMBLE = """
import atexit, os, signal, sys, time
from pathlib import Path
last_word = [0]
def exit(code):
    last_word.append(code if isinstance(code, int) else 1)
    raise SystemExit(code)
sys.exit = exit
# An end by os._exit says nothing.
atexit.register(lambda: os.pwrite(int(os.environ["MEGA_RL_LAST_WORD"]), bytes([last_word[-1] + 1]), rank))
rank, generation = int(os.environ["RANK"]), int(os.environ["MEGA_RL_GENERATION"])
def reached(point): Path(f"{point}.{rank}.{generation}").write_text(str(os.getpid()))
def wait_for(point, other):
    while not Path(f"{point}.{other}.{generation}").exists(): time.sleep(0.005)
def save(step):
    from tests.unit_tests.operations.launcher.programs import save_in
    save_in(Path("run/checkpoints"), step)
"""


@dataclass
class Started:
    """A launcher that runs, its folder, its ranks' files and the file of its standard error."""

    process: subprocess.Popen[bytes]
    folder: Path
    errors: Path

    def reached(self, point: str, rank: int, generation: int = 0) -> int:
        """Wait until a rank has come to a point; return its process."""
        file = self.folder / f"{point}.{rank}.{generation}"
        wait_until(lambda: file.exists() and file.read_text() != "", self)
        return int(file.read_text())

    def says(self, text: str) -> None:
        """Wait until it has written a text."""
        wait_until(lambda: text in self.errors.read_text(), self)

    def end(self) -> tuple[int, str]:
        """Return exit code and standard error."""
        return self.process.wait(WAIT_S), self.errors.read_text()


def write_program(folder: Path, program: str) -> None:
    """Write the program of every rank."""
    (folder / "rank_program.py").write_text(PREAMBLE + textwrap.dedent(program))


# A launcher that waits for other launchers only for a short time.
HURRIED = """
import sys
from mega_rl.cli.launch import main
from mega_rl.operations.launcher import channel, nodes
channel.SILENT_S, channel.BEAT_S, channel.JOIN_S, nodes.JOIN_S = {silent_s}, 0.2, {join_s}, {join_s}
sys.exit(main(sys.argv[1]))
"""


def start(
    folder: Path, program: str, *, key: str = "", nohup: bool = False, silent_s: float = 5.0, join_s: float = 60.0,
    **settings: object,
) -> Started:  # fmt: skip
    """Start a launcher of two ranks, unless `settings` say otherwise, that run `program` in `folder`."""

    def signals_of_a_terminal() -> None:
        """Undo what tests in the background, or under nohup themselves, have inherited: signals that are ignored."""
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    write_program(folder, program)
    launch = replace(Launch(("rank_program",), 2, run_dir="run"), **settings)  # type: ignore[arg-type]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **({KEY: key} if key else {})}
    number, errors = tempfile.mkstemp(".txt", "errors.", folder)
    hurried = [sys.executable, "-P", "-c", HURRIED.format(silent_s=silent_s, join_s=join_s), launch.to_json()]
    process = subprocess.Popen(
        hurried if launch.nnodes > 1 else command(launch),
        cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=number, preexec_fn=signals_of_a_terminal,
    )  # fmt: skip
    os.close(number)
    return Started(process, folder, Path(errors))


def run(folder: Path, program: str, **settings: object) -> tuple[int, str]:
    """Run a launcher to its end; return exit code and standard error."""
    return start(folder, program, **settings).end()  # type: ignore[arg-type]


def save_in(root: Path, step: int) -> None:
    """Write a complete checkpoint, as far as a launcher looks at one."""
    folder = root / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "COMMIT").write_text(commit_text(b"{}"))


def free_port() -> int:
    """Return a port of this machine at which no program listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool], started: Started | None = None) -> None:
    """Wait until a condition holds, WAIT_S at most, and no longer than the launcher lives."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert started is None or started.process.poll() is None, started.end()
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
