"""How long a command leaves its terminal silent: `python -m tests.terminal_check [--columns N] COMMAND...`.

Prints when the first characters came and the longest silence; a change of the live line is no silence. Exit code 1
where the first line takes longer than a second or a silence longer than two, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys

from tests.helpers.terminal import record

FIRST_S = 1.0
SILENCE_S = 2.0
SHOWN = 4  # silences


def main() -> int:
    """Record the command, print its figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600.0, help="end the command after so long")
    parser.add_argument("--show", action="store_true", help="print what it has left on the screen")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    recording = record(given.command, columns=given.columns, timeout_s=given.seconds)
    silences = recording.silences()
    if given.show:
        print(recording.screen())
    print(f"first characters after {recording.first_s:.2f} s (at most {FIRST_S:g})")
    longest = ", ".join(f"{seconds:.2f} s from second {at:.1f} on" for seconds, at in silences[:SHOWN])
    print(f"longest silences: {longest} (at most {SILENCE_S:g} s)")
    print(f"ended after {recording.ended_s:.1f} s with exit code {recording.exit_code}")
    return int(recording.first_s > FIRST_S or silences[0][0] > SILENCE_S)


if __name__ == "__main__":
    sys.exit(main())
