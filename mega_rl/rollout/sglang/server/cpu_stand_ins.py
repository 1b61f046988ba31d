"""Stand-ins for modules that SGLang imports and a machine without CUDA lacks; only in SGLang's processes.

Each is one function that names the module it replaces, why, and the version that needs it. The launcher calls
`install` before any import of SGLang, and never with CUDA.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def install() -> None:
    """Install all stand-ins, in the order in which SGLang imports the replaced modules."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # without it SGLang takes CUDA and Triton paths on a machine without them
    compilation()
    kernels()
    torchvision_operators()
    triton()
    murmur_hash()
    sampling_seeds()
    noise_of_tokens()
    pinned_memory()
    forked_processes()


def compilation() -> None:
    """`torch.compile`: return the function as it is.

    Compiled, seeded sampling needs a C++ compiler, and the first request takes half a minute and more.
    """
    import torch

    def as_it_is(model: object = None, **_: object) -> object:
        return (lambda function: function) if model is None else model

    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # for `torch._dynamo.optimize`, which torch itself calls
    vars(torch)["compile"] = as_it_is  # an assignment would want its overloads


def forked_processes() -> None:
    """`multiprocessing.set_start_method`: SGLang asks for spawn, which CUDA needs, and gets fork.

    Scheduler and detokenizer then share the leader's imports, seven seconds of a core each. SGLang starts them before
    it has threads, sockets or an event loop.
    """
    import multiprocessing

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force)

    original = multiprocessing.set_start_method
    multiprocessing.set_start_method = set_start_method


def kernels() -> None:
    """Stand in for `sgl_kernel`: CPUs without AMX import its names and never call them.

    PyPI has only its CUDA build (sglang-kernel 0.4.7); every layer has a branch in plain torch.
    """

    def missing(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} is CUDA only; SGLang's CPU path should not come here")

        return refuse

    module = _module("sgl_kernel", package=True)
    module.__getattr__ = missing  # type: ignore[method-assign]


def torchvision_operators() -> None:
    """Replace `torchvision`'s registrations of its C++ operators by empty modules.

    The build on PyPI (0.28.0) is for CUDA and its library cannot load with a CPU torch; without the operators,
    registering them fails and with it every import of transformers.
    """
    _module("torchvision._meta_registrations")
    _module("torchvision._autograd_registrations")


def triton() -> None:
    """Install SGLang's own stand-in for `triton`, which is for macOS, unless triton is there.

    The file runs while `platform` names macOS; its changes to torch for macOS are undone afterwards.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    import platform

    import torch

    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None, "sglang is not on the path"  # noqa: PT018
    location = Path(package.origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", location)
    assert spec is not None and spec.loader is not None, f"{location} is not a Python file"  # noqa: PT018
    stubs = importlib.util.module_from_spec(spec)
    changed: list[tuple[Any, str, Any]] = [
        (sys, "platform", "darwin"),
        (platform, "machine", lambda: "arm64"),
        (torch.backends.mps, "is_available", lambda: True),
        (torch.Tensor, "to", torch.Tensor.to),
        (torch.Tensor, "copy_", torch.Tensor.copy_),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    mps = dict(vars(torch.mps))
    sys.modules[spec.name] = stubs
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        spec.loader.exec_module(stubs)
        stubs.install_platform_stubs()
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        for name in vars(torch.mps).keys() - mps.keys():
            delattr(torch.mps, name)


def murmur_hash() -> None:
    """Register `torch.ops.sgl_kernel.murmur_hash32_cpu`, the hash of seeded sampling; bit-equal to SGLang's kernel.

    MurmurHash3 (x86, 32 bits) over four words: the seed's low and high half, the position, the token id.
    """
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _kept_alive.append(library)


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return [n, m] uint32 hashes of seed [n] (64 bits), positions [n] and col_indices [m]."""
    import torch

    low = 0xFFFFFFFF  # int64 holds the words; products wrap, and their low half is right all the same

    def rotated(x: Tensor, bits: int) -> Tensor:
        return ((x << bits) | (x >> (32 - bits))) & low

    def mixed(state: Tensor | int, word: Tensor) -> Tensor:
        scrambled = (rotated((word * 0xCC9E2D51) & low, 15) * 0x1B873593) & low
        return (rotated(state ^ scrambled, 13) * 5 + 0xE6546B64) & low

    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    rows = mixed(mixed(mixed(0 * seed, seed & low), (seed >> 32) & low), positions.to(torch.int64) & low)
    hashed = mixed(rows[:, None], col_indices.to(torch.int64)[None, :] & low) ^ 16  # 16 bytes were hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & low
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def sampling_seeds() -> None:
    """Patch `SamplingBatchInfo.from_schedule_batch` to honour each request's sampling_seed.

    SGLang reads it only under --enable-deterministic-inference, which wants an attention kernel that needs CUDA. As
    there, a request without a seed has 42: batches are merged, and one with seeds does not merge with one without.
    """
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        if info.sampling_seed is None:
            info.sampling_seed = torch.tensor([42 if seed is None else seed for seed in seeds], dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def noise_of_tokens() -> None:
    """Patch sampling with top-k or top-p: seeded noise belongs to a token, not to its rank.

    SGLang sorts the probabilities of a whole batch as soon as one request of it cuts them off, and numbers the noise
    by that order: all other samples then get other tokens.
    """
    import torch
    from sglang.srt.layers import sampler

    original = sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def sample(
        probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, need_min_p: bool, seed: Any, positions: Tensor,
        *, return_filtered_probs: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        if seed is None or need_min_p or return_filtered_probs:
            more["return_filtered_probs"] = return_filtered_probs
            return original(probs, top_ks, top_ps, min_ps, need_min_p, seed, positions, **more)
        ordered, tokens = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # probability of all more likely tokens
        cut = (torch.arange(probs.shape[-1]) >= top_ks[:, None]) | (before > top_ps[:, None])
        kept = torch.zeros_like(probs).scatter_(1, tokens, ordered.masked_fill(cut, 0.0))
        return sampler.multinomial_with_seed(kept.log(), seed, positions).view(-1).to(torch.int32)

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample


def pinned_memory() -> None:
    """Allocate memory that SGLang pins for copies from a device as plain memory.

    `ALLOC_MEMORY_FUNCS` registers it with CUDA for every device that it does not name, and names no CPU. The record of
    routed experts (--enable-return-routed-experts) lies there. Low-rank adapters ask torch for it, on every device.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: object) -> Tensor:
        memory: Tensor = allocator.allocate(dims, dtype=dtype, device=device)
        return memory

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    for name in ("empty", "zeros", "tensor"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes tensors in plain memory."""

    @functools.wraps(make)
    def made(*args: Any, **more: Any) -> Tensor:
        more.pop("pin_memory", None)
        return make(*args, **more)

    return made


_kept_alive: list[Any] = []  # an operator is gone with its library


def _module(name: str, *, package: bool = False) -> ModuleType:
    """Put an empty module under `name` into sys.modules and return it."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    sys.modules[name] = module
    return module
