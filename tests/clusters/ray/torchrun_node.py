"""A node's launcher by torchrun, with the options of `mega-rl train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OPTIONS = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(arguments: Sequence[str]) -> None:
    """Replace this process by torchrun; its launch key comes by the environment."""
    assert len(os.environ["MEGA_RL_LAUNCH_KEY"]) == 64
    assert "OMP_NUM_THREADS" in os.environ, "given by --env, not by Ray"
    options, rest = [], list(arguments)
    while rest and rest[0] in OPTIONS:
        options += [f"{rest[0]}={rest[1]}"]
        del rest[:2]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += [f"--signals-to-handle={SIGNALS}", "--shutdown-timeout=120", "-m", "mega_rl.cli", "train", *rest]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
