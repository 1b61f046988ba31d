"""Program that becomes another one, which gets SIGTERM from the kernel when the process that started it is gone.

    python -m mega_rl.launcher.leash PARENT_PID PROGRAM ARGUMENT...

For ranks, whose launcher may be killed, and for launchers, whose actor of Ray may be. What they start saves and ends;
without this it would train on in a run that nobody watches, or that continues elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from mega_rl.environment import python_module

PR_SET_PDEATHSIG = 1


def leashed(program: Sequence[str]) -> list[str]:
    """Return the command that runs a program, named by its path, on a leash of this process.

    The kernel's signal comes at the end of the thread that starts it: call it from one that lives as long as the
    process.
    """
    return python_module("mega_rl.launcher.leash", str(os.getpid()), *program)


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the program, with no signal blocked and SIGHUP as it is by default.

    Both are inherited: some parents block signals, and nohup ignores SIGHUP, by which a launcher ends ranks.
    """
    parent, *command = arguments
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # survives execve
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
