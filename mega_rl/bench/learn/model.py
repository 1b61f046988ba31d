"""The model of a learning task: a random Qwen3 of two layers, one token for each character."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

HIDDEN = 64
MAX_TOKENS = 64


def write_model(folder: Path, vocabulary: str, *, stop: str, seed: int) -> None:
    """Write a Hugging Face checkpoint (safetensors, fp32) with random weights of `seed`, and its tokenizer.

    stop: the character that ends a response. Without one the end-of-sequence id lies outside the vocabulary, so every
    response has full length.
    """
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.08,  # the usual 0.02 suits widths of thousands
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=vocabulary.index(stop) if stop else None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=vocabulary.index(stop) if stop else len(vocabulary))
    disable_progress_bar()
    model.save_pretrained(folder)
    _tokenizer(vocabulary).save_pretrained(folder)


def _tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.WordLevel(vocab={text: i for i, text in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
