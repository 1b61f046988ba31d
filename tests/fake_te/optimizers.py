"""Kernels over lists of tensors: scaling, norms, and a step of Adam."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Write the first list, scaled, into the second; `is_infinite` becomes 1 where a number is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        if not source.isfinite().all():
            is_infinite.fill_(1)
        target.copy_(source * scale)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm over all tensors [1] float32, norm of each, empty unless asked for); summed in FP64."""
    norms = torch.stack([torch.linalg.vector_norm(x.double()) for x in tensor_lists[0]])
    return torch.linalg.vector_norm(norms).float().view(1), norms.float() if per_tensor else torch.empty(0)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Make a step of Adam (`mode` 1: AdamW) on gradients, parameters, both moments and maybe main parameters.

    Arithmetic is FP32, in main parameters where there are any, of which the parameters then are rounded copies.
    """
    corrections = [1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2)]
    for grad, parameter, first, second, *main in zip(*tensor_lists, strict=True):
        weight = main[0] if main else parameter
        value, g = weight.float(), grad.float()
        if mode == 0:
            g = g + weight_decay * value
        first.copy_(beta1 * first + (1 - beta1) * g)
        second.copy_(beta2 * second + (1 - beta2) * g * g)
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * value
        weight.copy_(value - lr * update)
        if main:
            parameter.copy_(weight)
