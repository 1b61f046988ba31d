"""Program that becomes a node's launcher, which gets SIGTERM when the actor that started it is gone.

    python -m mega_rl.schedulers.ray.leash PARENT_PID PROGRAM ARGUMENT...

Ray ends an actor's process with SIGKILL, and an actor ends itself when its node's daemon is gone. The ranks then save
and end; without this they would train on, in a run that continues elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the program. Ray blocks SIGINT in its processes, and a mask is inherited."""
    parent, *command = arguments
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # survives execve
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
