"""Megatron-Core on a CPU: the only file of this package that changes foreign modules.

Megatron-Core is written for CUDA. On a machine without it, three things make the same code run on gloo:

1. Inside `megatron.*`, and nowhere else, the name `torch.cuda` means the stand-in of `mega_rl.accelerator.standin`, the
   methods `.cuda()` return their object, and device literals such as "cuda" mean "cpu" (`mega_rl.accelerator.rewrite`).
   torch gains a private attribute under which that code finds the stand-in; nothing of torch is replaced.
2. Named patches, listed by `patches()`, each run right after the upstream module it changes was imported.
3. Warning and log filters for what is always said on such a machine.

With CUDA present nothing here installs.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from mega_rl.accelerator import standin
from mega_rl.accelerator.rewrite import RewritingFinder
from mega_rl.errors import UserErrors

MEGATRON_CORE_VERSION = "0.16.1"

STANDIN_ATTRIBUTE = "_cuda_for_megatron_on_cpu"
NAMES = {"cuda": STANDIN_ATTRIBUTE, "torch.cuda": f"torch.{STANDIN_ATTRIBUTE}"}
LITERALS = {
    "cuda": "cpu",
    "cuda:": "",  # of an f-string with a device's number, which here is the device
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}

NORM_BLOCK = 4096  # elements over which float32 adds squares


@dataclass(frozen=True)
class CpuAccelerator:
    """The CPU, as every rank of a gloo world sees it."""

    device: torch.device = standin.CPU
    name: str = "cpu"
    backend: str = "gloo"

    def synchronize(self) -> None:
        """Returns at once: CPU operators are synchronous."""

    def memory_allocated(self) -> int:
        """Resident set of the process, in bytes."""
        return standin.resident_bytes()

    def empty_cache(self) -> None:
        """Returns at once: there is no cache."""

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Everything that needs a CUDA kernel off, and what is unsafe under gloo off."""
        return {
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "cross_entropy_loss_fusion": False,
            "tp_comm_overlap": False,
            # Freeing an output whose asynchronous gloo send still reads it corrupts the message.
            "deallocate_pipeline_outputs": False,
        }


@dataclass(frozen=True)
class Patch:
    """One change of an upstream symbol."""

    name: str  # the function below that makes it
    symbol: str  # "module:qualified.name"
    reason: str
    seen_in: str  # version of megatron-core
    sha256: str  # of the upstream symbol's source text, see upstream_source in the tests
    apply: Callable[[ModuleType], None]

    @property
    def module(self) -> str:
        """Name of the upstream module."""
        return self.symbol.partition(":")[0]


_PATCHES: list[Patch] = []


def _patch(symbol: str, *, sha256: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Register a function as the patch of an upstream symbol; its docstring is the reason."""

    def register(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        reason = " ".join((apply.__doc__ or "").split())
        assert reason, f"{apply.__name__} does not say why"
        _PATCHES.append(Patch(apply.__name__.strip("_"), symbol, reason, MEGATRON_CORE_VERSION, sha256, apply))
        return apply

    return register


@_patch("megatron.core.jit:enable_jit_fuser", sha256="f50d820098b21568ac02b2dcfaed8724e0813f50f34ce947c132e7f3f7e17d31")
def _no_jit_fuser(module: ModuleType) -> None:
    """Fusing with torch.compile starts a C++ compiler in every process; upstream's own switch turns it off."""
    module.disable_jit_fuser()


@_patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
    sha256="8881ca2f563866d6107cadad13cf99060b40a1d816e024b4f3e0039e1658210e",
)
def _state_before_first_step(module: ModuleType) -> None:
    """torch's Adam has no state before its first step, and upstream asserts that it has: make its first zeros."""
    original = module.DistributedOptimizer.state_dict

    def state_dict(self: Any) -> dict[str, Any]:
        optimizer = self.optimizer
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            state = optimizer.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter, requires_grad=False)
        return original(self)

    module.DistributedOptimizer.state_dict = state_dict


@_patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    sha256="0fb8c1343b9d75846dbdc8e318c8e92c12461ac34976151344ebc34e4d9fb95b",
)
def _load_torch_adam(module: ModuleType) -> None:
    """Upstream looks for torch Adam's step in a checkpoint that has none, and writes into views that require grad."""
    original = module.DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        with torch.no_grad():
            original(self, model_param, {"step": self.optimizer.state[main_param]["step"], **tensors})

    module.DistributedOptimizer._set_main_param_and_optimizer_states = set_states


@_patch(
    "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
    sha256="4343caa42d460d4d9a8a9bbb37962a4454916db706e75b655d4e500924efbd2d",
)
def _no_transformer_engine_in_mla(module: ModuleType) -> None:
    """Upstream takes Transformer Engine for installed here and asks isinstance of a mock: tell it that it is not."""
    vars(module).update(HAVE_TE=False)


