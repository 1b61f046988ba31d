"""Operations of a model's passes against torch's own count, and attention's pairs against a mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.tracking.metrics import flops
from mega_rl.tracking.metrics.flops import ModelWork, _pairs
from tests.helpers.models import write_tiny_checkpoint

# torch also counts the outer products that make rotary angles: a few parts in ten thousand of models as small as these.
TOLERANCE = 0.002


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma3_text", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
)
def test_operations_equal_the_count_of_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole attention, as eager kernels compute it; MLA, shared and routed experts, tied output layers."""
    path = write_tiny_checkpoint(tmp_path, family=family, tied=family in ("qwen3", "gemma3_text"))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.arange(2 * 24).view(2, 24) % 50
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=tokens, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    monkeypatch.setattr(flops, "_pairs", lambda length, window: length * length)
    expected = ModelWork(read_hf_config(path), head="lm").forward([24, 24])
    assert forward.get_total_flops() == pytest.approx(expected, rel=TOLERANCE)
    assert backward.get_total_flops() == pytest.approx(2 * expected, rel=0.02)  # no gradient of tokens or angles


@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 7), (7, 3), (3, 7), (64, 8)])
def test_pairs_equal_a_causal_mask(length: int, window: int) -> None:
    mask = torch.ones(length, length).tril() * torch.ones(length, length).triu(1 - window)
    assert _pairs(length, window) == float(mask.sum())


def test_packed_sequences_count_separately(tmp_path: Path) -> None:
    work = ModelWork(read_hf_config(write_tiny_checkpoint(tmp_path, family="qwen3")), head="lm")
    assert work.forward([10, 20]) == work.forward([10]) + work.forward([20]) < work.forward([30])
    assert work.update([10, 20]) == 3 * work.forward([10, 20])


def test_value_head_has_no_vocabulary(tmp_path: Path) -> None:
    hf = read_hf_config(write_tiny_checkpoint(tmp_path, family="llama"))
    policy, critic = (ModelWork(hf, head=head).forward([1]) for head in ("lm", "value"))
    assert policy - critic == 2 * hf.hidden_size * (hf.vocab_size - 1)
