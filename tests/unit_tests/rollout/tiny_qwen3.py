"""A small Qwen3 checkpoint on disk, and engines that hold its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mega_rl.rollout.embedded import HFRolloutEngine
from mega_rl.rollout.sampling import Sampler
from mega_rl.types import Prompt

VOCAB_SIZE = 131  # not a multiple of the sampler's block
EOS_ID = 2


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    model: PreTrainedModel  # float32, as from_pretrained reads it


def make_checkpoint(path: Path, *, tied: bool = True, seed: int = 0, **changes: object) -> Checkpoint:
    settings: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_ID,
        # Wide enough for distributions that are far from uniform.
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    config = Qwen3Config(**(settings | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return Checkpoint(path=path, model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def make_engine(checkpoint: Checkpoint, *, load: bool = True, **changes: object) -> HFRolloutEngine:
    settings: dict[str, object] = {
        "dtype": torch.float32,
        "device": "cpu",
        "sampler": Sampler(temperature=1.0),
        "max_new_tokens": 12,
        "stop_token_ids": [],
        "batch_size": 64,
    }
    engine = HFRolloutEngine(checkpoint.path, **(settings | changes))  # type: ignore[arg-type]
    if load:
        engine.load_weights(checkpoint.model.state_dict().items())
        engine.finish_update(1)
    return engine


def make_prompts(lengths: list[int], *, seed: int = 1) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in lengths]
    return [Prompt(index=i, token_ids=ids, text="", answer="") for i, ids in enumerate(token_ids)]