@_patch(
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    sha256="47a1092f05bae7bfc7a43150ad89f68533925dc9d5fecec689621212ba87886b",
)
def _split_sizes_as_numbers(module: ModuleType) -> None:
    """Upstream makes numbers of split sizes only while it moves them off a GPU; all_to_all_single takes no tensors."""
    original = module.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        tensor = original(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    vars(module).update(maybe_move_tensor_to_cpu=move)


@_patch(
    "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
    sha256="abaaf454b5e0914995deade91cf37ccc5d2178d8f7debdaa73ce925a5d4c82b6",
)
def _uneven_gather(module: ModuleType) -> None:
    """gloo's all_gather refuses parts of different sizes (experts' tokens): every rank sends its part to all."""
    original = module._gather_along_first_dim

    def gather(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        copies = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        sent = [input_.size(0)] * group.size()
        torch.distributed.all_to_all_single(output, copies, list(output_split_sizes), sent, group=group)
        return output

    vars(module).update(_gather_along_first_dim=gather)


@_patch(
    "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    sha256="09ac896729369d2d24a34ad36cdbb1d8841d21c21a9547a9536ce48d29d1a52f",
)
def _uneven_reduce_scatter(module: ModuleType) -> None:
    """gloo's reduce_scatter refuses parts of different sizes: every rank takes its part of an all-reduced whole."""
    original = module._reduce_scatter_along_first_dim

    def reduce_scatter(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(whole, group=group)
        return whole.split(list(input_split_sizes))[group.rank()].clone()

    vars(module).update(_reduce_scatter_along_first_dim=reduce_scatter)


@_patch(
    "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
    sha256="51fa1b3c95a6e80f15284138519d7f239dd3364611305215a4e5c406cae24a8c",
)
def _positions_unpinned(module: ModuleType) -> None:
    """Upstream pins the memory of two numbers to copy them to a GPU, which torch refuses where there is none."""

    def positions(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        rank, size = cp_group.rank(), cp_group.size()
        chunks = pos_emb.unflatten(seq_dim, (2 * size, -1))
        held = [chunks.select(seq_dim, chunk) for chunk in (rank, 2 * size - 1 - rank)]
        return torch.cat(held, dim=seq_dim)

    vars(module).update(get_pos_emb_on_this_cp_rank=positions)


@_patch(
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    sha256="5726f63f0566bb09f2c5d7702d5181087bd3d730a4c08e432ff97b1d718210f3",
)
def _recompute_without_fp8(module: ModuleType) -> None:
    """Upstream takes `fp8=False` for fp8 and reaches for Transformer Engine, which is not here: it means no fp8."""
    original = module.CheckpointWithoutOutput.__init__

    def initialise(self: Any, fp8: Any = False) -> None:
        original(self, fp8 or None)

    module.CheckpointWithoutOutput.__init__ = initialise


@_patch(
    "megatron.core.utils:local_multi_tensor_l2_norm",
    sha256="128bb632d77616dc2b6d99bd0597f8ee85f4c9f707e263d9fe26dc428c0cf284",
)
def _norms_of_long_tensors(module: ModuleType) -> None:
    """torch's float32 norm of a long tensor loses digits on a CPU, 0.3 % at 40 million elements: take it by blocks."""

    def l2_norm(chunk_size: Any, noop_flag: Any, tensor_lists: Any, per_tensor: Any, *args: Any) -> Any:
        parts = [torch.zeros(1, dtype=torch.float64)]
        for tensor in (tensor for tensors in tensor_lists for tensor in tensors):
            flat = tensor.detach().reshape(-1)
            long = len(flat) // NORM_BLOCK * NORM_BLOCK
            parts.append(torch.linalg.vector_norm(flat[:long].view(-1, NORM_BLOCK), dim=1).double())
            parts.append(torch.linalg.vector_norm(flat[long:]).double().view(1))
        return torch.linalg.vector_norm(torch.cat(parts)).float().view(1), None

    vars(module).update(local_multi_tensor_l2_norm=l2_norm)


def patches() -> tuple[Patch, ...]:
    """Every patch that `prepare` installs on a machine without CUDA."""
    return tuple(_PATCHES)


def _apply_patches(module: ModuleType) -> None:
    for patch in _PATCHES:
        if patch.module == module.__name__:
            patch.apply(module)


def _missing() -> list[str]:
    """What keeps Megatron-Core from running here, one message each."""
    problems = []
    try:
        found = version("megatron-core")
        if found != MEGATRON_CORE_VERSION:
            problems.append(
                f"megatron-core {found}: running on a CPU needs exactly {MEGATRON_CORE_VERSION}; "
                f"pip install megatron-core=={MEGATRON_CORE_VERSION}"
            )
    except PackageNotFoundError:
        problems.append(f"megatron-core is not installed; pip install megatron-core=={MEGATRON_CORE_VERSION}")
    if importlib.util.find_spec("psutil") is None:
        problems.append("psutil is not installed: saving a checkpoint would hang for ever; pip install psutil")
    return problems


def _show_standin() -> None:
    """Hang the stand-in where rewritten code looks for it; each place is a private name that torch does not have."""
    module = standin.build(f"torch.{STANDIN_ATTRIBUTE}")
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
    """Upstream warns when the CPU generator moved in a "GPU" random context: here it always does, being the same."""
    return record.msg != "CPU RNG state changed within GPU RNG context"


def _quiet() -> None:
    """Silence `NOISE` and one log message."""
    for category, message, module in NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_rng)


@cache
def prepare() -> CpuAccelerator:
    """Make Megatron-Core importable and runnable on this CPU.

    Raises:
        UserError: another megatron-core than the patches were written for, or psutil missing.
    """
    assert not torch.cuda.is_available(), "the CPU stand-in must not be installed where CUDA is available"
    problems = _missing()
    if problems:
        raise UserErrors(problems)
    assert "megatron" not in sys.modules, "mega_rl.accelerator.prepare must run before the first import of megatron"
    _show_standin()
    _quiet()
    finder = RewritingFinder("megatron", names=NAMES, literals=LITERALS, after_exec=_apply_patches)
    sys.meta_path.insert(0, finder)
    return CpuAccelerator()
