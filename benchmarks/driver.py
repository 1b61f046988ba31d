"""Shared parts of the benchmarks: child programs with deadlines, paired ratios with intervals, verdicts, result files.

Every wait for a child program has a deadline. A child that ends too early or does not answer ends the benchmark with
the last lines of that child's output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).parents[1]
BUSY = 1.5  # load average before a run above which it says nothing
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Figure:
    """Median of paired ratios ours / theirs with its 95 % bootstrap interval; a target holds for `high`."""

    name: str
    median: float
    low: float
    high: float
    target: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the upper end of the interval is above the target."""
        return self.target is not None and self.high > self.target

    def __str__(self) -> str:
        bound = "" if self.target is None else f", target {self.target:.3g}"
        return f"{self.name}: {self.median:.3f} ({self.low:.3f} to {self.high:.3f}{bound})"


def compare(name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None) -> Figure:
    """Return the figure of two equally long series, whose values of one position were measured in one round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Figure(name, statistics.median(ratios), *bootstrap(ratios), target)


def bootstrap(ratios: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


class Report:
    """The result of a benchmark: its figures, what it missed, and the file that `--json` names."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tiny, self._file = bool(arguments.tiny), arguments.json
        self.load = os.getloadavg()[0]
        self.figures: list[Figure] = []
        self.missed: list[str] = []  # targets
        self.wrong: list[str] = []  # results that differ between contenders: they fail a tiny run as well
        print(f"load average before the run: {self.load:.1f}", flush=True)

    def add(self, figure: Figure) -> str:
        """Take a figure in; returns its line."""
        self.figures.append(figure)
        if figure.missed:
            self.missed.append(str(figure))
        return str(figure)

    def end(self, samples: Any = None, **numbers: Any) -> int:
        """Write the file and print the verdict.

        Args:
            samples: every measurement, for the file.
            numbers: what tables show besides the figures.

        Returns:
            The exit code: 1 where a target was missed or results differ, 2 where the machine was busy before the run.
        """
        if self._file:
            figures = [asdict(figure) for figure in self.figures]
            result = {"about": about(self.load), "tiny": self._tiny, "figures": figures, "missed": self.missed}
            self._file.write_text(json.dumps({**result, **numbers, "samples": samples}, indent=1) + "\n")
        for line in self.wrong:
            print(f"wrong: {line}")
        if self._tiny:
            print("a tiny run: the program works; its times say nothing")
            return int(bool(self.wrong))
        for line in self.missed:
            print(f"missed: {line}")
        if self.load > BUSY:
            print("void: the machine was busy before the run began")
            return 2
        return int(bool(self.missed or self.wrong))


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes: tests the program, not its speed")
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser


def about(load: float) -> dict[str, Any]:
    """Return where and on what a run was made."""
    packages = {}
    for name in ("torch", "megatron-core", "transformers", "trl", "mbridge", "sglang"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    changed = " changed" if _git("status", "--porcelain", "-uno") else ""
    return {
        "date": date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + changed,
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(load, 2),
        "python": platform.python_version(),
        "packages": packages,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(threads: int = 1) -> dict[str, str]:
    """Return this process's environment with so many threads and this checkout's package."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return os.environ | own


def run(arguments: Sequence[str], *, deadline_s: float, threads: int = 1, **variables: str) -> None:
    """Run a Python program to its end.

    Raises:
        SystemExit: it failed or took longer than `deadline_s`; the message has its last lines.
    """
    with child(arguments, threads=threads, **variables) as (process, log):
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{_named(arguments)} did not end within {deadline_s:g} s; {tail(log)}") from None
        if code:
            raise SystemExit(f"{_named(arguments)} ended with exit code {code}; {tail(log)}")


@contextmanager
def child(
    arguments: Sequence[str], *, threads: int = 1, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a Python program and yield it with the file of its output; ends it and all below it."""
    with tempfile.NamedTemporaryFile(prefix="bench_", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(threads) | variables,
        )
        try:
            yield process, Path(log.name)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> None:
    """Ask a program and all below it to end, then kill what is left."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        process.wait()
        return
    for step in (signal.SIGTERM, signal.SIGKILL):
        for one in family:
            try:
                one.send_signal(step)
            except psutil.NoSuchProcess:
                continue
        family = psutil.wait_procs(family, timeout=grace_s)[1]
    process.wait()


def _named(arguments: Sequence[str]) -> str:
    return " ".join(Path(word).name if "/" in word else word for word in arguments)[:200]


def tail(log: Path, characters: int = 4000) -> str:
    """Return the last lines of a program's output, with a heading."""
    text = log.read_text(errors="replace")[-characters:].strip()
    return f"its last lines:\n{text}" if text else "it printed nothing"


class Contender:
    """A running program that answers each command with one JSON line; `Commands` is its end."""

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], *, threads: int = 1, **variables: str
    ) -> None:
        self.name = name
        folder.mkdir(parents=True)
        for pipe in ("commands", "answers"):
            os.mkfifo(folder / pipe)
        # Both are open for reading and writing, so that neither side waits in `open` for the other.
        self._commands = os.open(folder / "commands", os.O_RDWR | os.O_CLOEXEC)
        self._answers = os.open(folder / "answers", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._text = b""
        self._context = child(arguments, threads=threads, **variables)
        self.process, self._log = self._context.__enter__()

    def send(self, command: str) -> None:
        """Give a command; `answer` waits for what comes of it."""
        os.write(self._commands, f"{command}\n".encode())

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            SystemExit: the program ended or is silent; the message has its last lines.
        """
        deadline = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._text:
                ended = self.process.poll()
                if ready.select(0.2):
                    self._text += os.read(self._answers, 1 << 16)
                elif ended is not None:
                    raise SystemExit(f"{self.name} ended early, with exit code {ended}; {tail(self._log)}")
                elif time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} gave no answer within {deadline_s:g} s; {tail(self._log)}")
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str, deadline_s: float) -> dict[str, Any]:
        """Give a command and return its answer."""
        self.send(command)
        return self.answer(deadline_s)

    def peak_bytes(self) -> int:
        """Return the sum of the greatest resident memory of the program's processes; a launcher counts as well."""
        root = psutil.Process(self.process.pid)
        return sum(_status_bytes(one.pid, "VmHWM") for one in (root, *root.children(recursive=True)))

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the program and close the pipes."""
        self._context.__exit__(None, None, None)
        os.close(self._commands)
        os.close(self._answers)


def _status_bytes(pid: int | str, field: str) -> int:
    """Return a field of /proc/PID/status in bytes, 0 where it is missing."""
    rows = (line.split() for line in _lines(f"/proc/{pid}/status"))
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == f"{field}:"), 0)


def own_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes; mapped pages of files count."""
    return _status_bytes("self", field)


class Commands:
    """A contender's end of its two pipes: iterate over the commands and answer each."""

    def __init__(self, folder: Path) -> None:
        self._commands: TextIO = open(folder / "commands")  # noqa: SIM115
        self._answers: TextIO = open(folder / "answers", "w")  # noqa: SIM115

    def __iter__(self) -> Iterator[str]:
        return iter(line.strip() for line in self._commands)

    def answer(self, record: dict[str, Any]) -> None:
        """Send one JSON line."""
        self._answers.write(json.dumps(record) + "\n")
        self._answers.flush()


def alternating(contenders: Iterable[Any], turn: int) -> list[Any]:
    """Return the contenders of a round: forwards and backwards in turn, so that a drift meets all alike."""
    order = list(contenders)
    return order if turn % 2 == 0 else order[::-1]
