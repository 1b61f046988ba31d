"""AdamW with a share of its state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

HOST = torch.device("cpu")


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps `share` of the moments, in whole parameters, on the host and steps there.

    Those parameters and their gradients travel to the host and back in every step, one at a time: while the host steps
    one, the next arrives and the one before returns. Only the moments stay there, so code that changes parameters
    between steps (a checkpoint, say) needs no special case.
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
        mine = [(p, group) for group in self.param_groups for p in group["params"] if p in gradients]
        device = mine[0][0].device if mine else HOST
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        arriving = [_to_host([p, gradients[p]], stream) for p, _ in mine[:1]]  # while the device steps what is its own
        for parameter in gradients:
            parameter.grad = None
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for number, (parameter, group) in enumerate(mine):
            (value, gradient), event = arriving.pop()
            arriving += [_to_host([p, gradients[p]], stream) for p, _ in mine[number + 1 : number + 2]]
            if event is not None:
                event.synchronize()
            self._step_on_host(parameter, group, value, gradient)
            with _on(stream):
                parameter.copy_(value, non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)

    def _step_on_host(self, parameter: Tensor, group: dict[str, Any], value: Tensor, gradient: Tensor) -> None:
        """Update `value`, the parameter's copy on the host, by its gradient's copy."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
            state["exp_avg_sq"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
        beta1, beta2 = group["betas"]
        settings: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        settings |= {
            "foreach": False,
            "fused": True,
            "amsgrad": False,
            "maximize": False,
            "beta1": beta1,
            "beta2": beta2,
        }
        moments: list[Any] = [[state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]]]
        adamw([value], [gradient], *moments, **settings)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _to_host(
    tensors: Sequence[Tensor], stream: torch.cuda.Stream | None
) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Start copying tensors to pinned host memory; return copies and completion event (None without a stream)."""
    copies = [torch.empty(each.shape, dtype=each.dtype, device=HOST, pin_memory=stream is not None) for each in tensors]
    with _on(stream):
        for source, target in zip(tensors, copies, strict=True):
            target.copy_(source, non_blocking=True)
    return copies, None if stream is None else stream.record_event()
