"""Continuous decoding of turns: rows enter and leave a running batch, caches wait between turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from mega_rl.agents.environment import GATHER_S, TICK_S, Answer, Asked, TurnQueue, TurnRequest, give_answer
from mega_rl.agents.trajectory import Turn
from mega_rl.errors import RunError
from mega_rl.rollout.decoding import (
    SHRINK_SHARE,
    Draw,
    GrowingLayer,
    check_interval,
    forward,
    left_padded,
    make_cache,
    select_rows,
)
from mega_rl.types import IdRanges

_SOON_S = 0.005  # wait for the next turns of rows that have left, so that batches seldom depend on the moment
KeysOf = Callable[[Sequence[TurnRequest]], Tensor]  # random streams of turns, [R] int64
Branch = tuple[int, int, int]  # prompt, sample, number of the branch


@dataclass(frozen=True)
class RowCache:
    """Cache of one row."""

    token_ids: tuple[int, ...]
    layers: Sequence[Sequence[Tensor]]  # keys and values, [kv heads, tokens, head size]

    def common(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens that are the same."""
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(self.token_ids), len(token_ids)))


@dataclass
class KeptCaches:
    """Caches that wait for the next turns of their trajectories; the oldest are dropped."""

    most: int
    _of_branch: dict[Branch, RowCache] = field(default_factory=dict)  # the oldest first

    def __contains__(self, request: TurnRequest) -> bool:
        return _branch(request) in self._of_branch

    def put(self, request: TurnRequest, kept: RowCache) -> None:
        """Keep the cache of a turn that has ended."""
        self._of_branch.pop(_branch(request), None)
        self._of_branch[_branch(request)] = kept
        while len(self._of_branch) > self.most:
            del self._of_branch[next(iter(self._of_branch))]

    def longest(self, request: TurnRequest) -> tuple[int, RowCache | None]:
        """Return the most tokens that need not be read again, and the cache that holds them.

        One token is always read, for its logits. Other branches of the trajectory are searched, too: a fork's begin is
        there.
        """
        own = [kept for branch, kept in self._of_branch.items() if branch[:2] == request.key[:2]]
        caches = [(min(kept.common(request.token_ids), len(request.token_ids) - 1), kept) for kept in own]
        return max(caches, key=lambda one: one[0], default=(0, None))

    def drop(self, ended: Container[tuple[int, int]]) -> None:
        """Drop the caches of trajectories (prompt, sample) that have ended."""
        for branch in [branch for branch in self._of_branch if branch[:2] in ended]:
            del self._of_branch[branch]


def _branch(request: TurnRequest) -> Branch:
    return (*request.key[:2], request.key[2] >> 16)


@dataclass(eq=False)
class TurnRow:
    """A turn in the batch."""

    request: TurnRequest
    answer: Future[Answer]
    token_ids: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False  # answered or cancelled, and not removed yet

    @property
    def left(self) -> int:
        """Return the tokens that may still come."""
        return self.request.limit - len(self.token_ids)


