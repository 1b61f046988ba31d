"""Commands, variables, cores and packages of a run's processes. What the user has set stays."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from mega_rl.errors import UserErrors

# The trainer's allocator. Segments that expand cannot be released by SGLang's memory saver, nor shared over CUDA IPC.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_set_by_run: set[str] = set()  # and not by the user


def python_module(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command of a Python module, without the working folder on its path.

    Without -P that folder comes before all that is installed: its h2.py runs where a library tries `import h2`.
    """
    return [python, "-P", "-m", module, *arguments]


def use(variables: Mapping[str, str]) -> list[str]:
    """Set each variable that has no value in this process; return the names."""
    names = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in names})
    _set_by_run.update(names)
    return names


def of_other_programs() -> dict[str, str]:
    """Return this process's environment without the variables that only the trainer reads."""
    return {name: value for name, value in os.environ.items() if name not in _set_by_run and name not in _ALLOCATOR}


def interface_of(address: str) -> str:
    """Return the network interface of this machine that has an address; empty without one."""
    named = psutil.net_if_addrs().items()
    return next((name for name, own in named if any(one.address.partition("%")[0] == address for one in own)), "")


CGROUP = Path("/sys/fs/cgroup")
SYSFS = Path("/sys")
_before: set[int] = set()  # the processors of this process before it was bound to some of them


def bind_near(pci: str) -> None:
    """Bind this thread and its later ones to the processors near a PCI device, "0000:3b:00.0".

    The kernel puts pinned memory near the thread that touches it first, and copies between sockets take twice as long.
    No effect where the machine names no NUMA node for the device or this process may use none of its processors.
    """
    try:
        node = (SYSFS / "bus" / "pci" / "devices" / pci / "numa_node").read_text().strip()
        spans = (SYSFS / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text().strip().split(",")
        ends = [(int(first), int(last or first)) for first, _, last in (span.partition("-") for span in spans)]
    except (OSError, ValueError):
        return
    allowed = processors()
    if near := allowed & {cpu for first, last in ends for cpu in range(first, last + 1)}:
        _before.update(allowed)
        os.sched_setaffinity(0, near)


def processors() -> set[int]:
    """Return the processors that this process might use before `bind_near`; programs that it starts get them."""
    return set(_before) or os.sched_getaffinity(0)


def own_cores(local_ranks: int = 0) -> int:
    """Return a rank's share of the cores, at least 1; 0: ranks of this host."""
    local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    allowed = len(processors())
    usable = min(psutil.cpu_count(logical=False) or allowed, allowed, _container_limit() or allowed)
    return max(1, usable // local_ranks)


def _container_limit() -> int | None:
    """Return the processors that a control group grants, None without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):  # no control groups of version 2
        return None


# An extra (`gpu`), no dependency. Megatron-Core imports it wherever it is installed; 0.16.1 asks for >=2.9,<2.12.
TRANSFORMER_ENGINE = Requirement("transformer-engine==2.11.*")


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return the dependencies, in their order, and Transformer Engine.

    Megatron-Core is not among them: mega_rl.parallel.accelerator has a table of its releases. Sources that are only on
    the path declare nothing.
    """
    try:
        declared = [Requirement(text) for text in requires("mega_rl") or [] if "extra ==" not in text]
    except PackageNotFoundError:
        declared = []
    return (*(one for one in declared if one.name != "megatron-core"), TRANSFORMER_ENGINE)


@cache
def require_versions() -> None:
    """Raise UserErrors with a line for each installed package whose release is not allowed.

    What is allowed once is not read again in this process: it takes 12 ms.
    """
    if lines := list(version_problems()):
        raise UserErrors(lines)


def version_problems() -> Iterator[str]:
    """Yield a line for each installed package whose release is not allowed, with the fix."""
    for one in requirements():
        installed = installed_version(one.name)
        if installed is not None and not is_allowed(one, installed):
            yield f"{one.name} {installed} is installed, which mega_rl does not run on; run 'pip install \"{one}\"'"


def is_allowed(required: Requirement, installed: str) -> bool:
    """Return whether a release is allowed; builds as 2.14.0a0+nv26.10 count as the release to come."""
    return Version(installed).base_version in required.specifier


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
