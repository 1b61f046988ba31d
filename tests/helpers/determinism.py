"""A mode in which operators fail that have no deterministic algorithm on CUDA, on any device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# As `torch.use_deterministic_algorithms` lists them; those of images, which no language model has, are left out.
ALWAYS = ("histc", "put_", "median", "nanmedian", "kthvalue", "nll_loss_forward", "nll_loss2d_forward", "index_reduce")


class OnlyDeterministic(TorchDispatchMode):
    """Raises RuntimeError for an operator that torch refuses on CUDA under deterministic algorithms."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ALWAYS or _by_arguments(name, args, kwargs):
            raise RuntimeError(f"aten::{name} does not have a deterministic implementation on CUDA")
        return func(*args, **kwargs)


def _by_arguments(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether these arguments make an operator nondeterministic."""
    if name == "cumsum":
        return bool((kwargs.get("dtype") or args[0].dtype).is_floating_point)
    if name == "bincount":
        return (args[1] if len(args) > 1 else kwargs.get("weights")) is not None
    return name == "scatter_reduce" and "prod" in (*args, *kwargs.values())
