"""Sandboxes for tests: on machines without bubblewrap, or that allow no namespaces, tests of it are skipped."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace

import pytest

from mega_rl.rewards.sandbox import MIB, Limits, SandboxError
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool

SMALL = Limits(timeout_s=5.0, memory_bytes=192 * MIB, processes=12, output_bytes=64 << 10, tmp_bytes=8 * MIB)


@functools.cache
def problem() -> str:
    """Return why no sandbox works here; empty if one does."""
    if shutil.which("bwrap") is None:
        return "no bubblewrap: make bubblewrap, or apt-get install bubblewrap"
    try:
        LocalSandbox(Tool.find(), replace(SMALL, timeout_s=20.0)).check()
    except SandboxError as error:
        return str(error)
    return ""


def local_sandbox(**limits: float) -> LocalSandbox:
    """Return a sandbox with small limits; skip the test where none works."""
    if why := problem():
        pytest.skip(why)
    return LocalSandbox(Tool.find(), replace(SMALL, **limits))  # type: ignore[arg-type]
