"""config.json -> HFConfig: both spellings, every refusal."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mega_rl.converters.architecture import HFConfig, Llama3Rope, Rope, Window, Yarn
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config, release_problems
from mega_rl.converters.live.model_config import transformer_config_kwargs
from mega_rl.converters.plan.sharding import check_layout
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout
from tests.unit_tests.converters.hub_configs import FP8, HUB
from tests.unit_tests.converters.tiny_configs import TINY, YARN

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
    assert (hf.rope, hf.dtype) == (Rope("default", 1e6), "bfloat16")
    assert hf.raw["bos_token_id"] == 151643


def test_both_spellings_give_the_same_config() -> None:
    old = LLAMA | {"torch_dtype": "bfloat16"}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert parse_hf_config(old) == parse_hf_config(new)
    assert parse_hf_config(old).rope == Rope("llama3", 500000.0, 32.0, llama3=Llama3Rope(1.0, 4.0, 8192))


def test_llama3_settings_are_the_files_own() -> None:
    """Megatron-Core has these settings built in; none of them is taken for granted."""
    other = {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 4096}
    assert parse_hf_config(LLAMA | {"rope_scaling": LLAMA3_ROPE | other}).rope.llama3 == Llama3Rope(2.0, 8.0, 4096)
    short = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    assert parse_hf_config(LLAMA | {"rope_scaling": short}).rope.llama3 == Llama3Rope(1.0, 4.0, 131072)


def windowed(**changes: Any) -> Window | None:
    return parse_hf_config(QWEN2 | {"use_sliding_window": True} | changes).window


def test_window_of_qwen2_lies_in_the_last_layers_or_where_layer_types_says() -> None:
    assert parse_hf_config(QWEN2).window is None
    assert windowed(max_window_layers=24) is None
    assert windowed(layer_types=["full_attention"] * 24) is None
    assert windowed(sliding_window=None) is None
    assert windowed() == Window(32768, (False,) * 21 + (True,) * 3)
    types = ["sliding_attention", "full_attention"] * 12
    assert windowed(layer_types=types, sliding_window=16) == Window(16, (True, False) * 12)
    every = {key: value for key, value in QWEN2.items() if key != "max_window_layers"} | {"num_hidden_layers": 30}
    assert parse_hf_config(every | {"use_sliding_window": True}).window == Window(32768, (False,) * 28 + (True,) * 2)


def tiny(name: str, **changes: Any) -> HFConfig:
    return parse_hf_config(TINY[name] | changes)


def test_every_name_of_the_number_of_experts() -> None:
    bare = {key: value for key, value in TINY["qwen3_moe"].items() if key != "num_experts"}
    for name in ("num_experts", "num_local_experts"):
        moe = parse_hf_config(bare | {name: 6}).moe
        assert moe is not None
        assert moe.num_experts == 6
    with pytest.raises(UserError, match=r"num_experts=4: num_local_experts beside it counts the same experts"):
        tiny("qwen3_moe", num_local_experts=6)


def test_gemma3() -> None:
    hf = tiny("gemma3_text")
    assert (hf.activation, hf.zero_centered_norm, hf.post_norms, hf.qk_norm) == ("gelu_tanh", True, True, True)
    assert (hf.embedding_scale, hf.softmax_scale) == (40**0.5, 0.25)
    assert tiny("gemma3_text", query_pre_attn_scalar=12).softmax_scale is None
    assert hf.rope == Rope("default", 1e6, local_theta=1e4)
    scaled = tiny("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert scaled.rope == Rope("linear", 1e6, 8.0, local_theta=1e4)
    nested = {key: value for key, value in TINY["gemma3_text"].items() if not key.startswith("rope_")}
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse_hf_config(nested | {"rope_parameters": parameters}) == scaled


def test_gemma3_without_a_full_layer() -> None:
    """transformers 5 then writes an object that is nested and flat at once, with a base of null."""
    parameters = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "rope_theta": None,
        "rope_type": "default",
    }
    hf = tiny("gemma3_text", num_hidden_layers=2, rope_parameters=parameters)
    assert (hf.rope, hf.window) == (Rope("default", 1e6, local_theta=1e4), Window(6, (True, True)))


def test_gemma3_inside_a_model_of_images() -> None:
    wrapped = {"model_type": "gemma3", "text_config": {**TINY["gemma3_text"]}, "vision_config": {}, "dtype": "bfloat16"}
    hf = parse_hf_config(wrapped)
    assert hf == tiny("gemma3_text")
    assert hf.raw == TINY["gemma3_text"]
    assert hf.wrapper == wrapped
    del wrapped["text_config"]["model_type"]  # type: ignore[attr-defined]
    assert parse_hf_config(wrapped).family == "gemma3_text"
    with pytest.raises(UserError, match="is_encoder_decoder=true"):
        parse_hf_config(wrapped | {"is_encoder_decoder": True})
    with pytest.raises(UserError, match="vision_config"):
        tiny("qwen3", vision_config={})


def test_windows_of_olmo3_are_not_scaled() -> None:
    """In files of transformers 4, 5.0 and 5.13, and where no layer is scaled there is nothing of their own."""
    scaled = {"rope_theta": 5e5, "rope_scaling": YARN}
    assert tiny("olmo3").rope == Rope("default", 1e4)
    rope = tiny("olmo3", **scaled).rope
    assert (rope.kind, rope.theta, rope.local_theta) == ("yarn", 5e5, 5e5)
    flat = {"rope_theta": 5e5, **YARN}
    assert tiny("olmo3", rope_parameters=flat).rope == rope
    nested = {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert tiny("olmo3", rope_parameters=nested).rope == rope
    assert tiny("olmo3").window == Window(8, (True, True, True, False))


def test_layers_without_rotation() -> None:
    assert tiny("smollm3").unrotated == (False, False, False, True)
    assert tiny("smollm3", no_rope_layer_interval=2).unrotated == (False, True, False, True)
    assert tiny("smollm3", no_rope_layers=[0, 1, 1, 1]).unrotated == (True, False, False, False)
    windows = tiny("smollm3", use_sliding_window=True, sliding_window=8)
    assert windows.window == Window(8, windows.unrotated)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert tiny("exaone4", layer_types=kinds, sliding_window_pattern="LG").unrotated == (False, True) * 2
    assert tiny("exaone4", layer_types=["full_attention"] * 4).unrotated == (True,) * 4
    assert tiny("exaone4", layer_types=["full_attention"] * 4, sliding_window=None).unrotated == ()


@pytest.mark.parametrize("name", HUB)
def test_published_checkpoints_are_accepted(name: str) -> None:
    hf = parse_hf_config(HUB[name])
    assert hf.family == HUB[name]["model_type"]
    assert hf.tied == (name == "gemma-3-1b")
    assert hf.quantization == ("fp8" if HUB[name].get("quantization_config") else None)


def test_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    expected = Rope("yarn", 1e6, 4.0, yarn=Yarn(32768))
    assert parse_hf_config(QWEN2 | {"rope_scaling": yarn}).rope == expected
    # 0.1 ln 4 + 1, what is computed anyway.
    assert parse_hf_config(QWEN2 | {"rope_scaling": yarn | {"attention_factor": 1.138629436111989}}).rope == expected
    by_lengths = yarn | {"factor": None, "original_max_position_embeddings": 8192}
    assert parse_hf_config(QWEN2 | {"rope_scaling": by_lengths}).rope.factor == 4.0
    assert parse_hf_config(QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 2.0}}).rope.yarn == Yarn(32768)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (QWEN2, {"model_type": "gpt2"}, ['model_type="gpt2"', "mistral4, mixtral"]),
        (QWEN2, {"model_type": "mystery", "auto_map": {"AutoModel": "m.M"}}, ["mystery", "never run"]),
        (QWEN2, {"hidden_act": "gelu"}, ['hidden_act="gelu"', "silu"]),
        (QWEN2, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_parameters.rope_type", "dynamic"]),
        (QWEN2, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        (QWEN2, {"rope_scaling": 4}, ["rope_scaling=4", "object"]),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4}}, ["high_freq_factor=4.0", "low_freq_factor=4"]),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": None}}, ["low_freq_factor", "missing"]),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 0}}, ["positive integer"]),
        (LLAMA, {"attention_bias": True}, ["attention_bias=true", "mlp_bias"]),
        (QWEN2, {"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "unquantised"]),
        (QWEN2, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (QWEN2, {"num_key_value_heads": 3}, ["num_key_value_heads=3", "14"]),
        (QWEN2, {"hidden_size": "896"}, ['hidden_size="896"', "positive integer"]),
        (QWEN2, {"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        (QWEN2, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        (QWEN2, {"head_dim": 63}, ["head_dim=63", "even"]),
        (QWEN2, {"torch_dtype": "int8"}, ['torch_dtype="int8"', "bfloat16"]),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4}, ["topk_method", "best one"]),
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob=true"]),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ["scoring_func"]),
        ("deepseek_v3", {"norm_topk_prob": False}, ["norm_topk_prob=false", "normalises"]),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, ["norm_topk_prob", "one expert"]),
        ("deepseek_v3", {"topk_group": 1}, ["topk_group=1", "4 // 1", "best 2"]),
        ("deepseek_v3", {"n_group": 3}, ["n_group=3", "8 experts"]),
        ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave=false"]),
        ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq=2"]),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "even"]),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear", "latent attention"]),
        ("deepseek_v3", {"num_nextn_predict_layers": 65}, ["num_nextn_predict_layers=65", "64"]),
        ("deepseek_v3", {"auto_map": {"AutoModel": "modeling_mine.M"}}, ["auto_map", "never run"]),
        ("deepseek_v3", {"quantization_config": {**FP8, "weight_block_size": [0, 128]}}, ["quantization_config"]),
        ("kimi_k2", {"quantization_config": {"quant_method": "compressed-tensors"}}, ["compressed-tensors", "fp8"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, ["gptq", "unquantised"]),
        ("gpt_oss", {"attention_bias": False}, ["attention_bias=false", "experts have biases"]),
        ("gpt_oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0", "7"]),
        ("gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha=1.0", "1.702"]),
        ("gpt_oss", {"num_experts_per_tok": 1}, ["num_experts_per_tok=1", "normalised"]),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, ["layer_types", "full_attention"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv=8.0"]),
        ("qwen3_moe", {"num_experts_per_tok": 5}, ["num_experts_per_tok=5", "4 experts"]),
        ("qwen3_moe", {"mlp_only_layers": "0"}, ["mlp_only_layers", "list"]),
        ("gemma3_text", {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
            ["rope_parameters.sliding_attention.rope_type", "yarn"],
        ),
        ("glm4", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5", "at most 1"]),
        ("glm4", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type", "every dimension"]),
        ("glm4_moe", {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, ["longrope", "act on short sequences too"]),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, ["no_rope_layers=[1, 0, 2, 1]", "list of 4"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers=[1, 0]", "list of 4"]),
        ("mistral", {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, ["rope_scaling.llama_4_scaling_beta=0.1"]),
        ("glm4_moe_lite", {"first_k_dense_replace": 1}, ["first_k_dense_replace=1", "without experts are 0, 2"]),
        ("hy_v3", {"qk_norm": False}, ["qk_norm=false"]),
        ("minimax_m2", {"rotary_dim": 6}, ["rotary_dim=6", "partial_rotary_factor=6/16"]),
        ("dots1", {"norm_topk_prob": None}, ["norm_topk_prob=null", "normalises"]),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, ["moe_layer_interval=2", "SGLang"]),
        ("ernie4_5_moe", {"moe_k": 9}, ["moe_k=9", "8 experts"]),
        ("arcee", {"hidden_act": "silu"}, ["hidden_act", "relu2"]),
        ("qwen3", {"use_rope": False}, ["use_rope=false", "not a known key", "qwen3"]),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
        ("qwen3", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, ["rope_scaling.mrope_section"]),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.0}}, ["attention_factor=1.0"]),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "scale": 1}}, ["rope_scaling.scale=1"]),
        (
            "qwen3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}},
            ["rope_scaling", "rope_parameters says otherwise"],
        ),
    ],
)
def test_refusals_name_field_value_and_reason(base: Any, change: dict[str, Any], words: list[str]) -> None:
    """One problem with its file: a key that is wrong, or an architecture that Megatron-Core lacks."""
    with pytest.raises(UserError) as caught:
        parse_hf_config((base if isinstance(base, dict) else TINY[base]) | change, where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json")
    for word in words:
        assert word in str(caught.value)
    assert len(getattr(caught.value, "problems", [1])) == 1


def test_gated_delta_nets_are_every_layer_but_each_fourth() -> None:
    """Without `layer_types`; rotation covers a quarter of a head, and a text's positions are the same on all axes."""
    raw = {key: value for key, value in TINY["qwen3_5_text"].items() if key not in ("layer_types", "rope_theta")}
    raw["rope_parameters"] = {"rope_theta": 1e7, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = parse_hf_config(raw)
    assert config.delta is not None
    assert config.delta.layers == (True, True, True, False)
    assert (config.rope.percent, config.attention_gate, config.zero_centered_norm) == (0.25, True, True)


@pytest.mark.parametrize(("family", "interleaved"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_indexers_choose_as_the_config_says(family: str, interleaved: bool) -> None:
    """Number of tokens and rotation reach Megatron-Core; a rotation that transformers does not compute is refused."""
    config = parse_hf_config({key: value for key, value in TINY[family].items() if key != "indexer_rope_interleave"})
    kwargs = transformer_config_kwargs(config)
    assert (kwargs["dsa_indexer_topk"], kwargs["dsa_indexer_rope_interleaved"]) == (6, interleaved)
    assert parse_hf_config({**TINY[family], "layer_types": ["indexed_attention"] * 4}).mla == config.mla  # 5.24's name
    changes = {"indexer_rope_interleave": not interleaved, "q_lora_rank": None, "layer_types": ["full_attention"] * 4}
    if family == "glm_moe_dsa":
        changes |= {"indexer_types": ["full", "shared"] * 2, "index_topk_freq": 2}
    for name, value in changes.items():
        with pytest.raises(UserError, match=name):
            parse_hf_config({**TINY[family], name: value})
    assert check_layout(config, ParallelLayout(world_size=2, cp=2)) == [
        "cp=2: context parallelism does not cut top-k indexers yet; set it to 1"
    ]


@pytest.mark.parametrize(
    ("installed", "refused"), [("0.16.1", True), ("0.18.2", True), ("0.19.0", False), (None, True)]
)
def test_gated_delta_nets_need_a_new_megatron(
    installed: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_rl.converters.hf.config.installed_version", lambda name: installed)
    problems = list(release_problems("qwen3_next"))
    assert len(problems) == refused
    assert all("needs megatron-core 0.19 or newer, which has its layers" in line for line in problems)
    assert list(release_problems("qwen3")) == []


@pytest.mark.parametrize(
    ("base", "change", "value", "wrong"),
    [
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads=0: ", "=1"),
        ("qwen3", {"head_dim": 0}, "head_dim=0: ", "head_dim=1:"),
        ("qwen3_moe", {"num_experts": 10**9}, "num_experts=1000000000: ", "there are 1"),
        ("deepseek_v3", {"n_routed_experts": 10**9}, "n_routed_experts=1000000000: ", "there are 1"),
    ],
)
def test_a_refused_size_is_named_by_its_own_number(base: str, change: dict[str, Any], value: str, wrong: str) -> None:
    with pytest.raises(UserErrors) as caught:
        parse_hf_config(TINY[base] | change)
    assert value in str(caught.value)
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("off", [{"use_sliding_window": False, "sliding_window": 4}, {"sliding_window": None}])
def test_windows_that_another_key_takes_away_are_refused(off: dict[str, Any]) -> None:
    kinds = ["sliding_attention"] + ["full_attention"] * (QWEN2["num_hidden_layers"] - 1)
    with pytest.raises(UserErrors, match=r"layer_types=.*takes away the windows.*correct one of the two"):
        parse_hf_config(QWEN2 | {"use_sliding_window": True, "max_window_layers": 2, "layer_types": kinds} | off)


def test_a_key_of_yarn_that_transformers_drops_has_a_remedy() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.87}
    with pytest.raises(UserErrors, match=r"attn_factor=0\.87: not a setting .*; remove it if rope_type=yarn"):
        parse_hf_config(QWEN2 | {"rope_scaling": yarn})


# Values that no key can have, or that few can.
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 1 << 31, 1 << 62, -(1 << 70), 10**5000, 0.0, -0.5, 0.3, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "2", "yarn", "sliding_attention", "\udc80", "x" * 5000, [], [1],
    [[]], [None], ["full_attention"], {}, {"rope_type": "yarn"}, {"a": {"b": []}}, [True] * 4, {"full_attention": 3},
]  # fmt: skip
NESTED = ("rope_scaling", "rope_parameters", "quantization_config", "auto_map", "text_config")
ROPE_KEYS = ("rope_type", "type", "factor", "mscale", "mscale_all_dim", "beta_fast", "truncate", "rope_theta")


def mutant(draw: random.Random) -> dict[str, Any]:
    """A config of some family with one or two keys changed, added or gone, those inside of objects too."""
    name = draw.choice(sorted(TINY))
    raw: dict[str, Any] = deepcopy(TINY[name])
    keys = sorted({*raw, *FAMILIES[raw["model_type"]].defaults, *NESTED, "head_dim", "pad_token_id", "unheard_of"})
    for _ in range(draw.randint(1, 2)):
        key = draw.choice(keys)
        if key in NESTED and draw.random() < 0.7:
            inner = raw.get(key)
            inner = inner if isinstance(inner, dict) else {"rope_type": draw.choice(["yarn", "linear", "llama3"])}
            raw[key] = inner | {draw.choice(ROPE_KEYS): draw.choice(JUNK)}
        elif draw.random() < 0.2:
            raw.pop(key, None)
        else:
            raw[key] = draw.choice(JUNK)
    return raw


@pytest.mark.parametrize("seed", range(8))
def test_damaged_configs_never_raise_anything_else(seed: int) -> None:
    draw = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(250):
        raw = mutant(draw)
        try:
            hf = parse_hf_config(raw)
        except UserError as error:
            outcomes["refused"] += 1
            longest = max(map(len, str(error).splitlines()))
        else:
            outcomes["read"] += 1
            longest = 0
            assert hf.dims.keys() >= {"hidden", "q", "o"}
            assert 1 <= hf.num_layers <= 4096
        assert longest < 800  # the list of families
    # Both happen, so the mutants are neither harmless nor all broken at the first key.
    assert min(outcomes.values()) >= 10, outcomes


def test_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_hf_config(str(tmp_path)) == parse_hf_config(QWEN2)
