"""Program of a reward worker: a process that calls the functions, and its keeper.

`python -m mega_rl.rewards.pool_worker` imports no torch. The keeper waits for the end of the worker and of its standard
input, which the rank holds open. At the first of them it kills the worker and every process that descends from it, and
ends as the worker did. The worker is killed with the keeper.

The rank sends an order, then lines of JSON: [name of a function, arguments of responses]. The worker answers the order
with "" or why it is unusable, each line with [score or [kind of failure, why], ...].
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import resource
import select
import signal
import sys
import time
from typing import TextIO

import psutil

from mega_rl.errors import UserError
from mega_rl.processes import die_with_parent
from mega_rl.rewards.call import load_functions
from mega_rl.rewards.score import RewardFailure

END_S = 5.0  # for all that a worker started to be gone
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the keeper, and the worker as its child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the worker become this process's children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    keeper, worker = os.getpid(), os.fork()
    if worker == 0:
        os.setpgid(0, 0)  # what it forks is killed with it at once, however fast that forks on
        die_with_parent(keeper, signal.SIGKILL)
        _work()
        os._exit(0)
    code = _keep(worker)
    if code < 0:  # a death of the same signal
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code)


def _keep(worker: int) -> int:
    """Wait for the worker's or the rank's end, kill everything, and return the worker's exit code."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # its other end, which is the rank's
    poll.register(os.pidfd_open(worker), select.POLLIN)
    poll.poll()
    statuses, end = dict[int, int](), time.monotonic() + END_S
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        except ChildProcessError:
            break
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(statuses.get(worker, 0))


def _work() -> None:
    """Load the functions and answer the rank's messages until it closes the input."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what functions print goes to the log
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses no line
    faulthandler.enable()
    order = json.loads(requests.readline() or "null")
    if order is None:
        return
    sys.path[:] = order["path"]
    if order["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"],) * 2)
    try:
        functions = {one.name: one for one in load_functions(order["functions"], **order["settings"])}
    except UserError as error:
        _answer(answers, str(error))
        return
    _answer(answers, "")
    runner, own = asyncio.Runner(), os.getpid()
    for line in requests:
        name, batch = json.loads(line)
        outcomes = functions[name].run(batch, runner=runner.run)
        if os.getpid() != own:  # a process that a function has forked and let come back
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function has left
        _answer(answers, [[one.kind, one.what] if isinstance(one, RewardFailure) else one for one in outcomes])


def _answer(answers: TextIO, message: object) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
