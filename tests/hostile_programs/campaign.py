"""Campaign of hostile programs: each in a sandbox, with canaries outside that show an escape."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import mega_rl
from mega_rl.rewards.code import AssertCase, CallCase, Case, StdioCase, read_cases
from mega_rl.rewards.sandbox import MIB, Execution, Limits, Sandbox, SandboxError
from mega_rl.rewards.sandbox.local import used_bytes
from mega_rl.rewards.sandbox.suites import UnknownTestsError, unfit
from tests.hostile_programs.forging import FORGING
from tests.hostile_programs.judging import JUDGING
from tests.hostile_programs.programs import ESCAPED, Hostile
from tests.hostile_programs.reaching import REACHING
from tests.hostile_programs.resources import RESOURCES

PROGRAMS: list[Hostile] = [*RESOURCES, *REACHING, *FORGING, *JUDGING]
LIMITS = Limits(timeout_s=2.0, memory_bytes=128 * MIB, processes=12, output_bytes=64 << 10, tmp_bytes=8 * MIB)
FORGED, VACUOUS, REFUSED = "a verdict was forged", "vacuous tests are accepted", "a right program was refused"
WRONG = {"forged": FORGED, "vacuous": VACUOUS, "right refused": REFUSED}  # verdicts
LATEST_S = 5.0  # for a program to have ended, with a busy machine's delay


@dataclass(frozen=True)
class Report:
    """End of one hostile program."""

    program: Hostile
    ended: str  # "timeout", "memory", "output", "exit code 1", ...
    escapes: tuple[str, ...]  # in words; none is as it should be
    peak_bytes: int  # resident, of all of the sandbox's processes
    seconds: float


class Canaries:
    """Things outside that a hostile program aims at, and whether it has reached them."""

    def __init__(self, folder: Path) -> None:
        self.secret = secrets.token_hex(16)
        self._file = folder / "secret"
        self._file.write_text(self.secret)
        self._listing = sorted(os.listdir(folder))
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._unix, self._abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self._path, name = str(folder / "socket"), f"canary-{secrets.token_hex(8)}"
        self._unix.bind(self._path)
        self._abstract.bind(f"\0{name}")
        self._listing = sorted(os.listdir(folder))
        for server in (self._unix, self._abstract):
            server.listen()
        for server in (self._tcp, self._unix, self._abstract):
            server.setblocking(False)
        os.environ["A_SECRET"] = self.secret
        self._hostname = socket.gethostname()
        self._clock = time.time() - time.monotonic()
        self.aims = {
            "secret": self.secret,
            "half": self.secret[:16],
            "other": self.secret[16:],
            "secret_file": str(self._file),
            "port": self._tcp.getsockname()[1],
            "unix": self._path,
            "abstract": name,
            "pid": os.getpid(),
            "package": mega_rl.__file__,
        }

    def fill(self, text: str) -> str:
        """Return a program's text with its aims."""
        pattern = re.compile(r"\{(" + "|".join(self.aims) + r")(!r)?\}")
        return pattern.sub(lambda m: repr(self.aims[m[1]]) if m[2] else str(self.aims[m[1]]), text)

    def reached(self) -> Iterator[str]:
        """Yield the canaries that were reached, in words."""
        if self._file.read_text() != self.secret or sorted(os.listdir(self._file.parent)) != self._listing:
            yield "a file outside was changed"
        for name, server in (("tcp", self._tcp), ("unix", self._unix), ("abstract", self._abstract)):
            try:
                server.accept()[0].close()
            except BlockingIOError:
                continue
            yield f"the {name} listener was reached"
        if socket.gethostname() != self._hostname:
            yield "the host has another name"
        if abs(time.time() - time.monotonic() - self._clock) > 60:
            yield "the clock was set"

    def close(self) -> None:
        os.environ.pop("A_SECRET", None)
        for server in (self._tcp, self._unix, self._abstract):
            server.close()


@contextmanager
def canaries() -> Iterator[Canaries]:
    """Set canaries up in a folder that everybody may read and write; a sandbox has its own /tmp, so not there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o777)
        own = Canaries(Path(name))
        os.chmod(Path(name, "secret"), 0o666)
        try:
            yield own
        finally:
            own.close()


class _Peak(threading.Thread):
    """Measurement of the memory of this process's descendants, every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._ended = 0, threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.005):
            for bubblewrap in own.children():  # a copy of this process until it has become bubblewrap
                with contextlib.suppress(psutil.Error):
                    self.bytes = max(self.bytes, *(used_bytes(child.pid) for child in bubblewrap.children()), 0)

    def stop(self) -> int:
        """End the measurement; return the largest number of bytes."""
        self._ended.set()
        self.join()
        return self.bytes


