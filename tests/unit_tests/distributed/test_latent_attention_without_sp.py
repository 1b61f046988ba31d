"""Why tensor parallelism of latent attention needs sequence parallelism: Megatron-Core's gradients are wrong without.

When this fails, upstream may be right: see whether `transformer_config` and preflight can let such layouts through.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.expert_cases import relative
from tests.unit_tests.distributed.latent_cases import gradients

pytestmark = pytest.mark.timeout(240)

TOLERANCE = 2e-5  # float32, another order of sums; 1e-6 is measured


def test_upstream_is_wrong_for_latent_norms_and_rotary_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the last layer, whose incoming gradients are right; below, everything inherits the error.

    `finalize_model_grads` sums what is called q_layernorm over tensor parallelism, though each rank has the whole of it
    already. And nobody sums what ranks have of the gradient of the key's rotary part, which all heads share.
    """
    path = tmp_path_factory.mktemp("model")
    checkpoint = str(write_tiny_checkpoint(path, family="deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2))
    one = run_ranks(1, gradients, checkpoint, "1")[0]["1"]
    many = run_ranks(2, gradients, checkpoint, "tp2-sp", "tp2")[0]
    right, wrong = many["tp2-sp"], many["tp2"]
    assert max(relative(right[name], one[name]) for name in one) <= TOLERANCE
    layer = "model.layers.1."
    off = {name.removeprefix(layer) for name in one if name.startswith(layer) and _differs(wrong[name], one[name])}
    norm, keys = "self_attn.q_a_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight"
    assert off == {norm, keys, "input_layernorm.weight"}
    assert relative(wrong[layer + norm], 2 * one[layer + norm]) <= TOLERANCE
    rank = 16  # of the latent: the first rows make keys and values, the last the keys' rotary part
    assert not _differs(wrong[layer + keys][:rank], one[layer + keys][:rank])
    assert relative(wrong[layer + keys][rank:], one[layer + keys][rank:]) > 0.1


def _differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative(found, expected) > TOLERANCE
