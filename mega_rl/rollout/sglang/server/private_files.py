"""Patches that move SGLang's publicly named files to a private folder, on any device; only in SGLang's processes.

Seen in SGLang 0.5.20.
"""

from __future__ import annotations

import os
from pathlib import Path

from mega_rl.rollout.sglang.server import nodes


def install(folder: Path) -> None:
    """Install both server-side workarounds, with their files in `folder`."""
    rendezvous(folder)
    load_snapshots(folder)


def rendezvous(folder: Path) -> None:
    """Let ranks meet at a file, those of several hosts at the first one's store.

    torch's TCPStore listens on all interfaces, whatever address it is given.
    """
    node = nodes.Node.read(folder)
    method = f"file://{folder}/rendezvous" if node is None else nodes.let_ranks_meet(node)
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = method


def load_snapshots(folder: Path) -> None:
    """Move the file of the schedulers' load out of /dev/shm, where SGLang never removes it."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: f"{folder}/load-{Path(name).name}"
