"""What the trainer may ask of a group of ranks (`mega_rl.protocols.Ranks`), for one process and for many.

Tensors may live anywhere: they travel on the group's device and come back to theirs. Everything is made contiguous
first, since gloo returns wrong data for strided tensors without an error.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.protocols import Batch


class SingleRank:
    """A group of one, in which nothing moves."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.clone()

    def max(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.clone()

    def gather_rows(self, rows: Batch) -> Batch:
        """The rows."""
        return _like(rows, {name: field.clone() for name, field in _fields(rows).items()}, count=len(rows.tokens))

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """The rows."""
        _check_destinations(rows, destinations, size=1)
        return _like(rows, {name: field.clone() for name, field in _fields(rows).items()}, count=len(rows.tokens))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """A copy."""
        assert source == 0, f"source={source} in a group of one"
        return tensor.clone()


class GroupRanks:
    """The ranks of a torch.distributed group, gloo or NCCL."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over the group, as a new tensor."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the group, as a new tensor."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """The tensor of group rank `source`, as a new one."""
        sent = self._travelling(tensor)
        dist.broadcast(sent, group_src=source, group=self._group)
        return sent.to(tensor.device)

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """What group rank `source` gives, sent as JSON; the other ranks' `value` is ignored."""
        text = json.dumps(value if self.rank == source else None).encode()
        size = int(self.broadcast(torch.tensor(len(text)), source=source))
        buffer = torch.zeros(size, dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(buffer, source=source).tolist()))

    def gather_rows(self, rows: Batch) -> Batch:
        """All ranks' rows in rank order on every rank, padded to the group's largest S.

        rows: a batch whose fields are [B, S, ...] or [B]; B and S may differ between ranks, B may be 0.
        """
        count = len(rows.tokens)
        order = torch.arange(count, device=rows.tokens.device).repeat(self.size)
        return self._all_to_all(rows, order, [count] * self.size)

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """Row i of this rank goes to rank `destinations[i]`; returns what arrives, in source-rank order.

        Rows of one source keep their order. Shapes as in `gather_rows`; destinations: [B] int64.
        """
        _check_destinations(rows, destinations, size=self.size)
        order = destinations.argsort(stable=True).to(rows.tokens.device)
        return self._all_to_all(rows, order, torch.bincount(destinations, minlength=self.size).tolist())

    def _all_to_all(self, rows: Batch, order: Tensor, counts: list[int]) -> Batch:
        """Send rows[order]: the first counts[0] of them to rank 0, and so on; returns what arrives."""
        length = int(self.max(torch.tensor(rows.tokens.shape[1])))
        received_counts = self._exchange_counts(counts)
        received = {
            name: self._send(_padded(field[order], length), counts, received_counts).to(field.device)
            for name, field in _fields(rows).items()
        }
        return _like(rows, received, count=sum(received_counts))

    def _exchange_counts(self, counts: list[int]) -> list[int]:
        """Rows that each rank sends here, from the numbers this rank sends to each."""
        sent = torch.tensor(counts, dtype=torch.int64, device=self._device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return [int(count) for count in received.tolist()]

    def _send(self, rows: Tensor, counts: list[int], received_counts: list[int]) -> Tensor:
        sent = rows.to(self._device).contiguous()
        as_bytes = sent.dtype in (torch.bool, torch.int16)  # not every backend carries these
        sent = sent.view(torch.uint8) if as_bytes else sent
        received = sent.new_empty((sum(received_counts), *sent.shape[1:]))
        dist.all_to_all_single(received, sent, received_counts, counts, group=self._group)
        return received.view(rows.dtype) if as_bytes else received

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        total = self._travelling(tensor)
        dist.all_reduce(total, op=operation, group=self._group)
        return total.to(tensor.device)

    def _travelling(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the group's device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device).copy_(tensor.detach())


def _fields(rows: Any) -> dict[str, Tensor]:
    """The tensors of a tensorclass, by name; optional ones that it lacks left out."""
    return {name: field for name, field in rows.items() if field is not None}


def _like(rows: Batch, fields: dict[str, Tensor], *, count: int) -> Batch:
    """A batch of the same class."""
    make: Any = type(rows)
    batch: Batch = make(**fields, batch_size=[count])
    return batch


def _padded(field: Tensor, length: int) -> Tensor:
    """[B, S, ...] filled up with zeros (False) to S = length; [B] unchanged."""
    if field.dim() == 1 or field.shape[1] == length:
        return field
    padding = field.new_zeros((field.shape[0], length - field.shape[1], *field.shape[2:]))
    return torch.cat([field, padding], dim=1)


def _check_destinations(rows: Batch, destinations: Tensor, *, size: int) -> None:
    count = len(rows.tokens)
    assert destinations.shape == (count,), f"{tuple(destinations.shape)} destinations for {count} rows"
    if count:
        low, high = int(destinations.min()), int(destinations.max())
        assert 0 <= low <= high < size, f"destinations {low}..{high} in a group of {size}"
