"""AdamW over sharded parameters: its state, its step number, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mega_rl.config.schema import OptimConfig
from mega_rl.engines.fsdp.weights import is_first_copy
from mega_rl.parallel.accelerator.norms import squared_norm
from mega_rl.protocols import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adam(parameters: Iterable[DTensor], optim: OptimConfig) -> torch.optim.AdamW:
    """Build torch's fused AdamW with its state created as zeros.

    Weight decay is decoupled and spares tensors of one dimension: norms and biases.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )
    for parameter in trained:
        # As AdamW would make it at its first step: the number of steps is where the parameter is.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.to_local().device),
            **{name: torch.zeros_like(parameter) for name in MOMENTS},
        }
    return optimizer


def count_steps(optimizer: torch.optim.AdamW) -> int:
    """Return the number of steps done."""
    return int(next(iter(optimizer.state.values()))["step"])


def set_steps(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Set the number of steps done."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def gradient_norm(parameters: Iterable[DTensor], ranks: Ranks) -> float:
    """Return the L2 norm of all gradients, squares summed in float64; `ranks` are all of them; collective."""
    own = (local(p.grad) for p in parameters if p.grad is not None and is_first_copy(p))
    squares = squared_norm([gradient for gradient in own if gradient.numel()])
    return math.sqrt(float(ranks.sum(squares.cpu())))


def clip(parameters: Iterable[DTensor], *, norm: float, limit: float) -> None:
    """Scale all gradients, whose norm is `norm`, down to the norm `limit`; 0 leaves them as they are."""
    factor = limit / (norm + 1e-6)
    if limit > 0.0 and factor < 1.0:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, a view."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
