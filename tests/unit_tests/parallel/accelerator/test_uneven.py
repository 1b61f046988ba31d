"""Parts of different sizes, as experts' tokens have them, through Megatron-Core's gather and reduce-scatter on gloo."""

from __future__ import annotations

import torch

from tests.helpers.distributed import run_ranks

SIZES = [3, 0, 5]
WIDTH = 4


def move(rank: int) -> dict[str, torch.Tensor]:
    """Both collectives and their gradients on this rank's part."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    group = groups.initialize(ParallelLayout(world_size=3, tp=3), accelerator=accelerator, timeout_s=60).tp
    part = (torch.arange(SIZES[rank] * WIDTH).view(-1, WIDTH) + 100.0 * rank).requires_grad_()
    whole = gather_from_sequence_parallel_region(part, group=group, output_split_sizes=SIZES)
    (part_grad,) = torch.autograd.grad(whole, part, (rank + 1.0) * torch.ones_like(whole))
    # Not contiguous: gloo would reduce the wrong elements of it.
    terms = (torch.arange(sum(SIZES) * WIDTH).view(WIDTH, -1).T * (rank + 1.0)).requires_grad_()
    summed = reduce_scatter_to_sequence_parallel_region(terms, group=group, input_split_sizes=SIZES)
    (terms_grad,) = torch.autograd.grad(summed, terms, (rank + 1.0) * torch.ones_like(summed))
    sizes = maybe_move_tensor_to_cpu(torch.tensor(SIZES), as_numpy=True)
    assert sizes.tolist() == SIZES
    assert not torch.is_tensor(sizes)
    assert torch.is_tensor(maybe_move_tensor_to_cpu(torch.tensor(SIZES)))
    groups.destroy()
    return {"whole": whole.detach(), "part grad": part_grad, "summed": summed.detach(), "terms grad": terms_grad}


def test_parts_of_different_sizes() -> None:
    """Three ranks, one of them with nothing: integers in float32, so every bit."""
    ranks = run_ranks(3, move, device="cpu")
    parts = [torch.arange(size * WIDTH).view(-1, WIDTH) + 100.0 * rank for rank, size in enumerate(SIZES)]
    terms = torch.arange(sum(SIZES) * WIDTH).view(WIDTH, -1).T * 6.0  # 1 + 2 + 3
    grads = [torch.full((size, WIDTH), rank + 1.0) for rank, size in enumerate(SIZES)]
    for rank, actual in enumerate(ranks):
        assert torch.equal(actual["whole"], torch.cat(parts))
        assert torch.equal(actual["part grad"], torch.full((SIZES[rank], WIDTH), 6.0))
        assert torch.equal(actual["summed"], terms.split(SIZES)[rank])
        assert torch.equal(actual["terms grad"], torch.cat(grads))
