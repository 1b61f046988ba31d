"""Tiny models with random weights, and tokenizers of whole tokens, for the quickstart and for verification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

ANY_CHARACTER = r"[\s\S]"  # pattern of a tokenizer with one token for each character


def write_tokenizer(
    folder: Path, tokens: Sequence[str], *, pattern: str = ANY_CHARACTER, unknown: str, **settings: object
) -> None:
    """Write a tokenizer that cuts a text by a pattern and adds no special tokens."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)


def fresh_qwen3(
    vocab_size: int,
    *,
    width: int,
    initializer_range: float,
    max_positions: int,
    eos: int | None,
    pad: int | None = None,
    seed: int,
) -> Qwen3ForCausalLM:
    """Return a random float32 Qwen3 of two layers; the caller's random state stays.

    width: hidden size, a multiple of 64; the heads have 32 columns each. initializer_range: transformers' usual 0.02
    suits widths of thousands; a small model would learn nothing in its first hundred steps.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        initializer_range=initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
