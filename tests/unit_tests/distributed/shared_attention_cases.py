"""The core attention on slices of sequences against explicit softmax on whole ones, as each rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.unit_tests.engines.models.attention_cases import (
    DIM,
    HEADS,
    MIXES,
    PLAIN,
    VARIANTS,
    Variant,
    core_attention,
    inputs,
    reference,
)

MIXES_HERE = {**MIXES, "several of some lengths": (9, 3, 10, 33, 4, 12, 35, 3)}
PADDING = 1e3  # what stands in queries, keys and values after a sequence's end, and must not matter


def differences(
    collection: Any, lengths: Sequence[int], variant: Variant, *, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Largest difference of this rank's context and gradients to the reference, relative to the largest number."""
    module = core_attention(variant, dtype=dtype, collection=collection)
    *given, grad = inputs(lengths, variant, dtype=dtype)
    sinks = [] if module.softmax_offset is None else [module.softmax_offset]
    context = reference(lengths, *given, variant, *sinks)
    gradients = torch.autograd.grad(context, [*given, *sinks], grad.double())
    expected = [context, *gradients]
    worst = {}
    for form, run in (("packed", _packed), ("padded", _padded)):
        actual = run(module, collection.cp, lengths, [x.detach() for x in given], grad, expected[:4])
        if sinks:
            share = actual.pop().double()  # of this rank's queries
            torch.distributed.all_reduce(share, group=collection.cp)
            actual.append((share, expected[4]))
        for name, whole, (one, other) in zip("oqkvs", expected, actual, strict=False):
            # Of short sequences a rank may hold padding alone.
            off = (one - other).detach().abs().flatten().tolist()
            worst[f"{form} {name}"] = max(off, default=0.0) / float(whole.detach().abs().max().clamp(min=1.0))
    return worst


def _packed(
    module: Any, group: Any, lengths: Sequence[int], given: list[Tensor], grad: Tensor, expected: Sequence[Tensor]
) -> list[Any]:
    """(found, expected) of this rank's context and gradients, and the sinks' gradient, sequences rounded up."""
    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.attention import packed_sequences

    rank, size = group.rank(), group.size()
    rounded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    held = held_positions(rounded, cp_rank=rank, cp_size=size)
    bounds = torch.tensor([0, *rounded]).cumsum(0).to(torch.int32)
    local = [_spread(x, lengths, rounded, PADDING)[held].requires_grad_() for x in given]
    sequences = packed_sequences(bounds, max(rounded), cp_rank=rank, cp_size=size)
    context = module(*local, None, packed_seq_params=sequences).squeeze(1)
    inside = _spread(torch.ones(sum(lengths)), lengths, rounded, 0.0)[held].bool()
    return _compared(
        module,
        context,
        local,
        _spread(grad, lengths, rounded, 0.0)[held],
        [_spread(x, lengths, rounded, 0.0)[held] for x in expected],
        inside,
    )


