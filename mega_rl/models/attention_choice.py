"""What attention a model will run, of what is asked for and what is there."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from mega_rl.config.attention import RequestedAttention, Role
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import Spec
from mega_rl.errors import UserError

# As the start-up table shows it; those of Transformer Engine by the name of its backend.
Attention = Literal["eager", "sdpa", "flash_attention_2", "te: auto", "te: flash", "te: fused", "te: unfused"]
TE = "te: "

# Whose layers -> what may be asked for -> what then runs.
_RUNS: dict[Spec, dict[str, Attention]] = {
    "local": {"eager": "eager", "sdpa": "sdpa"},
    "te": {"eager": "te: unfused", "sdpa": "te: fused", "flash_attention_2": "te: flash", "auto": "te: auto"},
    "hf": {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2"},
}
_OWNERS: dict[Spec, str] = {
    "local": "Megatron-Core's layers without Transformer Engine",
    "te": "Transformer Engine's layers",
    "hf": "Hugging Face's models (engine=fsdp)",
}


def choose_attention(requested: str, *, key: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> Attention:
    """What runs where the setting `key` asks for `requested`, one of `schema.ATTENTION`, for the model `hf`.

    "auto" leaves the choice to Transformer Engine in its layers; elsewhere it is FlashAttention in Hugging Face's
    models where that can run, else sdpa. `dtype` is "bf16" or "fp32".

    Raises:
        UserError: what is asked for cannot run here, why, and what can.
    """
    lacking = {word: _lacking(word, hf, impl, device_type, dtype) for word in ("flash_attention_2", "sdpa", "eager")}
    there = [word for word, reasons in lacking.items() if not reasons]
    runs = _RUNS[impl]
    if requested == "auto":
        return runs.get("auto") or runs[there[0]]
    if lacking[requested]:
        raise UserError(
            f"{key}={requested} cannot run in {_OWNERS[impl]}: it needs {' and '.join(lacking[requested])}; "
            f"available here: {', '.join(['auto', *reversed(there)])}"
        )
    return runs[requested]


def check_one_backend(asked: Mapping[Role, RequestedAttention]) -> None:
    """Whether models of these roles with Transformer Engine's layers can live in one process.

    Megatron-Core tells Transformer Engine its backend through the environment, which all models of a process share, and
    every word that can be asked for is another backend.

    Raises:
        UserError: two roles ask for different ones.
    """
    (first, its), *others = asked.items()
    for role, own in others:
        if own.word != its.word:
            raise UserError(
                f"{its.key}={its.word} ({first}) and {own.key}={own.word} ({role}): Transformer Engine has one backend "
                "for all models of a process; ask for the same in both, or set model.transformer_impl=local"
            )


def _lacking(word: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> list[str]:
    """What `word` would need that is not here, in words."""
    needs: dict[str, bool] = {}
    if word == "flash_attention_2" and impl == "local":
        needs["Transformer Engine (model.transformer_impl) or engine=fsdp"] = False
    elif word == "flash_attention_2":
        needs["a CUDA device"] = device_type == "cuda"
        needs["model.dtype=bf16"] = dtype == "bf16"
        needs["the package flash-attn"] = _has_flash_attn()
        # transformers hands the windows of this family to the mask alone, which FlashAttention does not read.
        keeps_windows_back = impl == "hf" and hf.family == "qwen2_moe" and hf.window is not None
        needs["use_sliding_window=false in a model of model_type=qwen2_moe"] = not keeps_windows_back
    elif word == "sdpa" and impl == "te":
        needs["model.dtype=bf16"] = dtype == "bf16"  # its fused kernels are cuDNN's
    return [what for what, here in needs.items() if not here]


def _has_flash_attn() -> bool:
    """Whether FlashAttention 2 is installed: other versions are other packages, in part with the same module."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