class RunningBatch:
    """Rows that decode together; their tokens end at the cache's last column, holes are masked.

    A result depends on weights, tokens, key and limit; other rows change log-probs by rounding only.
    """

    def __init__(
        self, model: PreTrainedModel, draw: Draw, *, stop_token_ids: Tensor, kept: KeptCaches, hidden: IdRanges = ()
    ) -> None:
        """hidden: tokens that are never chosen."""
        self._model, self._draw, self.kept, self._hidden = model, draw, kept, hidden
        self._stop_ids, self._device = frozenset(stop_token_ids.tolist()), stop_token_ids.device
        self._check_tokens = check_interval(self._device)
        self.rows = list[TurnRow]()
        self.read_tokens = 0  # tokens that prefills have read
        # Of the rows; unset without any.
        self._cache: Cache
        self._logits: Tensor  # [R, V] of the next token
        self._mask: Tensor  # [R, columns] int64
        self._counts: Tensor  # [R, 3] int64: stream key, next position, tokens sampled

    @property
    def size(self) -> int:
        """Return the number of rows that have not ended."""
        return sum(not row.ended for row in self.rows)

    @torch.inference_mode()
    def enter(self, asked: Sequence[Asked], keys: Tensor) -> None:
        """Read the tokens of new rows that no kept cache holds.

        keys: [new rows] int64 streams.
        """
        rows = [TurnRow(*one) for one in asked]
        place = {ids: i for i, ids in enumerate(dict.fromkeys(row.request.token_ids for row in rows))}
        first = {row.request.token_ids: row.request for row in reversed(rows)}
        caches = [self.kept.longest(first[ids]) for ids in place]
        reused = max(count for count, _ in caches)
        unread = [ids[count:] for ids, (count, _) in zip(place, caches, strict=True)]
        most = reused + max(map(len, unread)) + max(row.left for row in rows)
        cache = make_cache(self._model.config, max_tokens=most)
        if reused:
            _fill(cache, caches, reused)
        new, mask = left_padded(unread, self._device)
        self.read_tokens += int(mask.sum())
        _, held = left_padded([(1,) * count for count, _ in caches], self._device)
        mask = torch.cat([held, mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = forward(self._model, cache, new, mask, positions[:, reused:], hidden=self._hidden)
        of_row = torch.tensor([place[row.request.token_ids] for row in rows], device=self._device)
        select_rows(cache, of_row)
        counts = torch.stack([keys, positions[of_row, -1] + 1, torch.zeros_like(keys)], dim=1)
        logits, mask = logits[of_row], mask[of_row]
        if self.rows:
            self._remove_ended()
            masks = (self._mask, mask)
            width = max(int((one.cumsum(1) > 0).any(0).sum()) for one in masks)
            mask = torch.cat([pad(one, (width - one.shape[1], 0)) for one in masks])
            most = width + max(row.left for row in (*self.rows, *rows))
            cache = _joined((self._cache, cache), width, most)
            logits, counts = torch.cat([self._logits, logits]), torch.cat([self._counts, counts])
        self.rows += rows
        self._cache, self._logits, self._mask, self._counts = cache, logits, mask, counts

    @torch.inference_mode()
    def advance(self) -> bool:
        """Decode some tokens and answer rows that have ended; return whether any has."""
        steps = min(self._check_tokens, *(row.left for row in self.rows if not row.ended))
        drawn, columns = torch.empty(0), list[tuple[Tensor, Tensor]]()
        for step in range(steps):
            if step:
                self._read(drawn)
            drawn, logprobs = self._draw(self._logits, self._counts[:, 0], self._counts[:, 2])
            self._counts[:, 2] += 1
            columns.append((drawn, logprobs))
        tokens, values = (torch.stack(column, dim=1).tolist() for column in zip(*columns, strict=True))
        before = self.size
        for place, (row, ids, own) in enumerate(zip(self.rows, tokens, values, strict=True)):
            if not row.ended:
                self._append(place, row, ids, own)
        live = [place for place, row in enumerate(self.rows) if not row.ended]
        if len(live) <= (1.0 - SHRINK_SHARE) * len(self.rows):
            drawn = drawn[live]
            self._remove_ended()
        if self.rows:
            self._read(drawn)
        return len(live) < before

    def _append(self, place: int, row: TurnRow, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens to a row up to its end, and answer it there."""
        end = next((count for count, token in enumerate(ids, 1) if token in self._stop_ids), len(ids))
        check_finite(row.request, logprobs[:end])
        row.token_ids += ids[:end]
        row.logprobs += logprobs[:end]
        stopped = row.token_ids[-1] in self._stop_ids
        if not stopped and row.left:
            return
        row.ended = True
        known = (*row.request.token_ids, *row.token_ids[:-1])
        columns = self._mask[place].nonzero()[: len(known), 0]
        sides = [[side[place].index_select(1, columns) for side in _sides(one)] for one in self._cache.layers]
        self.kept.put(row.request, RowCache(known, sides))
        give_answer(row.answer, Turn(tuple(row.token_ids), tuple(row.logprobs), (), stopped))

    def drop_cancelled(self) -> None:
        """Remove the rows of turns that nobody waits for; their caches are not kept."""
        cancelled = [row for row in self.rows if not row.ended and row.answer.cancelled()]
        for row in cancelled:
            row.ended = True
        if cancelled:
            self._remove_ended()

    def _read(self, drawn: Tensor) -> None:
        """Compute the next logits from the tokens [R] that were drawn."""
        self._mask = pad(self._mask, (0, 1), value=1)
        positions = self._counts[:, 1:2]
        self._logits = forward(self._model, self._cache, drawn[:, None], self._mask, positions, hidden=self._hidden)
        self._counts[:, 1] += 1

    def _remove_ended(self) -> None:
        keep = [place for place, row in enumerate(self.rows) if not row.ended]
        self.rows = [self.rows[place] for place in keep]
        if self.rows:
            index = torch.tensor(keep, device=self._device)
            select_rows(self._cache, index)
            self._logits, self._mask, self._counts = (x[index] for x in (self._logits, self._mask, self._counts))
        else:
            del self._cache, self._logits, self._mask, self._counts


def check_finite(request: TurnRequest, logprobs: Sequence[float]) -> None:
    """Raise RunError for log-probs of a turn that are not finite."""
    if not all(map(math.isfinite, logprobs)):
        prompt, sample, number = request.key
        raise RunError(
            f"the rollout model's logits are not finite: prompt_index={prompt}, sample_index={sample}, turn {number}; "
            "the weights have diverged"
        )


def _sides(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer, [R, kv heads, columns, head size]."""
    assert isinstance(layer, GrowingLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _fill(cache: Cache, caches: Sequence[tuple[int, RowCache | None]], width: int) -> None:
    """Write each row's (tokens, cache) to the last of an empty cache's first `width` columns."""
    some = next(kept for _, kept in caches if kept is not None)
    for place, layer in enumerate(cache.layers):
        assert isinstance(layer, GrowingLayer)
        rows = [(count, (kept or some).layers[place]) for count, kept in caches]
        sides = ([pad(held[side][:, :count], (0, 0, width - count, 0)) for count, held in rows] for side in (0, 1))
        layer.update(*map(torch.stack, sides))


def _joined(caches: Sequence[Cache], width: int, max_tokens: int) -> Cache:
    """Return one cache with the rows of all, whose last `width` columns hold all tokens."""
    joined = Cache(layers=[GrowingLayer(max_tokens) for _ in caches[0].layers])
    for layer, *parts in zip(joined.layers, *(one.layers for one in caches), strict=True):
        sides = zip(*map(_sides, parts), strict=True)
        assert isinstance(layer, GrowingLayer)
        layer.update(*(torch.cat([pad(one, (0, 0, width - one.shape[2], 0)) for one in side]) for side in sides))
    return joined


def answer_turns(asked: TurnQueue, batch: RunningBatch, *, keys: KeysOf, batch_size: int) -> None:
    """Sample turns until no more will come, at most `batch_size` at a time.

    keys: returns the random streams of turns, [R] int64.
    """
    waiting, have_left = list[Asked](), False
    while True:
        gather_s = GATHER_S if not batch.size else _SOON_S if have_left else 0.0
        if (taken := asked.take(0.0 if batch.size or waiting else TICK_S, gather_s=gather_s)) is None:
            return
        batch.drop_cancelled()
        batch.kept.drop(asked.ended)
        # A turn whose cache is kept is cheap now, and the cache of a later one may have been dropped.
        waiting = [one for one in waiting if not one[1].cancelled()]
        waiting = sorted(waiting + taken, key=lambda one: (one[0] not in batch.kept, len(one[0].token_ids), one[0].key))
        if new := waiting[: batch_size - batch.size]:
            waiting = waiting[len(new) :]
            batch.enter(new, keys([request for request, _ in new]))
        have_left = batch.size > 0 and batch.advance()
