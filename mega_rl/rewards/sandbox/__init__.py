"""Sandboxed execution of model-written programs against a row's tests.

`local` runs a program under bubblewrap, `service.RemoteSandbox` elsewhere. `harness` runs inside and keeps tests and
candidate in separate processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

MIB = 1 << 20

Status = Literal["finished", "timeout", "memory", "output"]


class SandboxError(Exception):
    """The sandbox itself failed, whatever the program; the message says how and names the fix."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run; a program that exceeds one is killed with all it has started."""

    timeout_s: float = 6.0  # wall clock
    memory_bytes: int = 512 * MIB  # address space of each process, and resident memory of all together
    processes: int = 16  # threads count
    output_bytes: int = 256 << 10  # standard output, and as much of standard error
    tmp_bytes: int = 16 * MIB  # size of /tmp, and of /dev/shm


@dataclass(frozen=True)
class Execution:
    """End of one run, and its outputs."""

    status: Status
    return_code: int | None  # None unless it finished; 128 + N: died of signal N
    stdout: bytes
    stderr: bytes

    @property
    def succeeded(self) -> bool:
        """Return whether the program ended by itself with exit code 0."""
        return self.status == "finished" and self.return_code == 0


class Sandbox(Protocol):
    """A place that runs Python programs which may be hostile."""

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        """Run `program`, the text of a Python file, for at most `timeout_s`.

        Raises SandboxError where the sandbox failed, and not the program.
        """
        ...
