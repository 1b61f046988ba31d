"""Norms of transformers' classes by torch's kernel: equal numbers and gradients, and classes that are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from mega_rl.engines.models.norms import fuse_norms


def values(norm: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of input and weight, for a loss that differs by element."""
    hidden = hidden.clone().requires_grad_()
    output = norm(hidden)
    weight = norm.get_parameter("weight")
    return [output, *torch.autograd.grad((output.float() * torch.arange(output.size(-1))).sum(), [hidden, weight])]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_norm_computes_the_same(kind: type, dtype: torch.dtype) -> None:
    """In float32 the output to the bit; in bf16 as near to float64 as one rounding of each number allows."""
    torch.manual_seed(0)
    written = kind(48, eps=1e-3)
    nn.init.normal_(written.weight)
    hidden = torch.randn(5, 7, 48).to(dtype)
    written = written.to(dtype)
    fused = copy.deepcopy(written)
    assert fuse_norms(nn.ModuleList([fused])) == 1
    got, expected = values(fused, hidden), values(written, hidden)
    if dtype == torch.float32:
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        exact = torch.nn.functional.rms_norm(hidden.double(), (48,), written.weight.double(), 1e-3)
        torch.testing.assert_close(got[0].double(), exact, rtol=2.0**-8, atol=0)
        assert (got[0].double() - exact).abs().sum() <= (expected[0].double() - exact).abs().sum()


def test_other_norms_stay_as_they_are() -> None:
    """One plus the weight, a product in float32, a gate, a bias, another name."""
    others = nn.ModuleList([Gemma2RMSNorm(8), Qwen3NextRMSNormGated(8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)])
    assert fuse_norms(others) == 0
    assert all("forward" not in vars(module) for module in others)


def test_norms_of_one_class_differ() -> None:
    """One has a weight, and another has none."""
    with_weight, without = Gemma4RMSNorm(8), Gemma4RMSNorm(8, with_scale=False)
    assert fuse_norms(nn.ModuleList([with_weight, without])) == 1
    assert "forward" in vars(with_weight)
    assert "forward" not in vars(without)


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        norm = GptOssRMSNorm(8)
    assert fuse_norms(nn.Sequential(norm)) == 1
    assert norm.weight.is_meta
