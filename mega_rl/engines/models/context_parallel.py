"""Core attention of a context-parallel rank: own queries, keys and values of whole sequences.

Each rank holds two chunks of every sequence (see `mega_rl.data.packing`). Keys and values are gathered from the group
in one collective, put in order, and each chunk of queries attends to the keys from the sequence's begin to the chunk's
end. Their gradients go back the same way and are added in float32 at least.

Per layer and micro-batch of T tokens, a rank receives (cp - 1) / cp * T * groups * (D + E) numbers in the forward and
as many in the backward; T * groups * (D + E) numbers are kept for the backward, unless core attention is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.data.packing import held_positions
from mega_rl.engines.models.attention_kernels import Attend, Picked
from mega_rl.engines.models.rope import ONE_ROW, TokenPositions
from mega_rl.parallel.accelerator.base import send


@dataclass
class SharedSequences(TokenPositions):
    """Parameters of whole sequences that a context-parallel group shares, plus the index maps of its slices.

    Sequences of one length are attended together, so tokens are put in the order of lengths. `pieces[i]` is (number of
    sequences, tokens in one of their chunks). `sorted_queries` and `sorted_keys` are the places, in this rank's slice
    and in the slices of all ranks one after another, of the tokens in that order; `from_sorted_*` are the inverses.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    sorted_queries: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [T / cp] int64
    from_sorted_queries: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sorted_keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [T] int64
    from_sorted_keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def shared_sequences(
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    positions: Tensor | None,
    device: torch.device,
    cp_rank: int,
    cp_size: int,
) -> SharedSequences:
    """Attention parameters of a packed micro-batch whose sequences, multiples of 2 * cp, end at `cu_seqlens`.

    Every boundary ([n+1] int32 on the host, from 0 to T) is that of the whole; the padding at the end of a sequence is
    part of it, which causality keeps away from its tokens. `positions` [T / cp] int64, on `device`, as the index maps.
    """
    lengths = cu_seqlens.to(torch.int64).diff()
    order = lengths.argsort(stable=True)
    places = torch.cat([held_positions(lengths.tolist(), cp_rank=r, cp_size=cp_size) for r in range(cp_size)])
    from_keys = places.argsort()  # each token's place in the slices one after another
    sorted_keys = from_keys[_sorted_tokens(lengths, order)]
    sorted_queries = _sorted_tokens(lengths // cp_size, order)
    sizes, counts = (x.tolist() for x in lengths.unique(return_counts=True))
    return SharedSequences.of(
        cu_seqlens,
        max_seqlen,
        qkv_format=ONE_ROW,
        positions=positions,
        pieces=tuple((count, size // (2 * cp_size)) for count, size in zip(counts, sizes, strict=True)),
        sorted_queries=send(sorted_queries, device),
        from_sorted_queries=send(sorted_queries.argsort(), device),
        sorted_keys=send(sorted_keys, device),
        from_sorted_keys=send(sorted_keys.argsort(), device),
    )


def _sorted_tokens(lengths: Tensor, order: Tensor) -> Tensor:
    """[sum of lengths] int64: packed positions of the sequences' tokens, the sequences taken in this order."""
    starts = (lengths.cumsum(0) - lengths)[order]
    taken = lengths[order]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - (taken.cumsum(0) - taken), taken)


def attend_shared(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup,
    window: int | None,
    sequences: SharedSequences | None,
) -> Tensor:
    """Context of this rank's tokens in their whole sequences, heads flattened; shapes as in `CoreAttention`.

    The tensors are this rank's slices over `group`: [S / cp, B, heads, .] without `sequences`, [T / cp, heads, .] with.
    `window` is the number of last tokens that each may see; keys that no query of a chunk sees are left out.
    """
    widths = [key.size(-1), value.size(-1)]
    joined = torch.cat([key, value], dim=-1)
    chunks = partial(attend_chunks, attend, rank=group.rank(), size=group.size(), window=window)
    if sequences is None:
        order, inverse = _row_order(query.size(0), group.size(), query.device)
        whole = _GatherTokens.apply(joined, order, inverse, group).permute(1, 2, 0, 3)
        context = chunks(query.permute(1, 2, 0, 3), *whole.split(widths, dim=-1))
        return context.permute(2, 0, 1, 3).flatten(2)
    queries = Picked.apply(query, sequences.sorted_queries, sequences.from_sorted_queries)
    whole = _GatherTokens.apply(joined, sequences.sorted_keys, sequences.from_sorted_keys, group)
    sizes = [2 * count * chunk for count, chunk in sequences.pieces]
    contexts = []
    for (count, _), q, kv in zip(
        sequences.pieces, queries.split(sizes), whole.split([group.size() * n for n in sizes]), strict=True
    ):
        q, kv = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, kv))
        contexts.append(chunks(q, *kv.split(widths, dim=-1)).transpose(1, 2).flatten(2).flatten(0, 1))
    return Picked.apply(torch.cat(contexts), sequences.from_sorted_queries, sequences.sorted_queries)


def attend_chunks(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, rank: int, size: int, window: int | None
) -> Tensor:
    """Return [n, heads, 2c, E] of a rank's query [n, heads, 2c, D], its two chunks.

    key and value are whole, [n, groups, 2c * size, .].
    """
    length = query.size(2) // 2
    contexts = []
    for number, chunk in zip((rank, 2 * size - 1 - rank), query.chunk(2, dim=2), strict=True):
        end = (number + 1) * length
        begin = 0 if window is None else max(0, end - length - window + 1)
        contexts.append(attend(chunk, key[:, :, begin:end], value[:, :, begin:end]))
    return torch.cat(contexts, dim=2)


@lru_cache(maxsize=64)
def _row_order(held: int, cp_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of a row's tokens in the ranks' slices, and the inverse."""
    length = held * cp_size
    places = torch.cat([held_positions([length], cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)])
    return send(places.argsort(), device), send(places, device)


class _GatherTokens(torch.autograd.Function):
    """[N, ...] on each rank -> [cp * N, ...] of whole sequences on every rank.

    The backward adds what all ranks say of a token, in rank order, in float32 at least. An all-to-all moves as many
    bytes as a reduce-scatter, while that would round to bfloat16 after each of its cp - 1 additions, or move twice the
    bytes in float32.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, inverse: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.group = group
        gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        sent = grad.index_select(0, inverse)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        shares = received.unflatten(0, (ctx.group.size(), -1))
        total = shares.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.to(grad.dtype), None, None, None
