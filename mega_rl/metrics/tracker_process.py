"""The process of one tracker's client: `python -m mega_rl.metrics.tracker_process wandb`. Imports no torch.

Reads one JSON message from each line of standard input and answers each with one on standard output, in order:
{"done": 3}, with "run_id" and "place" after the start, or {"error": "..."} before it exits with 1. What clients print
goes to standard error.

The client lives in its own process because it blocks where the network does, and because its run must end as
failed when the trainer is killed: then standard input ends without a last message.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from mega_rl.metrics.tracker_clients import CLIENTS, TrackedRun, TrackerClient

ORPHAN_S = 120  # for the last upload after the trainer's death


def serve(client: TrackerClient, messages: TextIO, answers: TextIO) -> bool:
    """Do what each line of `messages` says; returns whether one of them was the last, or they just ended."""
    for number, line in enumerate(messages, start=1):
        message = json.loads(line)
        answer = {"done": number, **_do(client, message)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if message["do"] == "finish":
            return True
    return False


def _do(client: TrackerClient, message: Mapping[str, Any]) -> dict[str, str]:
    match message["do"]:
        case "start":
            started = client.start(TrackedRun(**message["run"]))
            return {"run_id": started.run_id, "place": started.place}
        case "log":
            client.log(message["step"], message["metrics"])
        case "rollouts":
            client.log_rollouts(message["step"], message["rows"], message["name"])
        case "finish":
            client.finish(message["status"])
    return {}


def main() -> int:
    """Serve the client that the command line names; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are the trainer's, which says how the run ends
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    client = CLIENTS[sys.argv[1]]()
    try:
        if not serve(client, sys.stdin, answers):
            signal.alarm(ORPHAN_S)  # ends this process
            client.finish("failed")
    except Exception as error:  # noqa: BLE001 - a client may raise anything; the trainer goes on without it
        text = " ".join(str(error).split())
        answers.write(json.dumps({"error": f"{type(error).__name__}: {text}"}) + "\n")
        answers.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
