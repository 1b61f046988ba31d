"""AdamW with state on the host: the same bits as torch's, with or without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.ddp.host_adam import HostAdamW

SHAPES = [(4, 3), (5,), (7, 2), (2, 2), (6,), (3, 3)]
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3}


def parameters() -> list[Tensor]:
    """Parameters with gradients, all but the fourth."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    for number, parameter in enumerate(made):
        if number != 3:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def groups(made: list[Tensor]) -> list[dict[str, Any]]:
    settings = {**SETTINGS, "fused": True, "foreach": False}
    return [
        {"params": [p for p in made if p.dim() > 1], "weight_decay": 0.3, **settings},
        {"params": [p for p in made if p.dim() == 1], "weight_decay": 0.0, **settings},
    ]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_host_steps_bit_for_bit(share: float) -> None:
    """Three steps against torch's AdamW; what has no gradient stays, and gradients are where they were."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = HostAdamW(groups(ours), share=share), torch.optim.AdamW(groups(theirs))
    for _ in range(3):
        optimizer.step()
        reference.step()
    for own, expected in zip(ours, theirs, strict=True):
        assert torch.equal(own, expected)
        assert (own.grad is None) == (expected.grad is None)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if expected.grad is not None:
                assert torch.equal(optimizer.state[own][name], reference.state[expected][name])
