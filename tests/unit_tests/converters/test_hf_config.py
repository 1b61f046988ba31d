"""config.json -> HFConfig: both spellings, every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_rl.converters.architecture import Rope
from mega_rl.converters.hf_config import parse_hf_config, read_hf_config
from mega_rl.errors import UserError, UserErrors

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "attention_dropout": 0.1,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA: dict[str, Any] = {
    **{key: QWEN2[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")},
    "model_type": "llama",
    "num_attention_heads": 14,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE,
}


def test_qwen2_of_transformers_4() -> None:
    hf = parse_hf_config(QWEN2)
    assert (hf.family, hf.num_layers, hf.hidden_size, hf.num_heads, hf.num_kv_heads) == ("qwen2", 24, 896, 14, 2)
    assert (hf.head_dim, hf.ffn_hidden_size, hf.vocab_size) == (64, 4864, 151936)
    assert (hf.tied, hf.qkv_bias, hf.linear_bias, hf.qk_norm) == (True, True, False, False)
    assert (hf.rope, hf.dtype, hf.eos_token_ids) == (Rope("default", 1e6), "bfloat16", (151645,))
    assert hf.raw["bos_token_id"] == 151643


def test_both_spellings_give_the_same_config() -> None:
    old = LLAMA | {"torch_dtype": "bfloat16"}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert parse_hf_config(old) == parse_hf_config(new)
    assert parse_hf_config(old).rope == Rope("llama3", 500000.0, 32.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_rope(key: str) -> None:
    assert parse_hf_config(QWEN2 | {"rope_scaling": {key: "linear", "factor": 4}}).rope == Rope("linear", 1e6, 4.0)


def test_rope_parameters_of_a_plain_model_are_no_scaling() -> None:
    # transformers 5 writes a rope object for every model, and reads it under the older name too.
    plain = {"rope_theta": 5e5, "rope_type": "default"}
    assert parse_hf_config(LLAMA | {"rope_scaling": plain}).rope == Rope("default", 5e5)


def test_theta_beside_the_scaling_wins_as_in_transformers() -> None:
    assert parse_hf_config(QWEN2 | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope.theta == 7.0
    assert parse_hf_config(QWEN2 | {"rope_parameters": {"rope_type": "default"}}).rope.theta == 1e6


def test_head_dim_defaults_differ_by_family() -> None:
    assert parse_hf_config(QWEN2 | {"model_type": "qwen3"}).head_dim == 128
    assert parse_hf_config(LLAMA | {"head_dim": None}).head_dim == 64
    assert parse_hf_config(LLAMA | {"head_dim": 100}).head_dim == 100


def test_llama_defaults() -> None:
    hf = parse_hf_config(LLAMA)
    assert (hf.num_kv_heads, hf.tied, hf.qkv_bias, hf.norm_eps, hf.dtype, hf.eos_token_ids) == (
        14,
        False,
        False,
        1e-6,
        None,
        (),
    )


def test_llama_with_all_biases() -> None:
    hf = parse_hf_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (hf.qkv_bias, hf.linear_bias) == (True, True)


def test_window_that_no_layer_uses_is_accepted() -> None:
    parse_hf_config(QWEN2 | {"use_sliding_window": True, "max_window_layers": 24})
    parse_hf_config(QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 24})


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (QWEN2, {"model_type": "gpt2"}, ['model_type="gpt2"', "llama, qwen2, qwen3"]),
        (QWEN2, {"model_type": "mystery", "auto_map": {"AutoModel": "m.M"}}, ["mystery", "never run"]),
        (QWEN2, {"auto_map": {"AutoModel": "m.M"}}, ["auto_map", "never run"]),
        (QWEN2, {"hidden_act": "gelu"}, ['hidden_act="gelu"', "silu"]),
        (QWEN2, {"use_sliding_window": True}, ["sliding_window=32768", "use_sliding_window"]),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}, ["sliding_window=32768"]),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", '"yarn"', "llama3"]),
        (QWEN2, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_parameters.rope_type", "dynamic"]),
        (QWEN2, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        (QWEN2, {"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling.factor=-1", "positive"]),
        (QWEN2, {"rope_scaling": 4}, ["rope_scaling=4", "object"]),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, ["low_freq_factor=2.0", "1"]),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 4096}}, ["4096", "8192"]),
        (LLAMA, {"attention_bias": True}, ["attention_bias=true", "mlp_bias"]),
        (LLAMA, {"mlp_bias": True}, ["mlp_bias"]),
        (QWEN2 | {"model_type": "qwen3"}, {"attention_bias": True}, ["attention_bias=true"]),
        (QWEN2, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "unquantised"]),
        (QWEN2, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (QWEN2, {"num_key_value_heads": 3}, ["num_key_value_heads=3", "14"]),
        (QWEN2, {"hidden_size": "896"}, ['hidden_size="896"', "positive integer"]),
        (QWEN2, {"vocab_size": True}, ["vocab_size=true"]),
        (QWEN2, {"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        (QWEN2, {"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        (QWEN2, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        (QWEN2, {"head_dim": 63}, ["head_dim=63", "even"]),
        (QWEN2, {"eos_token_id": "</s>"}, ["eos_token_id"]),
        (QWEN2, {"torch_dtype": "int8"}, ['torch_dtype="int8"', "bfloat16"]),
        (QWEN2, {"hidden_size": None}, ["hidden_size is missing"]),
    ],
)
def test_refusals_name_field_value_and_reason(base: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_hf_config(base | change, where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json")
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(UserErrors) as caught:
        parse_hf_config(QWEN2 | {"hidden_act": "relu", "vocab_size": -1, "quantization_config": {"a": 1}})
    assert len(caught.value.problems) == 3


def test_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path)
    config = tmp_path / "config.json"
    for text, message in (("{", "not valid JSON"), ("[1]", "must be an object"), ("\udcff", "not valid JSON")):
        config.write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match=message):
            read_hf_config(tmp_path)
    config.write_text(json.dumps(QWEN2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert read_hf_config(str(tmp_path)).eos_token_ids == (151645, 151643)


def test_imports_no_torch() -> None:
    script = "import sys, mega_rl.converters.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
