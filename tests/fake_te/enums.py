"""Enumerations of `transformer_engine_torch`. Python hands them back to kernels and compares them; values are free."""

from __future__ import annotations

from enum import IntEnum

import torch

DType = IntEnum(
    "DType",
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
    start=0,
)
FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    [f"GEMM{number}_{what}" for number in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")], start=0
)
Float8BlockScaleTensorFormat = IntEnum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT", start=0)
CommOverlapType = IntEnum("CommOverlapType", "RS AG", start=0)

_FORMATS = "BSHD SBHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD"
_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD "
    "Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD"
)


def _named(name: str, members: str) -> type[IntEnum]:
    return IntEnum(name, [f"NVTE_{member}" for member in members.split()], start=0)  # type: ignore[return-value]


NVTE_QKV_Format = _named("NVTE_QKV_Format", _FORMATS)
NVTE_QKV_Layout = _named("NVTE_QKV_Layout", _LAYOUTS)
NVTE_Bias_Type = _named("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")
NVTE_Mask_Type = _named(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _named("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")
NVTE_Fused_Attn_Backend = _named("NVTE_Fused_Attn_Backend", "No_Backend F16_max512_seqlen F16_arbitrary_seqlen FP8")

TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}  # type: ignore[attr-defined]
