"""The sum over ranks that share sequences, and its gradient, against finite differences of all ranks' losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.distributed import run_ranks

SIZE, COUNT, STEP = 2, 3, 1e-6


def share(x: Tensor, rank: int) -> Tensor:
    """A rank's share of a loss: not linear in the sum, and of another form on each rank."""
    from mega_rl.parallel.comm import sum_over_context

    total = sum_over_context(x, group=dist.group.WORLD)
    return ((rank + 1) * total.sin() * x).sum() + (total[rank] ** 3)


def differentiate(rank: int) -> dict[str, Any]:
    """The sum, gradients of first and second order of this rank's numbers, and finite differences of both."""
    dist.init_process_group("gloo")
    whole = torch.randn(SIZE, COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(share(x, rank), x, create_graph=True)[0]

    def of_all_ranks(change: Tensor, *, second: bool) -> float:
        own = (whole + change)[rank].requires_grad_()
        value = gradient(own).square().sum().detach() if second else share(own, rank).detach()
        dist.all_reduce(value)
        return float(value)

    def differences(*, second: bool) -> Tensor:
        steps = STEP * torch.eye(SIZE * COUNT, dtype=torch.float64).view(-1, SIZE, COUNT)
        ends = [of_all_ranks(s, second=second) - of_all_ranks(-s, second=second) for s in steps]
        return torch.tensor(ends, dtype=torch.float64).view(SIZE, COUNT)[rank] / (2 * STEP)

    from mega_rl.parallel.comm import sum_over_context

    own = whole[rank].clone().requires_grad_()
    first = gradient(own)
    result = {
        "sum": sum_over_context(own, group=dist.group.WORLD).detach() - whole.sum(dim=0),
        "kept": own.detach() - whole[rank],
        "first": first.detach() - differences(second=False),
        "second": torch.autograd.grad(first.square().sum(), own)[0] - differences(second=True),
    }
    dist.destroy_process_group()
    return {name: float(value.abs().max()) for name, value in result.items()}


def test_gradients_are_those_of_all_ranks_losses() -> None:
    """In float64. Differences of step 1e-6 are good to some 1e-9 of numbers of size 10."""
    for errors in run_ranks(SIZE, differentiate):
        assert errors["sum"] <= 1e-15
        assert errors["kept"] == 0.0
        assert errors["first"] <= 1e-7
        assert errors["second"] <= 1e-6
