"""AdamW with a share of its state in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

HOST = torch.device("cpu")
BATCH_BYTES = 64 << 20  # of parameters that travel and step together: far more than a copy or a call costs to start


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps the moments of `share` of the elements, by whole parameters, and steps them on the host.

    Those parameters and their gradients travel to the host and back in every step, some at a time: while the host steps
    one batch, the next arrives and the one before returns, and the first arrives while the device steps the parameters
    that it keeps. Pinned memory for three batches is all that this takes. Only the moments stay there, so code that
    changes parameters between steps (a checkpoint, say) needs no special case.
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
        batches = list(self._batches(gradients))
        copies = Copies(batches[0].parameters[0].device if batches else HOST)
        arriving = [copies.down(batch.tensors) for batch in batches[:1]]  # while the device steps what is its own
        for parameter in gradients:
            parameter.grad = None
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for number, batch in enumerate(batches):
            staged = arriving.pop()
            arriving += [copies.down(following.tensors) for following in batches[number + 1 : number + 2]]
            staged.wait()
            count = len(batch.parameters)
            values, of_values = staged.tensors[:count], staged.tensors[count:]
            self._step_on_host(batch, values, of_values)
            copies.up(values, batch.parameters)
        copies.finish()

    def _batches(self, gradients: Mapping[Tensor, Tensor]) -> Iterator[_Batch]:
        """Yield the parameters of the host that have gradients, a group's neighbours together up to BATCH_BYTES."""
        for group in self.param_groups:
            settings: dict[str, float] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            settings["beta1"], settings["beta2"] = group["betas"]
            parameters: list[Tensor] = []
            size = 0
            for parameter in (each for each in group["params"] if each in gradients):
                if parameters and size + parameter.nbytes > BATCH_BYTES:
                    yield _Batch(parameters, [gradients[each] for each in parameters], settings)
                    parameters, size = [], 0
                parameters.append(parameter)
                size += parameter.nbytes
            if parameters:
                yield _Batch(parameters, [gradients[each] for each in parameters], settings)

    def _step_on_host(self, batch: _Batch, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update `values`, the parameters' copies on the host, by their gradients' copies."""
        states = [self.state[parameter] for parameter in batch.parameters]
        for state, parameter in zip(states, batch.parameters, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
                state["exp_avg_sq"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
        adamw(
            list(values),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=batch.settings["beta1"],
            beta2=batch.settings["beta2"],
            lr=batch.settings["lr"],
            weight_decay=batch.settings["weight_decay"],
            eps=batch.settings["eps"],
        )


@dataclass(frozen=True)
class _Batch:
    """Parameters of one group that travel and step together."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    settings: dict[str, float]  # of Adam

    @property
    def tensors(self) -> list[Tensor]:
        """Return the parameters, then their gradients."""
        return [*self.parameters, *self.gradients]


@dataclass(frozen=True)
class Staged:
    """Copies on the host, complete after `wait`."""

    tensors: list[Tensor]
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self.event is not None:
            self.event.synchronize()


class Copies:
    """Copies between a device and pinned memory of the host, beside the device's kernels and the host's work.

    On a CUDA device they are queued on a stream of their own, behind what the current stream had then; on a CPU they
    are done at once. Pinned memory comes from torch's cache, which gives a block out again when its copies are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def down(self, tensors: Sequence[Tensor]) -> Staged:
        """Start copying tensors to the host, contiguous."""
        staged = [
            torch.empty(each.shape, dtype=each.dtype, device=HOST, pin_memory=each.device.type == "cuda")
            for each in tensors
        ]
        self._copy(tensors, staged)
        return Staged(staged, None if self._stream is None else self._stream.record_event())

    def up(self, staged: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Start copying tensors from the host into `tensors`."""
        self._copy(staged, tensors)

    def finish(self) -> None:
        """Let what the current stream does next see every copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
