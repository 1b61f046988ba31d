"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host tensor `tensor` on `device`; on a GPU the copy is queued behind the kernels that are under way.

    A copy from ordinary memory would make the host wait until the device has done all that is queued. Pinned memory
    comes from torch's cache, which gives a block out again when its copy is done.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
