"""AdamW with a share of its state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

HOST = torch.device("cpu")


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps the moments of `share` of the elements, by whole parameters, and steps them on the host.

    Those parameters and their gradients travel to the host and back one at a time in every step. Only the moments stay
    there, so code that changes parameters between steps (a checkpoint, say) needs no special case.
    Megatron-Core's `HybridDeviceOptimizer` (0.16.1) keeps copies of bf16 parameters there instead, cannot take FP32
    ones, and finds nothing to do on a machine without CUDA.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]], *, share: float) -> None:
        super().__init__([torch.empty(0)])
        # Not by way of the constructor, which takes leaves only: shards of FP32 parameters are views of them.
        self.param_groups = [{**self.defaults, **group} for group in param_groups]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        wanted = share * sum(parameter.numel() for parameter in parameters)
        self._on_host: set[Tensor] = set()
        held = 0
        for parameter in parameters:
            if held < wanted:
                self._on_host.add(parameter)
                held += parameter.numel()

    def home(self, parameter: Tensor) -> torch.device:
        """Return the device of a parameter's moments."""
        return HOST if parameter in self._on_host else parameter.device

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient by one step."""
        assert closure is None
        gradients = {parameter: parameter.grad for parameter in self._on_host if parameter.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    self._step_on_host(parameter, gradients[parameter], group)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _step_on_host(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
            state["exp_avg_sq"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
        value = _staged(parameter)
        adamw(
            [value],
            [_staged(gradient)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        parameter.copy_(value)


def _staged(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host, in memory that an accelerator reads directly."""
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=tensor.device.type == "cuda")
    return staged.copy_(tensor)
