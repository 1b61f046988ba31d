"""Recording of a step's traffic: every collective of a rank with its group, dtype and bytes, real or simulated.

`torch.distributed` passes each collective to the dispatcher as an operator of `c10d`, for every backend, so the
recorder sees what the backend is asked for. With torch's fake process group, which moves nothing, one process
stands for any rank of a world of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank saw it."""

    op: str  # "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv", ...
    group: str  # torch's name of the group
    size: int  # ranks of the group
    dtype: torch.dtype
    nbytes: int  # that this rank has to send, at least; of a recv, those that it gets

    @property
    def sends(self) -> bool:
        """Return whether `nbytes` leave this rank."""
        return self.op != "recv"


class CollectiveRecorder(TorchDispatchMode):
    """Recorder of every collective that starts inside its context, backward passes included, in order.

    Bytes are those of an algorithm that sends no more than it must: (d - 1) / d of the whole tensor for a
    reduce-scatter or an all-gather over d ranks, twice that for an all-reduce, of an all-to-all what does not stay,
    of a broadcast the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record an operator of c10d, and run it."""
        if func.namespace == "c10d":
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def of(self, group: ProcessGroup, *ops: str) -> list[Collective]:
        """The collectives over one group, of some kinds where kinds are given."""
        return [c for c in self.collectives if c.group == group.group_name and (not ops or c.op in ops)]

    def _note(self, operator: str, args: tuple[Any, ...]) -> None:
        if operator in BARRIERS:
            return
        assert operator in OPERATORS, f"c10d::{operator} moves bytes and is not in OPERATORS"
        op, at, sends = OPERATORS[operator]
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        sent: list[Tensor] = [args[at]] if isinstance(args[at], Tensor) else args[at]
        nbytes = sends(sent, group)
        if operator == "alltoall_base_" and (rows := list(args[4])):  # parts of so many rows
            nbytes = (sent[0].nbytes // sum(rows) if sum(rows) else 0) * (sum(rows) - rows[group.rank()])
        self.collectives.append(Collective(op, group.group_name, group.size(), sent[0].dtype, nbytes))


def _bytes(sent: Sequence[Tensor], group: ProcessGroup) -> int:
    return sum(tensor.nbytes for tensor in sent)


def _others(sent: Sequence[Tensor], group: ProcessGroup) -> int:
    """The share of tensors that belongs to the other ranks."""
    return _bytes(sent, group) * (group.size() - 1) // group.size()


def _twice(sent: Sequence[Tensor], group: ProcessGroup) -> int:
    return 2 * _others(sent, group)


BARRIERS = ("barrier", "monitored_barrier_")
# Operator -> (kind, place of the tensors that travel among its arguments, bytes that this rank sends of them)
OPERATORS: dict[str, tuple[str, int, Callable[[Sequence[Tensor], ProcessGroup], int]]] = {
    "allreduce_": ("all_reduce", 0, _twice),
    "allreduce_coalesced_": ("all_reduce", 0, _twice),
    "_reduce_scatter_base_": ("reduce_scatter", 1, _others),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, _others),
    "_allgather_base_": ("all_gather", 0, _others),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, _others),
    "allgather_": ("all_gather", 1, lambda sent, group: (group.size() - 1) * _bytes(sent, group)),
    "alltoall_base_": ("all_to_all", 1, _others),  # of equal parts
    "alltoall_": ("all_to_all", 1, lambda sent, group: _bytes(sent, group) - sent[group.rank()].nbytes),
    "broadcast_": ("broadcast", 0, _bytes),
    "reduce_": ("reduce", 0, _bytes),
    "send": ("send", 0, _bytes),
    "recv_": ("recv", 0, _bytes),
}
