"""Plant the faults of tests/fault_table.py one by one and report which test finds each: `make planted-faults`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fault import Fault
from tests.fault_table import FAULTS

PROJECT = Path(__file__).parents[1]
PACKAGE = "mega_rl"
DEADLINE_S = 300.0
# pytest's exit codes other than 0, passed, and 1, failed.
REASONS = {2: "interrupted", 3: "internal error", 4: "usage error", 5: "no tests"}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """End of one run of pytest: passed, a failing test, or another reason."""

    test: str  # the first failing one; empty without
    reason: str  # why it ended otherwise; empty for a run that passed or failed
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether all tests passed."""
        return not self.test and not self.reason


def locate(fault: Fault, tree: Path) -> Path:
    """Return the file of the package that holds the fault's old text.

    Raises:
        ValueError: the text stands in no place or in several.
    """
    counts = {path: path.read_text("utf-8").count(fault.old) for path in sorted((tree / PACKAGE).rglob("*.py"))}
    places = [path for path, count in counts.items() for _ in range(count)]
    if len(places) != 1:
        where = ", ".join(str(path.relative_to(tree)) for path in places) or f"nowhere in {PACKAGE}/"
        raise ValueError(f"{fault.name}: its text must stand once, stands {len(places)} times: {where}")
    return places[0]


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[Path]:
    """Plant a fault in the tree for the block; yield the file. Raises ValueError as `locate`."""
    path = locate(fault, tree)
    text = path.read_text("utf-8")
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        yield path
    finally:
        path.write_text(text, "utf-8")


def outcome(code: int, output: str, seconds: float) -> Outcome:
    """Return the outcome of pytest's exit code and output; an error in a fixture is a failing test, too."""
    match = _FAILED.search(output)
    if code == 0:
        return Outcome("", "", seconds)
    if code == 1 and match:
        return Outcome(match[1], "", seconds)
    return Outcome("", REASONS.get(code, f"no test failed, exit code {code}"), seconds)


def run_tests(tree: Path, targets: Sequence[str], *, deadline_s: float = DEADLINE_S) -> Outcome:
    """Run these targets of the tree until the first failure; what is left of their processes ends with them."""
    words = [word for target in targets for word in target.split(" ", 2)]
    command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])  # another Megatron-Core's folder
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=tree, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return Outcome("", f"not done within {deadline_s:.0f} s", time.monotonic() - begin)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left, as should be
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return outcome(process.returncode, output, time.monotonic() - begin)


def copy_tree(tree: Path, target: Path) -> None:
    """Copy the tree's files that git tracks, and link its environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, target / name)
    (target / ".venv").symlink_to((tree / ".venv").resolve())


def broken_targets(tree: Path, faults: Sequence[Fault]) -> list[str]:
    """Run every distinct target without a fault; return a line for each that does not pass."""
    lines = []
    for targets in dict.fromkeys(fault.targets for fault in faults):
        result = run_tests(tree, targets)
        if not result.passed:
            lines.append(f"{' '.join(targets)}: does not pass without a fault: {result.test or result.reason}")
    return lines


def try_fault(fault: Fault, tree: Path) -> tuple[list[str], bool]:
    """Plant one fault and run its tests; return its row of the table, and whether a test found it."""
    try:
        with planted(fault, tree) as path:
            result = run_tests(tree, fault.targets)
    except ValueError as error:
        return [fault.area, fault.name, "-", str(error), "-"], False
    ending = result.test or f"NOT FOUND: {result.reason or 'all tests passed'}"
    row = [fault.area, fault.name, str(path.relative_to(tree / PACKAGE)), ending, f"{result.seconds:.0f}"]
    return row, bool(result.test)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose area and name hold this text")
    parser.add_argument("--areas", nargs="*", default=[], metavar="AREA", help="faults of these areas")
    parser.add_argument("--tree", type=Path, default=PROJECT, metavar="FOLDER", help="another checkout of the project")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the targets without a fault first")
    options = parser.parse_args(arguments)
    in_areas = [fault for fault in FAULTS if not options.areas or fault.area in options.areas]
    chosen = [fault for fault in in_areas if options.only in f"{fault.area}: {fault.name}"]
    if unknown := set(options.areas) - {fault.area for fault in FAULTS}:
        parser.error(f"--areas {' '.join(sorted(unknown))}: legal: {', '.join(dict.fromkeys(f.area for f in FAULTS))}")
    if not chosen:
        parser.error(f"--only={options.only}: no fault's area and name hold this text")
    table = Table("area", "fault", "where", "found by", "s")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        copy_tree(options.tree.resolve(), Path(folder))
        if not options.no_baseline and (lines := broken_targets(Path(folder), chosen)):
            print(*lines, sep="\n", file=sys.stderr)
            return 1
        for fault in chosen:
            row, is_found = try_fault(fault, Path(folder))
            print(" | ".join(row), file=sys.stderr, flush=True)
            table.add_row(*row)
            missed += not is_found
    Console(width=200).print(table)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
