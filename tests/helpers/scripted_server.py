"""Program in SGLang's place that answers what a start and an adoption ask for, with the line of life of a real server.

    python -m tests.helpers.scripted_server HOW SGLANG_ARGUMENTS

HOW is "well" or "never starts". The file that the environment names as SCRIPTED_HOW may hold a path and the process
that answers 503 to it from then on. While generation is paused, /generate waits. Every path that is asked for goes to
the log.
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

from mega_rl.rollout.sglang.server import launcher


def main(how: str, arguments: list[str]) -> None:
    """Serve until standard input ends."""
    os.environ.pop(launcher.DEVICE_VARIABLE)  # no stand-ins: nothing is imported that needs them
    launcher.use_private_files = lambda _: None
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
            fails = later.exists() and later.read_text("utf-8") == f"{self.path} {os.getpid()}"
            content = json.dumps(body).encode()
            self.send_response(503 if fails else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http.server.ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
