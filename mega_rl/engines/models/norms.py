"""RMS norms of transformers' models by torch's kernel: on a GPU one launch in the place of seven."""

from __future__ import annotations

import copy
import inspect
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def fuse_norms(model: nn.Module) -> int:
    """Run norms by torch's kernel where it computes the same; return their number.

    transformers writes a norm out: to float32, squares, mean, root, product, back, weight. In float32 the results are
    equal; in bf16 the kernel rounds once, as Megatron-Core and servers do, and transformers twice.
    """
    plain = [module for module in model.modules() if _is_plain(module)]
    for module in plain:
        module.forward = partial(_normalise, module)
    return len(plain)


def _normalise(module: nn.Module, hidden: Tensor) -> Tensor:
    weight = module.get_parameter("weight")
    return rms_norm(hidden, tuple(weight.shape), weight, _epsilon(module))


def _epsilon(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Try on numbers if a module is an RMS norm with a weight and nothing else."""
    if "norm" not in type(module).__name__.lower() or len(inspect.signature(module.forward).parameters) != 1:
        return False
    if [*dict(module.named_parameters()), *dict(module.named_buffers()), *dict(module.named_children())] != ["weight"]:
        return False
    weight = module.get_parameter("weight")
    if weight.dim() != 1 or _epsilon(module) is None:
        return False
    trial = copy.deepcopy(module).to(dtype=torch.float32).to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    trial.get_parameter("weight").normal_(generator=draw)
    hidden = torch.randn(3, weight.numel(), generator=draw)
    return torch.allclose(trial(hidden), _normalise(trial, hidden), rtol=1e-5, atol=1e-6)
