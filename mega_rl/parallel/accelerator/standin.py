"""Stand-in for `torch.cuda` in Megatron-Core on a machine without CUDA.

`build` returns a module object with the few names Megatron-Core calls; every other name falls through to the real
`torch.cuda`, which stays as it is. `mega_rl.parallel.accelerator.rewrite` makes Megatron-Core's code use this object.

Consequences to know: there is one random stream, since CPU operators draw from the CPU generator whichever state
Megatron-Core believes to have switched; streams and events do nothing, so nothing overlaps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mega_rl.parallel.accelerator.base import resident_bytes

CPU = torch.device("cpu")


class Done:
    """A stream whose work is always complete, and an event that has happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = CPU

    def wait(self, *others: object) -> None:
        """Return at once: there is nothing to wait for."""

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, event: Done | None = None) -> Done:
        """An event that has happened."""
        return event or Done()

    def query(self) -> bool:
        """Return True: no work is pending."""
        return True

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class Generators:
    """The CPU generator under every device index."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


_STREAM = Done()


def _current_device() -> torch.device:
    """The CPU as a torch.device: upstream passes the result as `device=`."""
    return CPU


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    # torch.manual_seed would reseed the CUDA generators too, that is, call this function again.
    torch.default_generator.manual_seed(seed)


def _call_now(callback: Callable[[], None], **kwargs: object) -> None:
    callback()


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _the_stream(*args: object, **kwargs: object) -> Done:
    return _STREAM


def _stream_context(stream: Done | None) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()  # which may be entered again, as DDP does with several optimizer instances


def _memory_allocated(device: object = None) -> int:
    return resident_bytes()


def _memory_stats(device: object = None) -> dict[str, int]:
    return {}


NAMES: dict[str, Any] = {
    "current_device": _current_device,
    "set_device": _nothing,
    "device_count": lambda: 1,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "memory_allocated": _memory_allocated,
    "memory_reserved": _memory_allocated,
    "memory_stats": _memory_stats,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
    "default_generators": Generators(),
    "random": SimpleNamespace(get_rng_state=_get_rng_state),
    "_lazy_call": _call_now,
    "_lazy_init": _nothing,
    "Stream": Done,
    "Event": Done,
    "stream": _stream_context,
    "current_stream": _the_stream,
    "default_stream": _the_stream,
    "set_stream": _nothing,
    "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    "FloatTensor": torch.FloatTensor,
    "HalfTensor": torch.HalfTensor,
    "BFloat16Tensor": torch.BFloat16Tensor,
}


def build(module_name: str) -> ModuleType:
    """The stand-in module: `NAMES`, and the real torch.cuda for the rest."""
    module = ModuleType(module_name, "torch.cuda as Megatron-Core sees it on a CPU.")

    def fall_through(name: str) -> Any:
        return getattr(torch.cuda, name)

    vars(module).update(NAMES, __getattr__=fall_through)
    return module
