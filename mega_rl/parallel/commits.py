"""Agreement of a job's nodes on what they read from the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from mega_rl.config.schema import Origin
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks


def check_commits(origins: Mapping[str, Origin], everyone: Ranks) -> None:
    """Raise RunError on every rank unless all nodes resolved the same names to the same commits; collective.

    `origins` are this rank's pinned names by setting.
    """
    digest = hashlib.sha256(json.dumps(origins, sort_keys=True).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8)  # [32]
    failure = None
    if not torch.equal(own, everyone.broadcast(own)):
        read = ", ".join(f"{key}={json.dumps(name)}" for key, name in origins.items()) or "local files alone"
        failure = RunError(
            f"rank {everyone.rank} reads other models or data than rank 0: {read}; give names their commit as "
            "name@commit, and local files the same path on all nodes"
        )
    raise_together(failure, everyone, error=RunError)
