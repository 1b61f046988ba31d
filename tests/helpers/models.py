"""Tiny Hugging Face checkpoints and batches for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_rl.types import Experience

FAMILIES = ("qwen2", "qwen3", "llama")


def write_tiny_checkpoint(
    directory: Path,
    *,
    family: str = "qwen3",
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A random checkpoint as transformers writes it: 4 layers, hidden 32, 4 heads, 2 key-value heads, vocabulary 50.

    Weights are five times a real initialisation, so that wrong layouts change log-probs by much more than rounding.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    settings: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if family != "qwen2":
        settings["head_dim"] = 16
    config_class = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**(settings | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)
    return directory


def random_experience(
    *, num_prompts: int = 4, samples: int = 2, vocab_size: int = 50, longest: int = 24, seed: int = 0
) -> Experience:
    """Rows of different lengths with random tokens, advantages and old log-probs; weights of a token mean."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_prompts * samples

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, longest, generator=generator)

    lengths = torch.randint(6, longest + 1, (rows,), generator=generator)
    prompt_lengths = torch.randint(2, 5, (rows,), generator=generator)
    positions = torch.arange(longest)
    mask = (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])
    inside = positions < lengths[:, None]
    tokens = torch.randint(2, vocab_size, (rows, longest), generator=generator) * inside
    weights = mask.float() / mask.sum()
    return Experience(
        tokens=tokens,
        loss_mask=mask,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        prompt_index=torch.arange(num_prompts).repeat_interleave(samples),
        sample_index=torch.arange(samples).repeat(num_prompts),
        rollout_logprobs=(normal(0.3) - 3) * mask,
        old_logprobs=(normal(0.3) - 3) * mask,
        ref_logprobs=(normal(0.3) - 3) * mask,
        values=normal(0.5) * mask,
        advantages=normal(1.0) * mask,
        returns=normal(1.0) * mask,
        loss_weights=weights,
        token_weights=weights,
        batch_size=[rows],
    )


def write_digit_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """A character tokenizer of digits, letters and a few signs: id 0 pads, id 1 ends a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *"0123456789+-=*. abcdefghijklmnopqrstuvwxyz"]
    names += [f"<{number}>" for number in range(len(names), vocab_size)]
    assert len(names) == vocab_size
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
