"""One network thread for all gloo groups of a process, where PyTorch starts one for each.

A gloo device is a thread that waits for sockets with a time limit and so wakes up about a hundred times a second,
whether or not anything comes. A rank of Megatron-Core has some thirty groups, most of which rarely send a byte; the
idle threads of eight such ranks take a fifth of a core. Groups may share a device: it holds sockets, no group's state.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Backend, ProcessGroupGloo, Store
from torch.distributed.constants import default_pg_timeout

_construct: Callable[..., None] = ProcessGroupGloo.__init__  # also takes options, which the stubs leave out
_devices: list[ProcessGroupGloo.Device] = []
_interfaces: list[str] = []


def share_device(interfaces: str) -> None:
    """Let the gloo groups that this process makes from now on share a device, until `release_device`.

    interfaces: the value of GLOO_SOCKET_IFNAME: names separated by commas, a device for each; empty for the default.
    """
    _interfaces[:] = [name for name in interfaces.split(",") if name]
    setattr(ProcessGroupGloo, "__init__", _construct_on_shared_devices)  # noqa: B010 - a method, to a type checker


def release_device() -> None:
    """Give groups devices of their own again; the shared ones end with the last group that uses them."""
    setattr(ProcessGroupGloo, "__init__", _construct)  # noqa: B010 - as above
    _devices.clear()


def _construct_on_shared_devices(
    group: ProcessGroupGloo,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | Backend.Options = default_pg_timeout,
    **more: bool,
) -> None:
    """Construct a group as PyTorch does with a timeout; with options, which name devices, or with more, as asked.

    more: `enable_reconfigure` of PyTorch 2.15, which options cannot carry; false, it asks for nothing.
    """
    if isinstance(timeout, timedelta) and not any(more.values()):
        _construct(group, store, rank, size, _options(timeout))
    else:
        _construct(group, store, rank, size, timeout, **more)


def _options(timeout: timedelta) -> Backend.Options:
    if not _devices:
        named = [ProcessGroupGloo.create_device(interface=name) for name in _interfaces]
        _devices.extend(named or [ProcessGroupGloo.create_default_device()])
    values = {"_devices": list(_devices), "_threads": 2 * len(_devices), "_timeout": timeout}  # threads as in PyTorch
    options: Backend.Options = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009 - not in the stubs
    for name, value in values.items():
        setattr(options, name, value)
    return options
