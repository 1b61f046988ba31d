"""Attention of Hugging Face's models: the kernels of our core attention under names that transformers dispatches on.

A name that transformers knows no mask for gets none, so nothing of size [T, T] is made for a packed micro-batch. Rows
of padded ones are right-padded, where causality alone keeps padding out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from mega_rl.engines.models.attention import PackedSequences, attend_packed, packed_sequences
from mega_rl.engines.models.attention_kernels import KERNELS
from mega_rl.errors import RunError
from mega_rl.parallel.accelerator.transfer import send

# What modules hand on that says nothing of the result.
_WITHOUT_EFFECT = ("position_ids", "cache_position", "use_cache")


def attention_name(choice: str) -> str:
    """Return the `attn_implementation` with which a model must be built to run `choice`, "eager" and the like.

    Raises KeyError: not one that Hugging Face's models run.
    """
    return {**{kernel: f"mega_rl_{kernel}" for kernel in KERNELS}, "flash_attention_2": "flash_attention_2"}[choice]


def attention_arguments(
    choice: str, cu_seqlens: Tensor | None, max_seqlen: int, *, device: torch.device
) -> dict[str, Any]:
    """Return the arguments that a model with attention `choice` needs in each forward besides its tokens.

    cu_seqlens: [n+1] int32 on the host, where packed sequences begin, from 0 to T; None if padded.
    max_seqlen: tokens of the longest sequence. device: of the model.
    """
    if choice != "flash_attention_2":
        packed = None if cu_seqlens is None else packed_sequences(cu_seqlens, max_seqlen, device=device)
        return {"sequences": packed}
    arguments: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if cu_seqlens is not None:
        bounds = send(cu_seqlens, device)
        arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        arguments |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
    return arguments


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: str,
    sequences: PackedSequences | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """([b, S, heads, E], None): context of query [b, heads, S, D] in key [b, groups, S, D] and value [b, groups, S, E].

    What transformers calls for an attention `module`. `sequences` comes from `attention_arguments` through the model's
    forward and has no default: a model that lost it on the way would let packed sequences see each other.

    Raises RunError: the module asks for something that changes the result and is not computed here.
    """
    asked = {
        "attention_mask": attention_mask is not None,
        "dropout": dropout != 0.0,
        "is_causal=False": not (module.is_causal if is_causal is None else is_causal),
        **{name: value is not None and value is not False for name, value in others.items()},
    }
    unknown = [name for name, is_asked in asked.items() if is_asked and name not in _WITHOUT_EFFECT]
    if unknown:
        raise RunError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which attn_implementation={kernel} "
            "of engine.backend=fsdp does not compute; use engine.backend=megatron"
        )
    scale = 1.0 / math.sqrt(query.size(-1)) if scaling is None else scaling
    # Qwen2-MoE leaves its windows to the mask.
    window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
    if sequences is None:
        return KERNELS[kernel](query, key, value, scale=scale, window=window, sinks=None).transpose(1, 2), None
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attend = partial(attend_packed, KERNELS[kernel], scale=scale, window=window, sinks=None)
    return attend(query, key, value, sequences).unsqueeze(0), None


for _kernel in KERNELS:
    AttentionInterface.register(attention_name(_kernel), partial(_attention, kernel=_kernel))
