"""A program that owns a server, for tests of its ends.

    python -m tests.helpers.sglang_owner CHECKPOINT FOLDER HOW READY

It starts a server, waits until that generates if READY is 1, says on a line of JSON where it is, and then ends as told:
"exit" or "exception" at once; with "wait" only by a signal.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings


def main(checkpoint: str, folder: str, how: str, ready: str) -> None:
    """Run the program that the module's docstring describes."""
    server = ServerProcess(
        ServerSettings(Path(checkpoint), args={"max_total_tokens": 20000}, start_timeout_s=280.0),
        index=0,
        folder=Path(folder),
    )
    server.start()
    said: dict[str, object] = {"pid": server.pid}
    if ready == "1":
        endpoint = server.wait_ready()
        said |= {"url": endpoint.url, "api_key": endpoint.keys.api_key, "admin_key": endpoint.keys.admin_key}
    print(json.dumps(said), flush=True)
    if how == "exception":
        raise RuntimeError("the trainer failed")
    while how == "wait":
        time.sleep(3600.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
