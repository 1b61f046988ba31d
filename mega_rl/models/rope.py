"""Rotary frequencies that no setting of Megatron-Core can express."""

from __future__ import annotations

import math

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from mega_rl.converters.architecture import HFConfig, Rope


def set_llama3_frequencies(chunk: GPTModel, hf: HFConfig) -> None:
    """Set a chunk's rotary frequencies to those of `hf.rope` (kind "llama3").

    Megatron-Core's own scaling (`RotaryEmbedding._apply_scaling`) has all settings but the factor built in: another
    original context length would be ignored without a word.
    """
    rotary = chunk.rotary_pos_emb
    rotary.inv_freq = llama3_frequencies(hf.rope, hf.head_dim).to(rotary.inv_freq)


def llama3_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return [head_dim / 2] float32 angles per position, scaled as Llama 3 does.

    Wavelengths above original / low_freq_factor are stretched by the factor, those below original / high_freq_factor
    stay, and between the two the frequency goes over linearly in original / wavelength (Llama 3 reference code,
    `apply_scaling`; transformers `_compute_llama3_parameters`).
    """
    settings = rope.llama3
    assert settings is not None
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    turns = settings.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)
