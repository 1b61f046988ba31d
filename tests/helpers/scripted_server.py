"""Program in SGLang's place that answers what a start and an adoption ask for, with the line of life of a real server.

    python -m tests.helpers.scripted_server HOW SGLANG_ARGUMENTS

HOW is "well", "never starts", or a path whose requests are answered 503. The file that the environment names as
SCRIPTED_HOW holds such a word for later. While generation is paused, /generate waits. Every path that is asked for goes
to the log.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from mega_rl.rollout.sglang.server import launcher, private_files


def main(how: str, arguments: list[str]) -> None:
    """Serve until standard input ends."""
    os.environ.pop(launcher.DEVICE_VARIABLE)  # no stand-ins: nothing is imported that needs them
    private_files.install = lambda _: None
    launcher.prepare(leads=True)
    options = dict(pairwise(arguments))
    later = Path(os.environ["SCRIPTED_HOW"])
    going = threading.Event()
    going.set()
    if how == "never starts":
        time.sleep(600.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            print("asked for", self.path, flush=True)
            self._answer({"output_ids": []})

        def do_POST(self) -> None:
            print("asked for", self.path, flush=True)
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/pause_generation":
                going.clear()
            if self.path == "/continue_generation":
                going.set()
            if self.path == "/generate":
                going.wait()
            self._answer({"output_ids": [7], "success": True})

        def _answer(self, body: dict[str, Any]) -> None:
            fails = later.read_text("utf-8") if later.exists() else how
            content = json.dumps(body).encode()
            self.send_response(503 if self.path == fails else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http.server.ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
