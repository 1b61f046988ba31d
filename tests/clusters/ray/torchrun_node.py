"""A node's launcher by torchrun, with the options of `mega-rl train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

OPTIONS = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(arguments: Sequence[str]) -> None:
    """Run torchrun, whose end becomes an exit code; the launch key comes by the environment."""
    assert len(os.environ["MEGA_RL_LAUNCH_KEY"]) == 64
    assert "OMP_NUM_THREADS" in os.environ, "given by --env, not by Ray"
    options, rest = [], list(arguments)
    while rest and rest[0] in OPTIONS:
        options += [f"{rest[0]}={rest[1]}"]
        del rest[:2]
    options += [f"--signals-to-handle={SIGNALS}", "--shutdown-timeout=120", "-m", "mega_rl.cli", "train", *rest]
    try:
        run.run(run.parse_args(options))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code >= 0 else 128 - code)
    except SignalException as error:
        sys.exit(128 + int(error.sigval))


if __name__ == "__main__":
    main(sys.argv[1:])
