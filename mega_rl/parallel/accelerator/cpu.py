"""Megatron-Core on a CPU: with `accelerator.patches` the only file that changes foreign modules.

Megatron-Core is written for CUDA. On a machine without it, three things make the same code run on gloo:

1. Inside `megatron.*`, and nowhere else, the name `torch.cuda` means the module of `build_standin`, the methods
   `.cuda()` return their object, and device literals such as "cuda" mean "cpu". The code objects of the package are
   rewritten in memory, after Python's own .pyc cache (`RewritingFinder`). torch gains a private attribute under which
   that code finds the stand-in; nothing of torch is replaced.
2. The patches of the installed release (`accelerator.patches`), each run right after the upstream module that
   it changes was imported. Where there is no Triton, modules that import it without need get a stand-in.
3. Warning and log filters for what is always said on such a machine.

Consequences to know: there is one random stream, since CPU operators draw from the CPU generator whichever state
Megatron-Core believes to have switched; streams and events do nothing, so nothing overlaps. With CUDA present nothing
here installs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import megatron_core
from mega_rl.parallel.accelerator.base import Accelerator, resident_bytes
from mega_rl.parallel.accelerator.patches import patches

log = logging.getLogger(__name__)

STANDIN_ATTRIBUTE = "_cuda_for_megatron_on_cpu"
NAMES = {"cuda": STANDIN_ATTRIBUTE, "torch.cuda": f"torch.{STANDIN_ATTRIBUTE}"}
LITERALS = {
    "cuda": "cpu",
    "cuda:": "",  # an f-string adds the device's number, which here is the device
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def rewrite_code(code: CodeType, names: Mapping[str, str], literals: Mapping[str, str]) -> CodeType:
    """Return a copy of `code` with names and exact string constants replaced, nested code too.

    Docstrings and longer strings that merely contain a literal stay as they are.
    """

    def constant(value: object) -> object:
        if isinstance(value, str):
            return literals.get(value, value)
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        if isinstance(value, CodeType):
            return rewrite_code(value, names, literals)
        return value

    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(constant(value) for value in code.co_consts),
    )


@dataclass(frozen=True)
class RewritingFinder:
    """sys.meta_path entry that loads `package` and everything below it with rewritten code."""

    package: str
    names: Mapping[str, str]
    literals: Mapping[str, str]
    after_exec: Callable[[ModuleType], None]  # called with each finished module
    # further names to replace in single modules, by the module's name
    extra_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.package not in sys.modules, f"{self.package} is imported already: its code can no longer change"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the package, None for all others."""
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path, self)
        return spec


