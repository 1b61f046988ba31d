"""What SGLang shares by public names, on any device, moved to a private folder. Installed in SGLang's processes only.

Seen in SGLang 0.5.20.
"""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path) -> None:
    """Install both server-side workarounds, with their files in `folder`."""
    rendezvous(folder)
    load_snapshots(folder)


def rendezvous(folder: Path) -> None:
    """Ranks meet at a file: torch's TCPStore listens on all interfaces, whatever address it is given."""
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/rendezvous"


def load_snapshots(folder: Path) -> None:
    """The load that schedulers report is in a file of /dev/shm, which SGLang never removes."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: f"{folder}/load-{Path(name).name}"
