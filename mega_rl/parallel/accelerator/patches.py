"""Changes to Megatron-Core that make it run on a CPU, each with its releases.

`mega_rl.parallel.accelerator.cpu` applies them; nothing here runs where there is CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import conv1d, silu

from mega_rl.parallel.accelerator.base import squared_norm
from mega_rl.parallel.accelerator.megatron_core import RELEASES


class Patch(NamedTuple):
    """One change of an upstream symbol."""

    name: str  # the function below that makes it
    symbol: str  # "module:qualified.name"
    series: tuple[str, ...]  # releases that it is for
    apply: Callable[[ModuleType], None]

    @property
    def module(self) -> str:
        """Name of the upstream module."""
        return self.symbol.partition(":")[0]


_PATCHES: list[Patch] = []


def patches(series: str = "") -> tuple[Patch, ...]:
    """Return the patches of a series, or of all, in the order of this file."""
    return tuple(patch for patch in _PATCHES if not series or series in patch.series)


def _patch(symbol: str, *series: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Register a function as the patch of an upstream symbol. series: all without any."""

    def register(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        _PATCHES.append(Patch(apply.__name__.strip("_"), symbol, series or tuple(RELEASES), apply))
        return apply

    return register


@_patch("megatron.core.jit:enable_jit_fuser")
def _no_jit_fuser(module: ModuleType) -> None:
    """Fusing with torch.compile starts a C++ compiler in every process; upstream's own switch turns it off."""
    module.disable_jit_fuser()


@_patch("megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__", "0.16")
def _no_transformer_engine_in_mla(module: ModuleType) -> None:
    """Upstream assumes Transformer Engine is installed and calls isinstance with a mock: say it is not."""
    vars(module).update(HAVE_TE=False)


@_patch("megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__", "0.18", "0.19")
def _whole_down_projections(module: ModuleType) -> None:
    """Upstream offers its uncut linear layer only with Transformer Engine, which the layer does not need."""
    from megatron.core.post_training.modelopt.layers import Linear

    vars(module).update(Linear=Linear)


@_patch("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu")
def _split_sizes_as_numbers(module: ModuleType) -> None:
    """Upstream leaves split sizes on a CPU as tensors, which all_to_all_single does not take."""
    original = module.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        tensor = original(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    vars(module).update(maybe_move_tensor_to_cpu=move)


@_patch("megatron.core.tensor_parallel.mappings:_gather_along_first_dim")
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


@_patch("megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim")
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


@_patch("megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank")
def _positions_unpinned(module: ModuleType) -> None:
    """Upstream pins two numbers' memory to copy them to a GPU; torch refuses without a GPU."""

    def positions(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        rank, size = cp_group.rank(), cp_group.size()
        chunks = pos_emb.unflatten(seq_dim, (2 * size, -1))
        held = [chunks.select(seq_dim, chunk) for chunk in (rank, 2 * size - 1 - rank)]
        return torch.cat(held, dim=seq_dim)

    vars(module).update(get_pos_emb_on_this_cp_rank=positions)


@_patch("megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__")
def _recompute_without_fp8(module: ModuleType) -> None:
    """Upstream takes `fp8=False` for fp8 and needs Transformer Engine, which is missing: pass None instead."""
    original = module.CheckpointWithoutOutput.__init__

    def initialise(self: Any, fp8: Any = False) -> None:
        original(self, fp8 or None)

    module.CheckpointWithoutOutput.__init__ = initialise


@_patch("megatron.core.ssm.gated_delta_net.common:torch_chunk_gated_delta_rule", "0.19")
def _delta_rule_of_torch(module: ModuleType) -> None:
    """Upstream asks for functions of flash-linear-attention, which needs a GPU: torch's, on padded sequences."""

    def by_sequence(function: Callable[..., Any], tensors: Sequence[Any], cu_seqlens: Any) -> Any:
        """Apply a causal function of [B, S, ...] to packed [1, T, ...]."""
        if cu_seqlens is None:
            return function(*tensors)
        lengths = cu_seqlens.diff()[:, None]
        place = torch.arange(int(lengths.max()))
        index = (cu_seqlens[:-1, None] + place).clamp(max=tensors[0].size(1) - 1)  # tokens after a sequence: any
        return function(*(tensor[0, index] for tensor in tensors))[place < lengths][None]

    def conv(x: Any, weight: Any, bias: Any, cu_seqlens: Any = None, **kwargs: Any) -> tuple[Any, None]:
        def silu_conv(x: Any) -> Any:
            made = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=weight.size(1) - 1, groups=weight.size(0))
            return silu(made[..., : x.size(1)]).transpose(1, 2)

        return by_sequence(silu_conv, [x], cu_seqlens), None

    def rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any = None, **kwargs: Any) -> tuple[Any, None]:
        chunked = module.torch_chunk_gated_delta_rule
        return by_sequence(lambda *tensors: chunked(*tensors)[0], [q, k, v, g, beta], cu_seqlens), None

    def l2norm(x: Any, dim: int = -1, eps: float = 1e-6) -> Any:
        return (x * torch.rsqrt(x.float().square().sum(dim, keepdim=True) + eps)).to(x.dtype)

    vars(module).update(HAVE_FLA=True, causal_conv1d=conv, chunk_gated_delta_rule=rule, l2norm=l2norm)


@_patch("megatron.core.utils:local_multi_tensor_l2_norm")
def _norms_of_long_tensors(module: ModuleType) -> None:
    """torch's float32 norm of a long tensor loses digits on a CPU: sum it in blocks."""

    def l2_norm(chunk_size: Any, noop_flag: Any, tensor_lists: Any, per_tensor: Any, *args: Any) -> Any:
        return squared_norm([tensor for tensors in tensor_lists for tensor in tensors]).sqrt().float().view(1), None

    vars(module).update(local_multi_tensor_l2_norm=l2_norm)
