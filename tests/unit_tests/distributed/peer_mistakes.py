"""Mistakes that other converters make, repeated on a model that was loaded right: what do they cost?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.unit_tests.distributed.family_cases import CASES, tokens_of, write_case


def softmax_before_choice(chunk: Any) -> None:
    """Mixtral's weights are those of a softmax over the chosen experts, not over all."""
    chunk.config.moe_router_pre_softmax = True


def no_groups(chunk: Any) -> None:
    """DeepSeek-V3 chooses among the experts of its best groups only."""
    chunk.config.moe_router_num_groups = chunk.config.moe_router_group_topk = None


def upstream_llama3(chunk: Any) -> None:
    """Megatron-Core's llama3 scaling has another original context length built in than this model has."""
    rotary = chunk.rotary_pos_emb.rotary
    size = 2 * rotary.inv_freq.numel()
    plain = 1.0 / 1e4 ** (torch.arange(0, size, 2).float() / size)
    rotary.inv_freq = rotary._apply_scaling(plain, factor=8.0)
    rotary.forward.cache_clear()


def window_one_too_long(chunk: Any) -> None:
    """A window of w tokens is (w - 1, 0) in Megatron-Core, which does not count the token itself."""
    for layer in chunk.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.window += 1 if attention.window is not None else 0


@dataclass(frozen=True)
class Mistake:
    """The model that shows it, what the mistake does to it, and how to say it."""

    case: str
    make: Callable[[Any], None]
    words: str


MISTAKES = {
    "mixtral": Mistake("mixtral", softmax_before_choice, "Mixtral: softmax before the choice of experts"),
    "groups": Mistake("deepseek_v3", no_groups, "DeepSeek-V3: routing without groups"),
    "llama3": Mistake("llama-llama3-short", upstream_llama3, "Llama 3 RoPE: original length taken for 8192"),
    "window": Mistake("mistral-window", window_one_too_long, "sliding window (w, 0) instead of (w - 1, 0)"),
}


def measure_mistakes(rank: int, root: str) -> dict[str, tuple[float, float]]:
    """By mistake the largest logit difference to transformers (without it, with it); one process."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout
    from mega_rl.verify.twin import hf_logits
    from tests.helpers.loaded_model import load_model

    built = groups.initialize(ParallelLayout(), accelerator=accelerator, timeout_s=60)
    actual = {}
    for name, mistake in MISTAKES.items():
        path = write_case(mistake.case, Path(root))
        tokens = tokens_of(CASES[mistake.case])
        expected = hf_logits(path, tokens).logits
        model = load_model(path, groups=built, accelerator=accelerator)
        gaps = []
        for spoil in (False, True):
            if spoil:
                mistake.make(model.chunks[0])
            outputs = model.forward(tokens)
            assert outputs is not None
            gaps.append(float((outputs.logits.cpu() - expected).abs().max()))
        actual[name] = (gaps[0], gaps[1])
    groups.destroy()
    return actual
