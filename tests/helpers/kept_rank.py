"""Program that has a scripted server as the first rank of a host has one, for tests of servers that outlive it.

    python -m tests.helpers.kept_rank FOLDER HOW

It waits for the server, unless HOW is "never starts", says on a line of JSON where it is, and sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from mega_rl.rollout.sglang.server import process as server
from mega_rl.rollout.sglang.server.installation import Installation

SETTINGS = server.ServerSettings(Path("/some/checkpoint"), start_timeout_s=60.0)


def scripted(folder: Path, how: str = "well", settings: server.ServerSettings = SETTINGS) -> server.ServerProcess:
    """Return server 0, which is `scripted_server`."""
    server.PROGRAM = (sys.executable, "-m", "tests.helpers.scripted_server", how)
    server.require_sglang = lambda **_: Installation("0.5.20", None)
    return server.ServerProcess(settings, index=0, folder=folder)


def main(folder: str, how: str) -> None:
    """Run the program that the module's docstring describes."""
    process = scripted(Path(folder), how)
    process.start()
    url = "" if how == "never starts" else process.wait_ready().url
    print(json.dumps({"pid": process.pid, "url": url}), flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