class _Loader(SourceFileLoader):
    """Loader of a source file, which rewrites its code as a finder says."""

    def __init__(self, fullname: str, path: str, finder: RewritingFinder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the rewritten code of the module."""
        code, finder = super().get_code(fullname), self._finder
        names = {**finder.names, **finder.extra_names.get(fullname, {})}
        return None if code is None else rewrite_code(code, names, finder.literals)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then whoever waits for it."""
        super().exec_module(module)
        self._finder.after_exec(module)


NEED_TRITON = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
TRITON = "_triton_for_megatron_on_cpu"


class AbsentKernel:
    """A kernel that cannot be started."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__qualname__

    def __getitem__(self, grid: object) -> NoReturn:
        raise RuntimeError(f"{self.name} is a Triton kernel, and Triton is not installed")


def stand_in_for_triton() -> dict[str, dict[str, str]]:
    """Make the stand-in importable; returns the names to replace in each of `NEED_TRITON`."""
    triton, language = ModuleType(TRITON), ModuleType(f"{TRITON}.language")
    vars(triton).update(jit=AbsentKernel, language=language)
    vars(language).update(constexpr=int)  # an annotation of the kernels' parameters
    sys.modules.update({TRITON: triton, f"{TRITON}.language": language})
    names = {"triton": TRITON, "triton.language": f"{TRITON}.language"}
    return dict.fromkeys(NEED_TRITON, names)


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


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _nothing(*args: object, **kwargs: object) -> None:
    return None


STANDIN_NAMES: dict[str, Any] = {
    "current_device": lambda: CPU,  # upstream passes the result as `device=`
    "set_device": _nothing,
    "device_count": lambda: 1,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "memory_allocated": lambda device=None: resident_bytes(),
    "memory_reserved": lambda device=None: resident_bytes(),
    "memory_stats": lambda device=None: {},
    "get_rng_state": _get_rng_state,
    "set_rng_state": lambda new_state, device=None: torch.default_generator.set_state(new_state),
    # torch.manual_seed would reseed the CUDA generators too, that is, call this function again.
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "default_generators": Generators(),
    "random": SimpleNamespace(get_rng_state=_get_rng_state),
    "_lazy_call": lambda callback, **_: callback(),
    "_lazy_init": _nothing,
    "Stream": Done,
    "Event": Done,
    "stream": lambda stream: contextlib.nullcontext(),  # DDP with several optimizer instances enters it again
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": _nothing,
    "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    "FloatTensor": torch.FloatTensor,
    "HalfTensor": torch.HalfTensor,
    "BFloat16Tensor": torch.BFloat16Tensor,
}


def build_standin(module_name: str) -> ModuleType:
    """The stand-in module: `STANDIN_NAMES`, and the real torch.cuda for the rest."""
    module = ModuleType(module_name, "torch.cuda as Megatron-Core sees it on a CPU.")

    def fall_through(name: str) -> Any:
        return getattr(torch.cuda, name)

    vars(module).update(STANDIN_NAMES, __getattr__=fall_through)
    return module


class CpuAccelerator(Accelerator):
    """The CPU as the device of every rank of a gloo world."""

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Return settings that turn off CUDA kernels and features that are unsafe under gloo."""
        return {
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "cross_entropy_loss_fusion": False,
            "tp_comm_overlap": False,
            # Freeing an output whose asynchronous gloo send still reads it corrupts the message.
            "deallocate_pipeline_outputs": False,
        }


def _apply_patches(series: str, module: ModuleType) -> None:
    for patch in patches(series):
        if patch.module == module.__name__:
            patch.apply(module)


def _show_standin() -> None:
    """Put the stand-in where rewritten code looks for it, under private names of torch."""
    module = build_standin(f"torch.{STANDIN_ATTRIBUTE}")
    sys.modules[module.__name__] = module
    setattr(torch, STANDIN_ATTRIBUTE, module)
    # The rewrite knows names, not objects: `.cuda` of these others must go on to mean what it means.
    for owner in (torch.backends, torch.version):
        setattr(owner, STANDIN_ATTRIBUTE, owner.cuda)

    def itself(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for method_owner in (torch.Tensor, torch.nn.Module):
        setattr(method_owner, STANDIN_ATTRIBUTE, itself)


# (category, start of the message, module that it is attributed to): always said here, and nothing to act on.
NOISE: tuple[tuple[type[Warning], str, str], ...] = (
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed", r"megatron\.core\."),
    (UserWarning, r"MimoModelConfig is experimental", r"megatron\.core\.models\.mimo\."),  # imported, and not used
    (UserWarning, r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    (UserWarning, r"When using async grad allreduce it is recommended", r"megatron\.core\.tensor_parallel\.layers"),
    (UserWarning, r"When using sequence parallelism it is recommended", r"megatron\.core\.tensor_parallel\.layers"),
    # Experts that are not cut: right, and said of each.
    (UserWarning, r"`sequence_parallel` is set to `True`, but tensor", r"megatron\.core\.tensor_parallel\.layers"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\.strategies\.torch"),
    (FutureWarning, r"Please use DTensor instead and we are deprecating", r"torch\.distributed\.checkpoint\."),
    (
        FutureWarning,
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
)


def _not_about_rng(record: logging.LogRecord) -> bool:
    """Filter upstream's warning of a CPU generator that moved in a "GPU" context, as here."""
    return record.msg != "CPU RNG state changed within GPU RNG context"


def _quiet() -> None:
    """Silence `NOISE` and one log message."""
    for category, message, module in NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_rng)


@cache
def prepare() -> CpuAccelerator:
    """Make a supported Megatron-Core importable and runnable on this CPU.

    Raises UserError: megatron imported already.
    """
    assert not torch.cuda.is_available(), "the CPU stand-in must not be installed where CUDA is available"
    if "megatron" in sys.modules:
        raise UserError(
            "megatron was imported before mega_rl could make it run without CUDA; "
            "import mega_rl.trainer.assemble, or call mega_rl.parallel.accelerator.prepare(), before its first import"
        )
    _show_standin()
    _quiet()
    extra = {} if importlib.util.find_spec("triton") else stand_in_for_triton()
    series, version = megatron_core.installed_series(), megatron_core.installed_version()
    if version not in (compared := megatron_core.RELEASES[series]):
        log.warning("megatron-core %s: what changes it for CPUs was written for %s", version, compared[-1])
    apply = partial(_apply_patches, series)
    finder = RewritingFinder("megatron", names=NAMES, extra_names=extra, literals=LITERALS, after_exec=apply)
    sys.meta_path.insert(0, finder)
    return CpuAccelerator(CPU, "cpu", "gloo")
