"""Gated delta nets (arXiv:2412.06464) of Megatron-Core, for padded and packed batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor
from torch.nn.functional import softplus

from mega_rl.engines.models.layer import RMSNorm
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.base import send


class PackedDeltaNet(GatedDeltaNet):
    """Megatron-Core's layer, whose state ends with each packed sequence.

    The norm on its output multiplies by its weight, also where the other norms of the model multiply by 1 + weight.
    Context-parallel ranks exchange their tokens, zigzag slices of each sequence, for all tokens of some heads.
    Upstream's deterministic mode knows no packed sequences: on a CPU, the only place where a run that asks for it gets
    here, the other mode runs on torch's functions too (`accelerator.patches`).
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.deterministic_mode = config.layernorm_zero_centered_gamma = False
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,  # [S / cp, B, H], or [T / cp, 1, H] of packed sequences
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output like `hidden_states`, no bias); rows are right-padded, so padding follows every real token."""
        if packed_seq_params is not None:
            bounds = send(packed_seq_params.cu_seqlens_q, hidden_states.device)
            packed_seq_params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        made: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        return made

    def _compute_g_and_beta(self, A_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log of the decay in float32, strength of the write), both [B, S, heads].

        Upstream rounds exp(A_log) to the model's dtype, which transformers and SGLang do not.
        """
        return -A_log.float().exp() * softplus(alpha.float() + dt_bias), torch.sigmoid(beta)


def delta_net_spec(model_type: str) -> ModuleSpec:
    """Return the spec of a gated delta net. Raises UserError: a GPU's kernels are not installed."""
    if not HAVE_FLA:
        raise UserError(
            f"model_type={model_type}: gated delta nets run on a GPU through flash-linear-attention, which is not "
            "installed; run pip install flash-linear-attention"
        )
    linears = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=PackedDeltaNet, submodules=linears)
