"""The number of threads that a rank computes with on its host's processors."""

from __future__ import annotations

import os

import torch

from mega_rl.cores import own_cores

VARIABLE = "OMP_NUM_THREADS"


def use_threads() -> None:
    """Give torch this rank's share of the host, unless OMP_NUM_THREADS says how many threads it shall use.

    Without it, torch starts a thread for every processor of the host, also in a container that may use two of them.
    """
    if VARIABLE not in os.environ:
        torch.set_num_threads(own_cores())
