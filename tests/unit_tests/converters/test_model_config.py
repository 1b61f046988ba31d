"""HFConfig -> keyword arguments of Megatron-Core: what is not simply a field of the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.live.model_config import extra_config_attributes, transformer_config_kwargs, unfused
from tests.helpers.distributed import run_ranks
from tests.unit_tests.converters.tiny_configs import TINY

MSCALES: list[dict[str, float]] = [
    {},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 1.5, "mscale_all_dim": 0.5},
    {"mscale": 2.0},
    {"mscale": 2.0, "mscale_all_dim": 0.0},
]


def yarn_config(name: str, mscales: dict[str, float]) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **mscales}
    return TINY[name] | {"rope_scaling": scaling}


def scales_of_megatron(_: int) -> list[tuple[float, float]]:
    """(of sines and cosines, of attention logits) as Megatron-Core computes them, per family and `MSCALES`."""
    from mega_rl.parallel.accelerator import prepare

    prepare("cpu")
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    actual = []
    for name in ("qwen3", "deepseek_v3"):
        for mscales in MSCALES:
            hf = parse_hf_config(yarn_config(name, mscales))
            if hf.mla is None:
                extra = extra_config_attributes(hf)
                pair = (extra["yarn_mscale"], extra["yarn_mscale_all_dim"])
                actual.append((yarn._yarn_get_concentration_factor(4.0, *pair), 1.0))
            else:
                kwargs = transformer_config_kwargs(hf)
                pair = (kwargs["mscale"], kwargs["mscale_all_dim"])
                of_logits = yarn._yarn_get_mscale(4.0, kwargs["mscale_all_dim"]) ** 2
                actual.append((yarn._yarn_get_concentration_factor(4.0, *pair), of_logits))
    return actual


def test_scales_of_yarn_are_those_of_transformers() -> None:
    """Of sines and cosines, and of attention logits: the two default differently where a key is absent."""
    expected = []
    for name in ("qwen3", "deepseek_v3"):
        for mscales in MSCALES:
            known = {key: value for key, value in yarn_config(name, mscales).items() if key != "model_type"}
            config = AutoConfig.for_model(name, **known)
            of_logits = 1.0
            if name == "deepseek_v3":
                attention = DeepseekV3Attention(config, 0)
                of_logits = attention.scaling * attention.qk_head_dim**0.5
            expected.append((ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1], of_logits))
    actual = run_ranks(1, scales_of_megatron, device="cpu")[0]
    # Both compute in float64; the order of operations differs.
    assert [pair[0] for pair in actual] == pytest.approx([pair[0] for pair in expected], rel=1e-12)
    assert [pair[1] for pair in actual] == pytest.approx([pair[1] for pair in expected], rel=1e-12)


def test_fusions_that_are_wrong_for_an_architecture_are_off() -> None:
    off = {name: set(unfused(parse_hf_config(TINY[name]))) for name in TINY}
    assert all(value is False for name in TINY for value in unfused(parse_hf_config(TINY[name])).values())
    rope, activation = {"apply_rope_fusion"}, {"bias_activation_fusion"}
    assert {name: actual for name, actual in off.items() if actual} == {
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "moonlight", "glm4", "glm4_moe_lite"), rope),
        **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "ministral3", "mistral4", "deepseek_v32", "glm_moe_dsa"), rope),
        **dict.fromkeys(("apertus", "arcee", "gemma3_text"), activation),
        "gpt_oss": rope,
    }


def test_multi_token_prediction_only_where_it_is_loaded() -> None:
    hf = parse_hf_config(TINY["deepseek_v3"])
    assert transformer_config_kwargs(hf)["mtp_num_layers"] is None
    assert transformer_config_kwargs(replace(hf, mtp="load"))["mtp_num_layers"] == 1
