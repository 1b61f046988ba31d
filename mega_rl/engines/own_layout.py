"""A frozen model on another layout: rows travel to its replicas, outputs come back.

The ranks are those of the model that trains, here the student, and each holds its part of both. Both cut a batch over
data parallelism, pipeline, tensors and sequences, each in its way. Of every token travel some bytes so that the frozen
model's replicas get equal shares of all rows, whichever rank they come from. Log-probs come back by row. Last hidden
states go from the rank that computed them to those whose micro-batches hold the token (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from mega_rl.data.minibatches import partition_balanced
from mega_rl.data.packing import MicroBatch, token_places
from mega_rl.engines.base import ModelEngine
from mega_rl.parallel.accelerator.base import send
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.groups import current
from mega_rl.protocols import ModelPasses
from mega_rl.types import Experience, Lesson, Rollout, TokenOutputs

PROJECTION_ROUND = 64 << 20  # bytes of the projection that a rank receives at once
_SENT = ("tokens", "loss_mask", "prompt_lengths", "lengths")  # fields that a frozen model reads


@dataclass(frozen=True)
class _Recut:
    """Rows of all of the student's replicas, and the part of the frozen model's replica."""

    share: Experience  # rows of this replica of the frozen model
    shares: Sequence[Sequence[int]]  # rows of each, among all rows
    starts: Tensor  # [all rows] int64, number of each row's first token among all tokens
    first: int  # row of the student's replica that is the first among all rows
    tokens: int  # all rows'

    def token_numbers(self, micro: MicroBatch, rows: Tensor, *, width: int) -> Tensor:
        """Return the number among all tokens at each position, [positions] int64, -1 on padding.

        rows: [n] int64, the rows of the micro-batch's batch among all rows. width: its padded length.
        """
        places = token_places(micro, width=width).flatten()
        if not len(rows):
            return places
        row, column = places.clamp(min=0) // width, places.clamp(min=0) % width
        return torch.where(places < 0, places, self.starts[rows[row]] + column)


@dataclass
class OwnLayout:
    """A frozen model, seen by roles on the student's layout: a `TokenModel`, and a `Teacher`.

    model: its passes, which may bring it to the device first. dtype: of its weights and hidden states. The layouts
    have the same ranks. Every method is collective over all of them.
    """

    model: ModelPasses
    engine: ModelEngine
    student: ModelEngine
    dtype: torch.dtype
    _projection: Tensor | None = field(default=None, init=False)  # [V / tp, H] on the host, of the student's columns

    def __post_init__(self) -> None:
        ours, theirs = self.engine.groups, self.student.groups
        assert ours.layout.world_size == theirs.layout.world_size, "the layouts have the same ranks"
        self._replicas, self._students = GroupRanks(ours.dp), GroupRanks(theirs.dp)
        self._world = GroupRanks(ours.world)
        self._width = self.engine.sharding.hf.hidden_size
        self._student_is_last = theirs.coordinates.pp_rank == theirs.layout.pp - 1

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        recut = self._recut(batch)
        with current(self.engine.groups):
            logprobs = self.model.forward(recut.share).logprobs
        assert logprobs is not None
        gathered = self._replicas.gather_fields({"logprobs": logprobs})["logprobs"]
        order = torch.tensor([row for rows in recut.shares for row in rows], dtype=torch.int64)
        whole = torch.empty_like(gathered)
        whole[order] = gathered
        count, width = batch.tokens.shape
        return TokenOutputs(logprobs=whole[recut.first : recut.first + count, :width].clone())

    def teach(self, minibatch: Experience) -> Lesson:
        """Return the lesson on the student's micro-batches; hidden states of other tokens are 0.

        Each round moves those of one micro-batch of every student.
        """
        recut = self._recut(minibatch)
        with current(self.engine.groups):
            lesson = self.model.teach(recut.share)
        index, holders = self._places(recut, has_hidden=bool(lesson.hidden))
        if self._projection is None:
            self._projection = self._cut_projection(lesson.weight)
        serve = partial(self._serve, lesson.hidden, index)
        micros = self.student.batching.split(minibatch, data_parallel=self._students)
        hidden = [self._hidden_of(micro, minibatch, recut, holders, serve) for micro in micros]
        if not self._student_is_last:
            return Lesson()
        return Lesson(hidden, send(self._projection, self.student.device))

    def _recut(self, batch: Rollout | Experience) -> _Recut:
        """Return the rows of all students and this replica's share, of about equally many tokens."""
        whole = self._students.gather_fields({name: getattr(batch, name) for name in _SENT})
        counts = [int(count) for count in self._students.gather_json(len(batch.tokens))]
        lengths = whole["lengths"].tolist()
        shares = partition_balanced(lengths, self._replicas.size, equal_counts=False)
        mine = torch.tensor(shares[self._replicas.rank], dtype=torch.int64)
        fields = {name: whole[name][mine] for name in _SENT}
        return _Recut(
            share=Experience.from_rows(fields.pop("tokens"), **fields),
            shares=shares,
            starts=torch.tensor([0, *accumulate(lengths)][: len(lengths)], dtype=torch.int64),
            first=sum(counts[: self._students.rank]),
            tokens=sum(lengths),
        )

    def _places(self, recut: _Recut, *, has_hidden: bool) -> tuple[Tensor, Tensor]:
        """Return the places of hidden states, (position here or -1, rank), [all tokens] both.

        The rank is the one of tensor-parallel rank 0; the next ones have copies. Positions count over micro-batches.
        """
        index = torch.full((recut.tokens,), -1, dtype=torch.int64)
        if has_hidden:
            micros = self.engine.batching.split(recut.share, data_parallel=self._replicas)
            rows = torch.tensor(recut.shares[self._replicas.rank], dtype=torch.int64)
            width = recut.share.tokens.shape[1]
            numbers = torch.cat([recut.token_numbers(micro, rows, width=width) for micro in micros])
            index[numbers[numbers >= 0]] = torch.nonzero(numbers >= 0).flatten()
        here = torch.where(index < 0, -1, self._world.rank - self.engine.groups.coordinates.tp_rank)
        return index, self._world.max(here)

    def _hidden_of(
        self,
        micro: MicroBatch,
        minibatch: Experience,
        recut: _Recut,
        holders: Tensor,
        serve: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return hidden states for a micro-batch, [positions, H] on the host; none off the last stage."""
        count, width = minibatch.tokens.shape
        numbers = recut.token_numbers(micro, torch.arange(recut.first, recut.first + count), width=width)
        places = token_places(micro, width=width).flatten()
        predicts = torch.nn.functional.pad(minibatch.loss_mask[:, 1:], (0, 1)).flatten()  # a response token
        wanted = (places >= 0) & predicts[places.clamp(min=0)] & self._student_is_last
        asked = numbers[wanted]
        # The nearest of the copies that tensor parallelism keeps: they are asked about equally often.
        owners = holders[asked] + self.engine.groups.coordinates.tp_rank
        received = self._fetch(asked, owners, serve)
        hidden = torch.zeros(len(numbers) if self._student_is_last else 0, self._width, dtype=self.dtype)
        hidden[wanted[: len(hidden)]] = received.cpu()
        return hidden

    def _serve(self, hidden: Sequence[Tensor], index: Tensor, asked: Tensor) -> Tensor:
        """Return this rank's hidden states of some tokens, by number among all; hidden: of each micro-batch."""
        ends = torch.tensor([len(part) for part in hidden], dtype=torch.int64).cumsum(0)
        position = index[asked]
        assert not len(asked) or int(position.min()) >= 0, "another rank has these tokens"
        part = torch.bucketize(position, ends, right=True)
        rows = torch.empty(len(asked), self._width, dtype=self.dtype)
        for number in part.unique().tolist():
            chosen = part == number
            rows[chosen] = hidden[number][position[chosen] - (ends[number] - len(hidden[number]))]
        return rows

    def _cut_projection(self, weight: Tensor | None) -> Tensor:
        """Return the projection's rows for this rank's logits, [V / tp, H] on the host; collective.

        weight: this rank's rows as the frozen model cuts them; None off its last pipeline stage. Rows of padding are 0.
        """
        student, layout, at = self.student.groups, self.engine.groups.layout, self.engine.groups.coordinates
        count, held = (engine.sharding.vocab // engine.groups.layout.tp for engine in (self.student, self.engine))
        first = student.coordinates.tp_rank * count
        end = min(first + count, self.engine.sharding.hf.vocab_size) if self._student_is_last else first
        numbers = torch.arange(first, max(first, end))
        # The copies of data and context parallelism keep the one at this rank's place on the last stage.
        stage = (layout.pp - 1) * layout.stage_size + self._world.rank % layout.stage_size - at.tp_rank
        rows = torch.empty(0, self._width, dtype=self.dtype) if weight is None else weight
        result = torch.zeros(count, self._width, dtype=self.dtype)
        per_round = max(1, PROJECTION_ROUND // (self._width * self.dtype.itemsize))
        for start in range(0, count, per_round):
            asked = numbers[start : start + per_round]
            received = self._fetch(asked % held, stage + asked // held, lambda local: rows[local.to(rows.device)])
            result[start : start + len(asked)] = received.cpu()
        return result.pin_memory() if self.student.device.type == "cuda" else result

    def _fetch(self, numbers: Tensor, owners: Tensor, serve: Callable[[Tensor], Tensor]) -> Tensor:
        """Return row `numbers[i]` of world rank `owners[i]`, [n, H], where the world's tensors travel; collective.

        Of a row travel its number, 8 bytes, and its elements. numbers and owners: [n] int64 on the host; n may differ
        between ranks and be 0. serve: gets the numbers that others ask this rank for, [m] int64 on the host, m may be
        0, and returns the rows, [m, H] on any device.
        """
        order = owners.argsort(stable=True)
        ours = torch.bincount(owners, minlength=self._world.size).tolist()
        theirs = self._world.exchange_counts(ours)
        rows = serve(self._world.send(numbers[order], ours, theirs).cpu())
        expected = (sum(theirs), self._width)
        assert (rows.shape, rows.dtype) == (expected, self.dtype), f"{tuple(rows.shape)} {rows.dtype} for {expected}"
        arrived = self._world.send(rows, theirs, ours)
        result = torch.empty_like(arrived)
        result[order.to(result.device)] = arrived
        return result
