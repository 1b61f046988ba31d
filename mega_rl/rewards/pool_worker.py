"""Program of a reward worker: a process that calls the functions. Imports no torch.

It leads a process group, which is killed once the rank has ended. The rank sends an order, then lines of JSON: [name of
a function, arguments of responses]. The worker answers the order with "ready", each line with [score or [kind of
failure, why], ...].
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import json
import os
import resource
import select
import signal
import sys
from typing import TextIO

from mega_rl.rewards.call import load_functions


def main() -> None:
    """Load the functions and answer the rank's messages until it closes the input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # functions print to the log
    _end_with_rank(requests, answers)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses no line
    faulthandler.enable()
    order = json.loads(requests.readline())
    sys.path[:] = order["path"]
    if order["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"],) * 2)
    functions = {one.name: one for one in load_functions(order["functions"], **order["settings"])}
    _answer(answers, "ready")
    runner, own = asyncio.Runner(), os.getpid()
    for line in requests:
        name, batch = json.loads(line)
        outcomes = functions[name].run(batch, runner=runner.run)
        if os.getpid() != own:  # a process that a function has forked and let come back
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function has left
        _answer(answers, outcomes)


def _end_with_rank(requests: TextIO, answers: TextIO) -> None:
    """Start an unrelated process that kills the group once the rank's pipe is closed."""
    if os.fork() == 0:
        if os.fork() == 0:
            answers.close()
            poll = select.poll()
            poll.register(requests, 0)
            poll.poll()
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.wait()


def _answer(answers: TextIO, message: object) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
