"""torch.cuda and a few of torch's own functions as they behave where `cuda:0` is a device whose tensors are fake.

`install` comes after `guard.load` and before the first import of Megatron-Core, which then runs as it is: the rewriting
for CPUs (`mega_rl.parallel.accelerator.cpu`) stays out, because a CUDA device is there.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mega_rl.parallel.accelerator import cpu
from tests.fake_gpu.watch import LOCKED

CUDA = torch.device("cuda", 0)
LOWER_RIGHT = object()  # the mask of queries that are the last of their keys
_PLAIN_NAMES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


def install(host_wait: Callable[[str], None]) -> None:
    """Make the device visible; `host_wait` is called with a name whenever the host would wait for the device."""
    _name_device(host_wait)
    _fake_collectives()
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.compile = _uncompiled  # type: ignore[assignment]
    torch.nn.Module.to = _to  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.Tensor.type = _typed  # type: ignore[method-assign, assignment]


def use_device_kernels(host_wait: Callable[[str], None]) -> None:
    """Call the kernels that a real device would be given, in place of the compositions that fake tensors choose.

    Without a CUDA build torch takes attention apart into products of [S, S], and a norm into float32 copies.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention

    from mega_rl.engines.models import attention_kernels

    def attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        mask, scale = arguments["attn_mask"], arguments["scale"]
        plain = mask is None or mask is LOWER_RIGHT
        if plain and value.size(-1) == query.size(-1):
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            # It reads the keys of a group for all its queries.
            return flash(query, key, value, 0.0, True, False, scale=scale)[0]  # type: ignore[no-any-return]
        if key.size(1) != query.size(1):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
        bias = None if plain else query.new_zeros(1, 1, query.size(2), key.size(2))
        bias = bias if bias is None else bias.expand(query.size(0), query.size(1), -1, -1)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, 0.0, bias is None, scale=scale)[0]  # type: ignore[no-any-return]

    def norm(_: int, __: Tensor, lists: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
        # Upstream's hands a list of device numbers to torch.tensor, which reads them one by one out of our sight.
        norms = torch.stack([torch.norm(tensor) for tensors in lists for tensor in tensors])
        for _each in norms:
            host_wait("item")
        return torch.norm(norms).view(1), None

    clip_grads.l2_norm_impl = norm
    attention_kernels.causal_lower_right = lambda *_: LOWER_RIGHT  # type: ignore[attr-defined]
    attention_kernels.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    torch.nn.RMSNorm.forward = lambda self, x: _FusedNorm.apply(x, self.weight, self.eps)  # type: ignore[method-assign]
    multi_latent_attention.HAVE_TE = False  # else local latent attention is refused, for want of the package
    CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()


class _FusedNorm(torch.autograd.Function):
    """The fused RMSNorm of a CUDA build: it keeps its input and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, rstd = torch.ops.aten._fused_rms_norm(x, [x.size(-1)], weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class _WaitingStream(cpu.Done):
    """A stream of a real device: `synchronize` makes the host wait."""

    host_wait: Callable[[str], None]

    def record_event(self, event: cpu.Done | None = None) -> cpu.Done:
        return event or _WaitingEvent()

    def synchronize(self) -> None:
        type(self).host_wait("Stream.synchronize")


class _WaitingEvent(cpu.Done):
    """An event of a real device: `synchronize` makes the host wait."""

    host_wait: Callable[[str], None]

    def synchronize(self) -> None:
        type(self).host_wait("Event.synchronize")


def _name_device(host_wait: Callable[[str], None]) -> None:
    """Give torch.cuda the names that Megatron-Core and the project call."""
    _WaitingStream.host_wait = _WaitingEvent.host_wait = staticmethod(host_wait)  # type: ignore[assignment]
    stream = _WaitingStream()
    names: dict[str, Any] = {name: value for name, value in cpu.STANDIN_NAMES.items() if name not in _PLAIN_NAMES}
    names |= {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: types.SimpleNamespace(
            name="fake",
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=80 << 30,
            uuid="fake",
            pci_domain_id=0,
            pci_bus_id=0xDC,
            pci_device_id=0,
        ),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=_lock, cudaHostUnregister=lambda _: 0),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "synchronize": lambda *_: host_wait("torch.cuda.synchronize"),
        "Stream": _WaitingStream,
        "Event": _WaitingEvent,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }
    for name, value in names.items():
        setattr(torch.cuda, name, _own(value) if isinstance(value, types.FunctionType) else value)


def _lock(address: int, size: int, _: int) -> int:
    """Register host memory as the driver does; returns its code for success."""
    LOCKED.append(range(address, address + size))
    return 0


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`: torch's compiler refuses one object under two names."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _fake_collectives() -> None:
    """Complete what torch's fake process group leaves out: objects, of which every rank has this one's."""

    def gather(objects: list[Any], one: Any, group: Any = None) -> None:
        objects[:] = [one] * len(objects)

    dist.all_gather_object = gather


def _uncompiled(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else lambda each: each


_real_to, _real_type = torch.nn.Module.to, torch.Tensor.type


def _to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to` for modules of fake tensors, whose `.data` cannot change its device: new ones with their marks."""
    if not any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
        return _real_to(module, *args, **kwargs)
    device = torch.device(kwargs.get("device") or args[0])
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.device.type != device.type:
                moved = torch.nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
                marks = {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int)}
                vars(moved).update({key: value for key, value in marks.items() if not key.startswith("_")})
                each._parameters[name] = moved
        for name, buffer in list(each._buffers.items()):
            if buffer is not None and buffer.device.type != device.type:
                each._buffers[name] = buffer.to(device)
    return module


def _typed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type` as on a real device: Megatron-Core sorts parameters by "torch.cuda.FloatTensor" and the like."""
    name = _real_type(tensor, *args, **kwargs)
    if isinstance(name, str) and not args and tensor.device.type == "cuda" and ".cuda." not in name:
        return name.replace("torch.", "torch.cuda.")
    return name
