"""Choice of a model's attention from the setting, its layers and the installed packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from mega_rl.config.needs import RequestedAttention, Role
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
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
    "hf": "Hugging Face's models (engine.backend=fsdp)",
}


def choose_attention(requested: str, *, key: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> Attention:
    """Return the attention for the setting `key` with value `requested`, one of `schema.ATTENTION`, and the model `hf`.

    "auto" leaves the choice to Transformer Engine in its layers; elsewhere it is FlashAttention in Hugging Face's
    models where that can run, else sdpa. `dtype` is "bf16" or "fp32".

    Raises UserError: the requested attention cannot run here; with the reasons and the available ones.
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
    """Check that models of these roles with Transformer Engine's layers can share a process.

    Megatron-Core passes the backend to Transformer Engine through the environment, which all models of a process share,
    and every value of the setting is another backend.

    Raises UserError: two roles ask for different ones.
    """
    (first, its), *others = asked.items()
    for role, own in others:
        if own.word != its.word:
            raise UserError(
                f"{its.key}={its.word} ({first}) and {own.key}={own.word} ({role}): Transformer Engine has one backend "
                "for all models of a process; ask for the same in both, or set engine.megatron.transformer_impl=local"
            )


def _lacking(word: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> list[str]:
    """Return what the attention `word` needs and this machine or model lacks, in words."""
    needs: dict[str, bool] = {}
    if word == "flash_attention_2" and impl == "local":
        needs["Transformer Engine (engine.megatron.transformer_impl) or engine.backend=fsdp"] = False
    elif word == "flash_attention_2":
        needs["a CUDA device"] = device_type == "cuda"
        needs["model.dtype=bf16"] = dtype == "bf16"
        needs["the package flash-attn"] = _has_flash_attn()
        unseen_windows = impl == "hf" and hf.window is not None and FAMILIES[hf.family].windows_in_mask_only
        needs[f"use_sliding_window=false in a model of model_type={hf.family}"] = not unseen_windows
    elif word == "sdpa" and impl == "te":
        needs["model.dtype=bf16"] = dtype == "bf16"  # its fused kernels are cuDNN's
    return [what for what, here in needs.items() if not here]


def _has_flash_attn() -> bool:
    """Return whether FlashAttention 2 is installed: other versions are other packages, some with the same module."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
