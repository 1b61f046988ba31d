"""Cutting a batch into the micro-batches that a model's forward takes, and putting results back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mega_rl.data.minibatches import minimum_microbatches, plan_microbatches
from mega_rl.data.packing import MicroBatch, cut, pack, pad
from mega_rl.parallel.accelerator.transfer import send
from mega_rl.protocols import Ranks
from mega_rl.tracking import progress
from mega_rl.types import Experience, Rollout

# Tokens that micro-batches may grow by to be of one shape. A shape that travels costs each message a wait of the host,
# some tenths of a millisecond of the tens that a stage computes.
SHAPE_PADDING = 0.05


@dataclass(frozen=True)
class Batching:
    """Settings by which rows become micro-batches: packed up to a token budget, or padded in fixed numbers.

    Under context parallelism every rank makes the same whole micro-batches and keeps its part of each.
    """

    packing: bool
    max_tokens: int  # packed: tokens per micro-batch, padding inside it counted; of all context-parallel ranks together
    micro_batch_size: int  # padded: sequences per micro-batch
    pad_to_multiple: int = 1  # tokens; 2 * cp with context parallelism, times tp under sequence parallelism
    count_multiple: int = 1  # micro-batches; the pipeline size under the interleaved schedule
    same_shapes: bool = False  # where little padding does it, as a pipeline wants: shapes then need not travel
    cp_rank: int = 0
    cp_size: int = 1

    def split(self, batch: Rollout | Experience, *, data_parallel: Ranks) -> list[MicroBatch]:
        """Return the batch as micro-batches on the host, equally many on every data-parallel rank.

        A rank with less work than the others ends with empty micro-batches, which cost next to nothing. `batch` is the
        same on all ranks of a replica, and each context-parallel one gets its part of every micro-batch.
        """
        lengths: list[int] = batch.lengths.tolist()
        multiple = self.sequence_multiple
        if self.packing:
            lengths = [-(-length // multiple) * multiple for length in lengths]
            needed = minimum_microbatches(lengths, self.max_tokens)
        else:
            needed = -(-len(lengths) // self.micro_batch_size)
        count = int(data_parallel.max(torch.tensor(max(needed, 1))))
        count = -(-count // self.count_multiple) * self.count_multiple
        if self.packing:
            plan = plan_microbatches(lengths, max_tokens=self.max_tokens, count=count)
        else:
            order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
            size = self.micro_batch_size
            plan = [sorted(order[i * size : (i + 1) * size]) for i in range(count)]
        shape = self._common_shape(lengths, plan)
        if self.packing:
            make = partial(pack, sequence_multiple=multiple, min_tokens=shape[1])
        else:
            make = partial(pad, min_shape=shape)
        names = token_fields(batch)
        micros = [make(batch, rows, field_names=names, pad_to_multiple=self.pad_to_multiple) for rows in plan]
        return [cut(micro, cp_rank=self.cp_rank, cp_size=self.cp_size) for micro in micros]

    def _common_shape(self, lengths: Sequence[int], plan: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return (rows, tokens of each) that every micro-batch is padded to, (1, 1) where that would add too much."""
        if not self.same_shapes:
            return 1, 1
        if self.packing:
            shapes = [(1, sum(lengths[row] for row in rows)) for rows in plan]
        else:
            shapes = [(len(rows), max((lengths[row] for row in rows), default=0)) for rows in plan]
        rows, tokens = (max(sizes) for sizes in zip(*shapes, strict=True))
        padded, needed = len(plan) * rows * tokens, sum(rows * tokens for rows, tokens in shapes)
        return (rows, tokens) if 1 <= padded <= (1.0 + SHAPE_PADDING) * needed else (1, 1)

    @property
    def sequence_multiple(self) -> int:
        """Tokens of which the length of each packed sequence is rounded up to a multiple."""
        return 2 * self.cp_size if self.cp_size > 1 else 1


def token_fields(batch: Rollout | Experience) -> list[str]:
    """Return the names of the per-token tensors of a batch, tokens excepted."""
    fields = batch.items()  # type: ignore[union-attr]
    return [name for name, value in fields if isinstance(value, Tensor) and value.dim() == 2 and name != "tokens"]


def to_device(micros: list[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches one after the other on `device`, and report them as progress.

    What the host reads of them stays on the host: where sequences begin, and the columns that a rank holds.
    """
    for number, micro in enumerate(micros):
        progress.report(number, len(micros), unit="micro-batches")
        yield replace(
            micro,
            tokens=send(micro.tokens, device),
            position_ids=send(micro.position_ids, device),
            targets=send(micro.targets, device),
            fields={name: send(value, device) for name, value in micro.fields.items()},
            hidden=None if micro.hidden is None else send(micro.hidden, device),
        )
