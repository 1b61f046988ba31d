"""Ranks on this machine through torchrun, ending with an exit code where torchrun would end with a traceback.

The ranks have said what went wrong; forty lines about their processes would bury it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from mega_rl import progress
from mega_rl.errors import UserError
from mega_rl.progress.terminal import show_progress

# Ranks that are told to stop end their step and save; torchrun's default of 30 s would kill a large model's.
SHUTDOWN_TIMEOUT_S = 300
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))  # as mega_rl.cli ends
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # handed on to the ranks; without the last Slurm's would end torchrun
QUIET = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


OR_CPU = "--or-cpu"  # of this module's command line


def launch(program: Sequence[str], *, nproc_per_node: int, or_cpu: bool = False) -> int:
    """Run `program` (a module and its arguments) on that many ranks; returns the exit code of the first that failed.

    or_cpu: the ranks see no GPU where the machine has fewer of them than ranks, which would be an error of theirs.

    0 when all have ended well; 128 + signal when a signal, to a rank or to this process, which hands it on, ended them.
    """
    show_progress()
    with progress.phase(f"starting {nproc_per_node} ranks", announce=True):
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from mega_rl.accelerator import gpus, threads
    progress.close()  # the line on the terminal is rank 0's from here on
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault(threads.VARIABLE, str(threads.threads_per_rank(nproc_per_node)))  # torchrun would set 1
    if or_cpu:
        os.environ.update(gpus.environment_of_ranks(nproc_per_node))
    options = ["--standalone", f"--nproc-per-node={nproc_per_node}", f"--signals-to-handle={SIGNALS}"]
    options.append(f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}")
    # Ranks of one machine meet here. By the machine's name, torchrun's default, they wait for 300 s where nothing
    # resolves it, as in some containers.
    options.append("--local-addr=127.0.0.1")
    try:
        run.run(run.parse_args([*options, "-m", *program]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if code not in (UserError.exit_code, *STOPPED):
            sys.stderr.write(f"error: rank {rank} (process {failure.pid}) {ending(failure.exitcode)}\n")
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def ending(exit_code: int) -> str:
    """Return how a process ended, from its exit code; below 0 it is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (": perhaps the machine is out of memory" if name == "SIGKILL" else "")


def main(arguments: Sequence[str]) -> int:
    """Launch by a command line: the number of ranks, perhaps OR_CPU, the program."""
    or_cpu = arguments[1] == OR_CPU
    return launch(arguments[2 if or_cpu else 1 :], nproc_per_node=int(arguments[0]), or_cpu=or_cpu)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
