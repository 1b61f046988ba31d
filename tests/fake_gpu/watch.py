"""Every call for the fake device, seen one by one: waits of the host, and the memory that is live.

Whole numbers are followed: a tensor of integers or booleans that came from the host is known, and so is what is
computed of known ones. So code whose shapes depend on data runs as it would, and is reported to wait. Floats are not
known: the host reads 1.0.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
LARGEST_KNOWN = 1 << 22  # elements of a tensor whose values are followed
SNAPSHOT_STEP = 32 << 20  # bytes by which the peak must have grown for its largest tensors to be listed anew
# These move tensors to the GPU where torch says that a group is NCCL's, which it says of no fake one.
MOVING = ("mega_rl/parallel/comm.py", "mega_rl/engines/own_layout.py")
HOST_GROUPS: set[str] = set()  # names of groups that stand for gloo's
OWN = ("/mega_rl/", "/megatron/")
# Operators whose result has as many rows as the data say: the host waits for their number.
SIZED_BY_DATA = {aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten._unique2.default}
# Operators whose result takes only shape and type of their argument.
LIKE_ANOTHER = {aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default, aten.new_ones.default}
LOCKED: list[range] = []  # addresses of host memory that the driver has been asked to pin
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class DeviceTensors(FakeTensorMode):
    """Mode in which tensors are fake, on a device that torch must not touch although it reports to be there."""

    avoid_device_init = True  # type: ignore[assignment]


class HostTensorError(Exception):
    """A collective over NCCL got a tensor of the host."""


class UnknownValueError(Exception):
    """The host asked the device for a whole number that depends on floats."""


@dataclass
class Phase:
    """A part of a run: waits by place, and the most memory that was live."""

    waits: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    peak_at: str = ""
    largest: list[str] = field(default_factory=list)
    operators: int = 0
    kernels: Counter[str] = field(default_factory=Counter)  # operators that are not torch's own, by name


class Watch(TorchDispatchMode):
    """Dispatch mode above FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase()
        self._live: dict[int, tuple[int, str]] = {}  # storage -> (bytes, what made it)
        self._references: dict[int, Any] = {}
        self.bytes = 0

    def forget(self) -> None:
        """Count nothing that is live now, nor its end."""
        self._live.clear()
        self._references.clear()
        self.bytes = 0

    @contextmanager
    def measure(self) -> Iterator[Phase]:
        """Yield a new phase, which ends with the context; what is live stays counted."""
        self.phase = Phase(peak=self.bytes, peak_at="live before")
        yield self.phase

    def host_wait(self, name: str) -> None:
        """Count a wait at the innermost line of the project or of Megatron-Core."""
        self.phase.waits[f"{_place()} {name}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and "coalesced" in func._schema.name:
            return _finished_work()
        if _is_of_host(args, kwargs):
            if func.namespace == "c10d" and any(map(_is_of_nccl, args)) and not _place().startswith(MOVING):
                raise HostTensorError(f"{_place()} gives {func} tensors of the host in a group of NCCL")
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.phase.operators += 1
        if func.namespace not in ("aten", "c10d", "prims", "prim"):
            self.phase.kernels[func._schema.name] += 1
        waiting = self._wait(func, args, kwargs)
        if waiting is not None:
            return waiting()
        if func in INDEXING:
            args = (args[0], self._indices(func, args), *args[2:])
        out = func(*args, **kwargs)
        self._follow(func, out, args, kwargs)
        for tensor in tree_leaves(out):
            if _on_device(tensor):
                self._count(tensor, func)
        return out

    def read(self, tensor: Tensor) -> list[Any]:
        """Return the values of a device tensor as the host reads them, all at once."""
        self.host_wait("tolist")
        return self._values(tensor).tolist()

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
        """Count the wait of an operator whose result the host needs, and return what computes it; None for others."""
        if func is aten._local_scalar_dense.default:
            self.host_wait("item")
            return lambda: _on_host(lambda: self._values(args[0]).item())
        if func in SIZED_BY_DATA or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.host_wait(func._schema.name.removeprefix("aten::"))
            return lambda: self._sized_by_data(func, args, kwargs)
        if func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            self._copy(args[0], target, asynchronous=kwargs.get("non_blocking", False))
            if args[0].device.type == "cuda" and target.type == "cpu":
                dtype = kwargs.get("dtype") or args[0].dtype
                return lambda: _on_host(lambda: self._values(args[0]).to(dtype, copy=True))
        if func is aten.copy_.default:
            self._copy(args[1], args[0].device, asynchronous=args[2] if len(args) > 2 else False)
            if args[0].device.type == "meta":  # the storage of a fake tensor, by itself
                return lambda: args[0]
            if args[0].device.type == "cpu":
                return lambda: _on_host(lambda: args[0].copy_(self._values(args[1])))
        return None

    def _values(self, tensor: Tensor) -> Tensor:
        """Return known values, or ones for floats (zeros where they are many).

        Raises:
            UnknownValueError: whole numbers of which nothing is known.
        """
        value = getattr(tensor, "known", None)
        if value is not None:
            return value  # type: ignore[no-any-return]
        if not tensor.dtype.is_floating_point and tensor.dtype is not torch.uint8:  # which are bytes of anything
            raise UnknownValueError(f"{_place()} reads {tensor.dtype} {tuple(tensor.shape)} that depends on floats")
        with unset_fake_temporarily():
            if tensor.numel() <= LARGEST_KNOWN:
                return torch.ones(tensor.shape, dtype=tensor.dtype)
            size = tensor.numel() * tensor.element_size()
            return torch.from_numpy(numpy.zeros(size, numpy.uint8)).view(tensor.dtype).view(tensor.shape)

    def _sized_by_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = _known_arguments(args, kwargs)
        mask = getattr(args[1], "known", None) if func is aten.masked_select.default else None
        if mask is not None:
            out = torch.empty(_on_host(lambda: int(mask.sum())), dtype=args[0].dtype, device="cuda")
            self._count(out, func)
            return out
        if known is None:
            raise UnknownValueError(f"{_place()}: the shape of {func} depends on floats")
        with unset_fake_temporarily():
            values = func(*known[0], **known[1])
        return tree_map_only(Tensor, lambda each: self._placed(each, func), values)

    def _placed(self, value: Tensor, func: Any) -> Tensor:
        """Return a device tensor of these values."""
        out = torch.empty(value.shape, dtype=value.dtype, device="cuda")
        _know(out, value)
        self._count(out, func)
        return out

    def _copy(self, source: Tensor, target: torch.device, *, asynchronous: bool) -> None:
        """Count a copy between host and device unless it is asynchronous, and from pinned memory."""
        kinds = (_side(source.device), _side(target))
        if kinds == ("cuda", "cpu") and not asynchronous:
            self.host_wait("copy to the host")
        if kinds == ("cpu", "cuda") and source.numel():
            if not asynchronous:
                self.host_wait("copy to the device")
            elif not _on_host(lambda: _is_pinned(source)):
                self.host_wait("copy to the device from pageable memory")

    def _indices(self, func: Any, args: Any) -> list[Any]:
        """Return indices with every mask as the positions it selects, of which the host waits for the number."""
        indices, chosen = args[1], []
        fill = func is not aten.index.Tensor and args[2].numel() == 1
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                if index is not None and index.device.type == "cpu":
                    self.host_wait("indices from the host")
                chosen.append(index)
                continue
            if fill or func is not aten.index.Tensor:
                if not fill:
                    self.host_wait("writing by a mask")
                return list(indices)
            self.host_wait("indexing by a mask")
            value = index.known if isinstance(index, FakeTensor) else index
            if value is None:
                raise UnknownValueError(f"{_place()} indexes by a mask that depends on floats")
            with unset_fake_temporarily():
                positions = value.nonzero(as_tuple=True)
            chosen.extend(self._placed(position, func) for position in positions)
        return chosen

    def _follow(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        """Give the results of an operator their values, where those of its arguments are known."""
        if func.namespace == "c10d":
            _follow_collective(func._schema.name, args)
            return
        if func is aten.topk.default:
            with unset_fake_temporarily():
                choices = torch.arange(out[1].numel()).remainder(args[0].size(-1)).view(out[1].shape)
            _know(out[1], choices)  # every choice as often as the others, which loads experts evenly
            return
        if "empty" in func._schema.name:
            return
        if func in LIKE_ANOTHER:
            with unset_fake_temporarily():
                args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
                _know(out, func(*args, **{**kwargs, "device": torch.device("cpu")}))
            return
        leaves = [leaf for leaf in tree_leaves(out) if _on_device(leaf)]
        if all(leaf.dtype.is_floating_point or leaf.numel() > LARGEST_KNOWN for leaf in leaves):
            return
        known = _known_arguments(args, kwargs)
        if known is None:
            for each, argument in zip(args, func._schema.arguments, strict=False):
                if argument.alias_info and argument.alias_info.is_write and isinstance(each, FakeTensor):
                    each.known = None  # type: ignore[attr-defined]
            return
        with unset_fake_temporarily():
            values = func(*known[0], **known[1])
        for leaf, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if _on_device(leaf) and not leaf.dtype.is_floating_point:
                _know(leaf, value)

    def _count(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            old, maker = self._live[key]
            if size == old:
                return
            self.bytes += size - old
            self._live[key] = (size, maker)
        else:
            name = str(getattr(func, "_schema", None) and func._schema.name).removeprefix("aten::")
            maker = f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} at {_place()}"
            self._live[key] = (size, maker)
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
            self.bytes += size
        if self.bytes > self.phase.peak:
            grown = self.bytes - self.phase.peak
            self.phase.peak, self.phase.peak_at = self.bytes, maker
            self._grown = getattr(self, "_grown", 0) + grown
            if self._grown > SNAPSHOT_STEP or not self.phase.largest:
                self._grown, self.phase.largest = 0, self.largest()

    def largest(self, count: int = 8) -> list[str]:
        """Return the largest groups of live tensors, those of one maker together, in words."""
        totals: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for size, maker in self._live.values():
            totals[maker] += size
            numbers[maker] += 1
        return [f"{size / 1e9:.3f} GB: {numbers[maker]} x {maker}" for maker, size in totals.most_common(count)]

    def _forget(self, key: int) -> None:
        self.bytes -= self._live.pop(key, (0, ""))[0]
        self._references.pop(key, None)


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.is_pinned() or any(tensor.data_ptr() in addresses for addresses in LOCKED)


def _side(device: torch.device) -> str:
    """Return "cuda" or "cpu"; the storages of fake tensors, taken by themselves, say meta."""
    return "cpu" if device.type == "cpu" else "cuda"


def _on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"


def _is_of_nccl(argument: Any) -> bool:
    """Return whether an argument of an operator is a group, and none that stands for gloo's."""
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        return dist.ProcessGroup.unbox(argument).group_name not in HOST_GROUPS
    except (RuntimeError, TypeError):  # an object of another kind
        return False


def _is_of_host(args: Any, kwargs: Any) -> bool:
    """Return whether an operator takes nothing of the device and makes nothing there: the host computes it."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return not any(isinstance(leaf, FakeTensor) or leaf.device.type == "meta" for leaf in leaves)


def _on_host(compute: Callable[[], Any]) -> Any:
    with unset_fake_temporarily():
        return compute()


def _know(tensor: Tensor, value: Tensor) -> None:
    if value.numel() <= LARGEST_KNOWN:
        tensor.known = value  # type: ignore[attr-defined]


def _known_arguments(args: Any, kwargs: Any) -> Any:
    """Return (args, kwargs) with values on the host in place of device tensors; None unless all of them are known."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, FakeTensor) and getattr(leaf, "known", None) is None:
            return None
        if isinstance(leaf, Tensor) and leaf.numel() > LARGEST_KNOWN:
            return None

    def on_host(leaf: Any) -> Any:
        return leaf.known if isinstance(leaf, FakeTensor) else leaf

    args, kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
    return args, {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }


def _follow_collective(name: str, args: Any) -> None:
    """Give what a collective received its values: every rank has what this one has."""
    if "allgather_base" not in name and "alltoall_base" not in name:
        return
    received, sent = args[0], args[1]
    value = getattr(sent, "known", None)
    if isinstance(received, FakeTensor) and value is not None:
        with unset_fake_temporarily():
            repeated = value.reshape(-1).repeat(-(-received.numel() // max(value.numel(), 1)))
            _know(received, repeated[: received.numel()].view(received.shape))


def _finished_work() -> Any:
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def _place() -> str:
    """Return "file:function" of the innermost frame of the project or of Megatron-Core."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for own in OWN:
            if own in name and "/tests/" not in name:
                return f"{own.strip('/')}/{name.rpartition(own)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
