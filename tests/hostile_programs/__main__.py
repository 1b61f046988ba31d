"""`python -m tests.hostile_programs`: all hostile programs in the sandbox of this machine, as a table in Markdown."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mega_rl.rewards.sandbox import SandboxError
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool
from tests.hostile_programs.campaign import LIMITS, PROGRAMS, Report, run_all, table
from tests.hostile_programs.training import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs whose titles hold --only; return 1 if one has escaped."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="a part of 'family: name'")
    parser.add_argument("--list", action="store_true", help="list how each program ended, too")
    parser.add_argument("--train", action="store_true", help="in place of it a run whose answers are the programs")
    options = parser.parse_args(arguments)
    programs = [program for program in PROGRAMS if options.only in program.title]
    try:
        sandbox = LocalSandbox(Tool.find(), LIMITS)
        sandbox.check()
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 2
    if options.train:
        with tempfile.TemporaryDirectory() as folder:
            forging = [program for program in programs if program.tests is None]
            ended = train(Path(folder), forging, prompts=8)
        print(ended)
        return int(not ended.as_it_should)
    reports: list[Report] = []
    for report in run_all(sandbox, programs):
        reports.append(report)
        if report.escapes or options.list:
            print(f"{report.program.title}: {report.ended} {'; '.join(report.escapes)}", file=sys.stderr, flush=True)
    print("\n".join(table(reports)))
    return int(any(report.escapes for report in reports))


if __name__ == "__main__":
    sys.exit(main())
