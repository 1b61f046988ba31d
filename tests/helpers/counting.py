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
        op, sent = OPERATORS[operator]
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        tensor, nbytes = sent(args, group)
        self.collectives.append(Collective(op, group.group_name, group.size(), tensor.dtype, nbytes))


def total_bytes(collectives: Sequence[Collective]) -> int:
    """Bytes that leave the rank."""
    return sum(collective.nbytes for collective in collectives if collective.sends)


# (arguments of the operator, group) -> (a tensor that travels, bytes that this rank sends)
Sent = Callable[[tuple[Any, ...], ProcessGroup], tuple[Tensor, int]]


def _all_reduce(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    whole = sum(tensor.nbytes for tensor in args[0])
    return args[0][0], 2 * _others(whole, group)


def _reduce_scatter(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    return args[1], _others(args[1].nbytes, group)


def _all_gather(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    return args[0], _others(args[0].nbytes, group)


def _all_to_all(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    """Splits count rows of the input; none of them means equal parts."""
    sent: Tensor = args[1]
    splits = list(args[4])
    if not splits:
        return sent, _others(sent.nbytes, group)
    row = sent.nbytes // sent.size(0) if sent.size(0) else 0
    return sent, row * (sum(splits) - splits[group.rank()])


def _whole(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    return args[0][0], sum(tensor.nbytes for tensor in args[0])


def _coalesced_in(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    """Reduce-scatters of several tensors in one message."""
    return args[1][0], _others(sum(tensor.nbytes for tensor in args[1]), group)


def _coalesced_out(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    """All-gathers of several tensors in one message."""
    return args[0][0], _others(sum(tensor.nbytes for tensor in args[0]), group)


def _lists(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    """All-gathers into lists: args[0][i] holds what each rank gives of tensor i."""
    return args[1][0], (group.size() - 1) * sum(tensor.nbytes for tensor in args[1])


def _others(nbytes: int, group: ProcessGroup) -> int:
    """The share of a tensor that belongs to the other ranks."""
    return nbytes * (group.size() - 1) // group.size()


def _list_to_all(args: tuple[Any, ...], group: ProcessGroup) -> tuple[Tensor, int]:
    """All-to-alls of lists: args[1][i] goes to rank i."""
    return args[1][0], sum(tensor.nbytes for i, tensor in enumerate(args[1]) if i != group.rank())


BARRIERS = ("barrier", "monitored_barrier_")
OPERATORS: dict[str, tuple[str, Sent]] = {
    "allreduce_": ("all_reduce", _all_reduce),
    "allreduce_coalesced_": ("all_reduce", _all_reduce),
    "_reduce_scatter_base_": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _coalesced_in),
    "_allgather_base_": ("all_gather", _all_gather),
    "allgather_into_tensor_coalesced_": ("all_gather", _coalesced_out),
    "allgather_": ("all_gather", _lists),
    "alltoall_base_": ("all_to_all", _all_to_all),
    "alltoall_": ("all_to_all", _list_to_all),
    "broadcast_": ("broadcast", _whole),
    "reduce_": ("reduce", _whole),
    "send": ("send", _whole),
    "recv_": ("recv", _whole),
}