def run_program(sandbox: Sandbox, program: Hostile, own: Canaries) -> Report:
    """Run one hostile program and look at the canaries."""
    text, begin, peak, watched = own.fill(program.text), time.monotonic(), _Peak(), Watched(sandbox)
    before = set(psutil.Process().children())
    peak.start()
    escapes: list[str] = []
    try:
        passed, ran = _passes(watched, program, text), watched.last
    except SandboxError as error:
        passed, ran = False, None
        escapes.append(f"the sandbox failed: {error}")
    seconds = time.monotonic() - begin
    peak_bytes = peak.stop()
    if passed != program.passes:
        escapes.append(REFUSED if program.passes else VACUOUS if program.kind == "vacuous" else FORGED)
    if ran is not None:
        output = (ran.stdout + ran.stderr).decode(errors="replace")
        if ESCAPED in output.splitlines():
            escapes.append(f"the program succeeded: {output[:100]!r}")
        if own.secret in output:
            escapes.append("the secret was read")
    if seconds > LATEST_S:
        escapes.append(f"took {seconds:.1f} s")
    escapes += [f"process {child.pid} is left" for child in psutil.Process().children() if child not in before]
    escapes += own.reached()
    return Report(program, _ended(ran), tuple(escapes), peak_bytes, seconds)


@dataclass
class Watched:
    """A sandbox that keeps its last run."""

    sandbox: Sandbox
    last: Execution | None = None

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        """Run a program."""
        self.last = self.sandbox.run(program, stdin, timeout_s=timeout_s)
        return self.last


def _passes(sandbox: Sandbox, program: Hostile, text: str) -> bool:
    """Run a program; return whether one that forges has passed its tests."""
    secret = 5 + secrets.randbelow(10**6)
    if program.kind == "plain" or (program.kind == "vacuous" and _refused(sandbox, program)):
        sandbox.run(text, b"", timeout_s=LIMITS.timeout_s)
        return False
    if program.kind in ("row", "vacuous"):
        passes = [case.run(sandbox, text, LIMITS.timeout_s) for case in read_cases(program.tests, program.row)]
        return program.kind == "vacuous" or all(passes)
    cases: dict[str, Case] = {
        "asserts": AssertCase(f"assert f(1) == 4\nassert f({secret}) == {3 * secret + 1}\nassert abs(f(2) - 7) < 1e-6"),
        "call": CallCase("f", [secret], 3 * secret + 1),
        "stdin": StdioCase(f"{secret}\n", f"{3 * secret + 1}\n"),
    }
    return cases[program.kind].run(sandbox, text, LIMITS.timeout_s)


def _refused(sandbox: Sandbox, program: Hostile) -> bool:
    """Return whether a row with these tests is refused before anything is judged by it."""
    try:
        suites = [case.suite for case in read_cases(program.tests, program.row) if isinstance(case, AssertCase)]
    except UnknownTestsError:
        return True
    return any(unfit(sandbox, suites, LIMITS.timeout_s))


def _ended(ran: Execution | None) -> str:
    if ran is None:
        return "no run"
    return ran.status if ran.status != "finished" else f"exit code {ran.return_code}"


def run_all(sandbox: Sandbox, programs: Sequence[Hostile]) -> Iterator[Report]:
    """Yield the end of each program; afterwards a harmless one must run as ever."""
    with ExitStack() as stack:
        own = stack.enter_context(canaries())
        for program in programs:
            yield run_program(sandbox, program, own)


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the lines of a Markdown table, a row a family."""
    heads = ("family", "programs", "how they ended", *WRONG, "escapes", "largest memory", "longest")
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    families = list(dict.fromkeys(report.program.family for report in reports))
    for name in families:
        own = [report for report in reports if report.program.family == name]
        yield _row(name, own)
    yield _row("**all**", reports)


def _row(name: str, reports: Sequence[Report]) -> str:
    ends = sorted({report.ended for report in reports})
    counts = ", ".join(f"{sum(report.ended == end for report in reports)} {end}" for end in ends)
    kinds = [sum(kind in report.escapes for report in reports) for kind in WRONG.values()]
    others = sum(bool({*report.escapes} - {*WRONG.values()}) for report in reports)
    wrong = " | ".join(map(str, [*kinds, others]))
    peak = max(report.peak_bytes for report in reports) / MIB
    longest = max(report.seconds for report in reports)
    return f"| {name} | {len(reports)} | {counts} | {wrong} | {peak:.0f} MiB | {longest:.1f} s |"