def _padded(
    module: Any, group: Any, lengths: Sequence[int], given: list[Tensor], grad: Tensor, expected: Sequence[Tensor]
) -> list[Any]:
    """As `_packed`, for rows [S, B, ...]."""
    from mega_rl.data.packing import held_positions

    rank, size = group.rank(), group.size()
    longest = -(-max(lengths) // (2 * size)) * 2 * size
    held = held_positions([longest], cp_rank=rank, cp_size=size)

    def rows(x: Tensor, padding: float) -> Tensor:
        whole = _spread(x, lengths, [longest] * len(lengths), padding)
        return whole.unflatten(0, (len(lengths), longest)).transpose(0, 1)[held]

    local = [rows(x, PADDING).contiguous().requires_grad_() for x in given]
    context = module(*local, None)
    inside = rows(torch.ones(sum(lengths)), 0.0).bool()
    return _compared(module, context, local, rows(grad, 0.0), [rows(x, 0.0) for x in expected], inside)


def _compared(
    module: Any, context: Tensor, local: list[Tensor], grad: Tensor, expected: list[Tensor], inside: Tensor
) -> list[Any]:
    """Pairs of what is found and expected; contexts at tokens only, gradients at padding too, where they are 0."""
    sinks = [] if module.softmax_offset is None else [module.softmax_offset]
    gradients = torch.autograd.grad(context, [*local, *sinks], grad)
    return [
        (context[inside], expected[0][inside]),
        *zip(gradients[:3], expected[1:], strict=True),
        *gradients[3:],
    ]


def _spread(x: Tensor, lengths: Sequence[int], rounded: Sequence[int], padding: float) -> Tensor:
    """Packed sequences with padding behind each."""
    parts = []
    for part, size in zip(x.split(list(lengths)), rounded, strict=True):
        parts += [part, x.new_full((size - part.size(0), *x.shape[1:]), padding)]
    return torch.cat(parts)


def leaks(collection: Any, variant: Variant, *, poison: float) -> list[str]:
    """What of the others changes, by a single bit, when one packed sequence's q, k, v and gradient become `poison`."""
    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.attention import packed_sequences

    group = collection.cp
    module = core_attention(variant, collection=collection)
    lengths = [8 * n for n in (1, 3, 2, 3, 9)]
    held = held_positions(lengths, cp_rank=group.rank(), cp_size=group.size())
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    sequences = packed_sequences(bounds.to(torch.int32), max(lengths), cp_rank=group.rank(), cp_size=group.size())

    def everything(tensors: Sequence[Tensor]) -> list[Tensor]:
        *local, grad = (x.detach()[held].requires_grad_(i < 3) for i, x in enumerate(tensors))
        context = module(*local, None, packed_seq_params=sequences).squeeze(1)
        return [context.detach(), *torch.autograd.grad(context, local, grad)]

    before = everything(inputs(lengths, variant))
    changed = []
    for victim in range(len(lengths)):
        spoiled = inputs(lengths, variant)
        for tensor in spoiled:
            tensor.data[bounds[victim] : bounds[victim + 1]] = poison
        others = (held < bounds[victim]) | (held >= bounds[victim + 1])
        after = everything(spoiled)
        changed += [
            f"{name} of the others of sequence {victim}"
            for name, one, other in zip("oqkv", before, after, strict=True)
            if not torch.equal(one[others], other[others])
        ]
        assert not torch.equal(before[0], after[0])
    return changed


def added_in_float32(group: Any) -> float:
    """Gradient of a bfloat16 key that gets 256 from rank 0 and 1 from each other rank.

    In bfloat16 256 + 1 is 256 again, so additions one after another would give 256; of the sum 259 of four ranks 260
    is the nearest bfloat16.
    """
    from mega_rl.engines.models.context_parallel import _GatherTokens

    order = torch.arange(2 * group.size())
    token = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    whole = _GatherTokens.apply(token, order, order, group)
    share = 256.0 if group.rank() == 0 else 1.0
    (gradient,) = torch.autograd.grad(whole.sum() * share, token)
    return float(gradient[0, 0])


def chunk_differences(rank: int) -> dict[str, float]:
    """Of each cp rank's two chunks of bfloat16 rows, on one device, to whole rows in float32: context and gradients."""
    from mega_rl.parallel.accelerator import prepare

    device = prepare("auto").device
    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.context_parallel import Chunks

    rows, length, worst = 3, 256, {}
    for groups in (1, HEADS // 2, HEADS):
        module = core_attention(Variant(groups=groups))
        generator = torch.Generator().manual_seed(groups)
        given = [torch.randn(rows, n, length, DIM, generator=generator) for n in (HEADS, groups, groups, HEADS)]
        q, k, v, grad = (x.to(device, torch.bfloat16).requires_grad_(i < 3) for i, x in enumerate(given))
        for size in (1, 2, 4):
            for number in range(size):
                held = held_positions([length], cp_rank=number, cp_size=size).to(device)
                chunks = Chunks(module._attend, rank=number, size=size, window=None)
                context = chunks(q[:, :, held], k, v)
                actual = [context, *torch.autograd.grad(context, [q, k, v], grad[:, :, held])]
                exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
                rows_of_all = module._attend(*exact)[:, :, held]
                expected = [rows_of_all, *torch.autograd.grad(rows_of_all, exact, grad[:, :, held].float())]
                worst[f"groups {groups} rank {number} of {size}"] = max(
                    float((one.float() - other).norm() / other.norm())
                    for one, other in zip(actual, expected, strict=True)
                )
    return worst


def shared_attention(collection: Any) -> dict[str, Any]:
    """Everything test_context_parallel.py looks at."""
    short = ["one long among short", "several of some lengths", "length 1"]
    return {
        "mixes": {mix: differences(collection, lengths, PLAIN) for mix, lengths in MIXES_HERE.items()},
        "variants": {
            f"{name}, {mix}": differences(collection, MIXES_HERE[mix], variant)
            for name, variant in VARIANTS.items()
            for mix in short
        },
        "dtypes": {
            str(dtype): differences(collection, MIXES_HERE["several of some lengths"], PLAIN, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
        "leaks": {
            name: leaks(collection, variant, poison=poison)
            for poison in (0.5, float("nan"))
            for name, variant in ((f"{poison} plain", PLAIN), (f"{poison} everything", VARIANTS["everything"]))
        },
        "bf16 sum": added_in_float32(collection.cp),
    }
