"""Collectives of the trainer on a group of ranks (`mega_rl.protocols.Ranks`), for one process and for many.

Tensors may live anywhere: they travel on the group's device and come back to theirs. Everything is made contiguous
first, since gloo returns wrong data for strided tensors without an error. Objects travel as JSON, never as a pickle.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.errors import RunError, UserError
from mega_rl.protocols import Batch, Ranks


def ranks_of(group: ProcessGroup) -> SingleRank | GroupRanks:
    """Return a group's collectives; a single rank skips torch.distributed, whose calls take 0.1 ms."""
    return GroupRanks(group) if group.size() > 1 else SingleRank()


def share(count: int, ranks: Ranks) -> range:
    """Return this rank's contiguous part of `count` items; parts differ by at most one item."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


class SingleRank:
    """Group of one rank, whose collectives return contiguous clones on the tensors' own device, without gradients."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return a clone: a group of one has no peers."""
        return _clone(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """Return a clone: a group of one has no peers."""
        return _clone(tensor)

    def gather_rows(self, rows: Batch) -> Batch:
        """Return a clone of the rows: a group of one has no peers."""
        return _like(rows, self.gather_fields(_fields(rows)))

    def gather_fields(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a clone of the fields: a group of one has no peers."""
        return {name: _clone(field) for name, field in fields.items()}

    def gather_json(self, value: Any) -> list[Any]:
        """Return [value], after a round trip through JSON."""
        return [json.loads(json.dumps(value))]

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """Return a clone of the rows: a group of one has no peers."""
        _check_destinations(rows, destinations, size=1)
        return self.gather_rows(rows)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return a clone: a group of one has no peers."""
        assert source == 0, f"source={source} in a group of one"
        return _clone(tensor)


class GroupRanks:
    """The ranks of a torch.distributed group, gloo or NCCL."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the group, as a new tensor."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the group, as a new tensor."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return the tensor of group rank `source`, as a new one."""
        sent = self._travelling(tensor)
        dist.broadcast(sent, group_src=source, group=self.group)
        return sent.to(tensor.device)

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, which JSON can hold, in rank order on every rank."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.cat(self._gather(torch.tensor([len(text)]))).tolist()
        sent = torch.nn.functional.pad(text, (0, max(sizes) - len(text)))
        texts = self._gather(sent)
        return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes, strict=True)]

    def gather_rows(self, rows: Batch) -> Batch:
        """Return all ranks' rows in rank order, padded to the group's largest S; see `gather_fields`.

        rows: a batch whose fields are [B, S, ...] or [B]; B and S may differ between ranks, B may be 0.
        """
        return _like(rows, self.gather_fields(_fields(rows)))

    def gather_fields(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all ranks' rows in rank order on every rank.

        fields: [B] and [B, S, ...], filled up with zeros (False) to the group's largest S of that field. B may differ
        between ranks and be 0.

        Raises RunError: on all ranks alike, the ranks' fields or their types differ.
        """
        tensors = dict(sorted(fields.items()))  # in one order on all ranks
        kinds = {name: _kind(tensor) for name, tensor in tensors.items()}
        sizes = {name: tensor.shape[:2] for name, tensor in tensors.items()}
        messages = self.gather_json([kinds, sizes])
        _check_same([kinds for kinds, _ in messages])
        return {
            name: _broadcast_rows(tensor.detach(), [sizes[name] for _, sizes in messages], self)
            for name, tensor in tensors.items()
        }

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """Send row i of this rank to rank `destinations[i]`; return the received rows, in source-rank order.

        Rows of one source keep their order. Shapes as in `gather_rows`; destinations: [B] int64.
        """
        _check_destinations(rows, destinations, size=self.size)
        order = destinations.argsort(stable=True).to(rows.tokens.device)
        counts = torch.bincount(destinations, minlength=self.size).tolist()
        length = int(self.max(torch.tensor(rows.tokens.shape[1])))
        received_counts = self.exchange_counts(counts)
        received = {
            name: self.send(padded(field[order], length), counts, received_counts).to(field.device)
            for name, field in _fields(rows).items()
        }
        return _like(rows, received)

    def exchange_counts(self, counts: list[int]) -> list[int]:
        """Return the number of rows from each rank; `counts` holds those to each; collective."""
        sent = torch.tensor(counts, dtype=torch.int64, device=self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return [int(count) for count in received.tolist()]

    def send(self, rows: Tensor, counts: Sequence[int], received_counts: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank; return the received ones, on the group's device; collective."""
        sent = rows.to(self.device).contiguous()
        as_bytes = sent.dtype in (torch.bool, torch.int16)  # not every backend carries these
        sent = sent.unsqueeze(-1).view(torch.uint8) if as_bytes else sent
        received = sent.new_empty((sum(received_counts), *sent.shape[1:]))
        dist.all_to_all_single(received, sent, list(received_counts), list(counts), group=self.group)
        return received.view(rows.dtype).squeeze(-1) if as_bytes else received

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, of one shape and dtype, in rank order."""
        sent = self._travelling(tensor)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.group)
        return [one.to(tensor.device) for one in received]

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        total = self._travelling(tensor)
        dist.all_reduce(total, op=operation, group=self.group)
        return total.to(tensor.device)

    def _travelling(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the group's device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor.detach())


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _broadcast_rows(rows: Tensor, sizes: Sequence[Sequence[int]], ranks: GroupRanks) -> Tensor:
    """Return all ranks' rows in rank order, [B] or, filled up with zeros, [B, S, ...].

    sizes: (B,) or (B, S) of each rank. The result is all that is allocated: each rank broadcasts its rows out of their
    place in it.
    """
    counts = [size[0] for size in sizes]
    length = [max(size[1] for size in sizes)] if rows.dim() > 1 else []
    gathered = torch.empty(sum(counts), *length, *rows.shape[2:], dtype=rows.dtype, device=ranks.device)
    parts = gathered.split(counts)
    own = parts[ranks.rank]
    if length:
        own[:, rows.shape[1] :] = 0
        own[:, : rows.shape[1]] = rows
    else:
        own.copy_(rows)
    # Bytes, because not every backend carries every dtype.
    works = [
        dist.broadcast(part.flatten().view(torch.uint8), group_src=rank, group=ranks.group, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    for work in works:
        work.wait()
    return gathered.to(rows.device)


def _kind(tensor: Tensor) -> str:
    """Return the dtype and sizes on which ranks must agree: "torch.float32 [B, S, 3]"."""
    sizes = [*("B", "S")[: tensor.dim()], *map(str, tensor.shape[2:])]
    return f"{tensor.dtype} [{', '.join(sizes)}]"


def _check_same(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise RunError unless all ranks have the same names with the same texts."""
    problems = []
    for name in sorted(set().union(*of_ranks)):
        ranks_of: dict[str, list[str]] = {}
        for rank, texts in enumerate(of_ranks):
            ranks_of.setdefault(texts.get(name, "missing"), []).append(str(rank))
        if len(ranks_of) > 1:
            values = "; ".join(f"{text} on rank(s) {', '.join(ranks)}" for text, ranks in ranks_of.items())
            problems.append(f"field {name!r} is not the same on all ranks: {values}")
    if problems:
        raise RunError("\n".join(problems))


def gather_tensordict(batch: TensorDict, ranks: SingleRank | GroupRanks) -> TensorDict:
    """Return all ranks' rows in rank order on every rank, with objects.

    batch: of size [B], which may differ between ranks and be 0. It may hold tensors, as `gather_fields` takes them; a
    NonTensorStack, an object for each row; and NonTensorData, one value for all rows, which stays as it is. Objects are
    those that `gather_json` takes.

    Raises RunError: on all ranks alike, the ranks' fields, their types or their NonTensorData differ.
    """
    tensors, objects, shared = dict[str, Tensor](), dict[str, list[Any]](), dict[str, Any]()
    fields: dict[str, Any] = dict(batch.items())
    for name, field in fields.items():
        if isinstance(field, NonTensorStack):
            objects[name] = list(field.tolist())
        elif isinstance(field, NonTensorData):
            shared[name] = field.data
        else:
            tensors[name] = field
    gathered: dict[str, Any] = dict(ranks.gather_fields(tensors))
    messages = ranks.gather_json([batch.batch_size[0], objects, shared])
    _check_same(
        [
            dict.fromkeys(own, "objects of rows") | {name: json.dumps(value) for name, value in of_all.items()}
            for _, own, of_all in messages
        ]
    )
    count = sum(rows for rows, _, _ in messages)
    for name in objects:
        values = [value for _, own, _ in messages for value in own[name]]
        gathered[name] = NonTensorStack(*values) if values else fields[name]
    gathered |= {name: NonTensorData(value, batch_size=[count]) for name, value in shared.items()}
    return TensorDict(gathered, count)


def _fields(rows: Any) -> dict[str, Tensor]:
    """Return the tensors of a tensorclass by name, without optional ones that it lacks."""
    return {name: field for name, field in rows.items() if field is not None}


def _like(rows: Batch, fields: Mapping[str, Tensor]) -> Batch:
    """Return a batch of the class of `rows` with these fields."""
    make: Any = type(rows)
    batch: Batch = make(**fields, batch_size=[len(fields["tokens"])])
    return batch


def padded(field: Tensor, length: int) -> Tensor:
    """Return [B, S, ...] padded with zeros (False) to S = length; [B] unchanged."""
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


def sum_over_context(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Return the sum of `x` over the context-parallel group on all its ranks; differentiable, collective.

        y = sum over ranks r of x_r            d loss / d x_r = sum over ranks q of d loss_q / d y

    Every rank's share of the loss reads the sum, and the loss is the sum of the shares, so the gradient travels, too:
    an all-reduce in the backward as in the forward. `x` has one shape on all ranks; so has the graph of the loss, for
    ranks must come to their collectives in one order. In a group of one rank `x` itself.
    """
    return x if group.size() == 1 else _SumOverGroup.apply(x, group)


class _HasGroup(Protocol):
    """The context of an autograd function that keeps its group."""

    group: ProcessGroup


class _SumOverGroup(torch.autograd.Function):
    """The sum of all ranks' tensors, whose adjoint is itself."""

    @staticmethod
    def forward(ctx: _HasGroup, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _HasGroup, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverGroup.apply(grad, ctx.group), None


PART_BYTES = 16 << 20
IN_FLIGHT = 4  # parts of a rank that are sent or received at a time


class FilePart(NamedTuple):
    """Bytes of a file that one rank sends to another."""

    source: int
    target: int
    file: str
    start: int
    nbytes: int


class _Posted(NamedTuple):
    part: FilePart
    buffer: torch.Tensor
    work: dist.Work | None


def cut(source: int, target: int, file: str, start: int, nbytes: int) -> list[FilePart]:
    """Return the parts of at most `PART_BYTES` that bytes of a file are sent in."""
    ends = range(start, start + nbytes, PART_BYTES)
    return [FilePart(source, target, file, at, min(PART_BYTES, start + nbytes - at)) for at in ends]


def transfer(
    parts: Sequence[FilePart],
    ranks: GroupRanks,
    *,
    read: Callable[[FilePart, memoryview], None],
    write: Callable[[FilePart, memoryview], None],
) -> str | None:
    """Send all parts; return this rank's first failure, None without one; collective.

    parts: the same on all ranks, each between two ranks. read: fills a buffer on the source; write: takes one on the
    target; both may raise RunError or UserError, and the rest still moves, so that no rank waits for one that has
    failed. The group's deadline is that of each part.
    """
    posted: deque[_Posted] = deque()
    failures: list[str] = []

    def guarded(work: Callable[[FilePart, memoryview], None], part: FilePart, buffer: torch.Tensor) -> None:
        try:
            work(part, buffer.numpy().data)
        except (RunError, UserError) as error:
            failures.append(str(error))

    def settle(oldest: _Posted) -> None:
        if oldest.work is not None:
            oldest.work.wait()
        if oldest.part.target == ranks.rank:
            guarded(write, oldest.part, oldest.buffer)

    # The first part of all that have not arrived is the oldest of both its ranks, so no rank waits for ever.
    for tag, part in enumerate(_in_turn(parts), start=1):
        if ranks.rank not in (part.source, part.target):
            continue
        buffer = torch.zeros(part.nbytes, dtype=torch.uint8)
        if part.source == ranks.rank:
            guarded(read, part, buffer)
            work = dist.isend(buffer, group=ranks.group, group_dst=part.target, tag=tag)
        else:
            work = dist.irecv(buffer, group=ranks.group, group_src=part.source, tag=tag)
        posted.append(_Posted(part, buffer, work))
        if len(posted) == IN_FLIGHT:
            settle(posted.popleft())
    while posted:
        settle(posted.popleft())
    return failures[0] if failures else None


def _in_turn(parts: Sequence[FilePart]) -> Iterator[FilePart]:
    """Yield all rank pairs' first parts, then all second parts, to keep every pair busy."""
    seen: Counter[tuple[int, int]] = Counter()
    numbered = []
    for part in parts:
        numbered.append((seen[part.source, part.target], part))
        seen[part.source, part.target] += 1
    for _, part in sorted(numbered, key=lambda each: each[0]):
        yield part
