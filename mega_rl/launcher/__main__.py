"""The launcher of one node as a program; see `mega_rl.launcher.launch.Launch`."""

from __future__ import annotations

import sys

from mega_rl.launcher.launch import Launch, launch
from mega_rl.tracking import progress
from mega_rl.tracking.progress.terminal import show_progress

if __name__ == "__main__":
    show_progress(live=False, beside_ranks=True)
    try:
        code = launch(Launch.parse(sys.argv[1]))
    finally:
        progress.close()
    sys.exit(code)
