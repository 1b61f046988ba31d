"""Folder of TRL and verl, which `make peers` fills and only `program` puts on its path."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
FOLDER = ROOT / ".venv" / "peers"


def release(peer: str) -> str:
    """Return the pinned release of a peer, as "1.16.0"."""
    (version,) = re.findall(rf"^{peer}==([\w.]+)", REQUIREMENTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return version


def missing(peer: str) -> str | None:
    """Return why the tests against a peer cannot run here, or None."""
    version = release(peer)
    if (FOLDER / f"{peer}-{version}.dist-info").is_dir():
        return None
    return f"{FOLDER} has no {peer} {version}: `make peers` puts it there (verl has no release for Python 3.13)"


def environment() -> dict[str, str]:
    """Return the environment of a program that imports them; verl's wheel has a folder "tests", which comes second."""
    path = os.pathsep.join([str(ROOT), str(FOLDER)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
