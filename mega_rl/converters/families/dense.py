"""Dense decoders with grouped-query attention: Llama and its descendants."""

from __future__ import annotations

from mega_rl.converters.families.base import Family
from mega_rl.converters.rules import copy, gated, in_layers, qkv, row, vocab

EMBEDDING = (vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),)

ATTENTION = in_layers(
    copy(
        "input_layernorm.weight",
        "input_layernorm.weight",
        "hidden",
        te="self_attention.linear_qkv.layer_norm_weight",
    ),
    qkv("self_attention.linear_qkv.weight", "self_attn.{part}_proj.weight", "hidden"),
    qkv("self_attention.linear_qkv.bias", "self_attn.{part}_proj.bias", when=["qkv_bias"]),
    copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim", when=["qk_norm"]),
    copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim", when=["qk_norm"]),
    row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "o"),
    copy("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden", when=["linear_bias"]),
)

MLP = in_layers(
    copy(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        "hidden",
        te="mlp.linear_fc1.layer_norm_weight",
        when=["dense"],
    ),
    gated("mlp.linear_fc1.weight", "mlp.{part}_proj.weight", "ffn", "hidden", when=["dense"]),
    gated("mlp.linear_fc1.bias", "mlp.{part}_proj.bias", "ffn", when=["dense", "linear_bias"]),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn", when=["dense"]),
    copy("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", when=["dense", "linear_bias"]),
)

OUTPUT = (
    copy("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    vocab("output_layer.weight", "lm_head.weight"),
)

DENSE = EMBEDDING + ATTENTION + MLP + OUTPUT

QWEN2 = Family("qwen2", DENSE, qkv_bias=True, sliding_window=True)
QWEN3 = Family("qwen3", DENSE, qk_norm=True, bias_fields=("attention_bias",), head_dim=128, sliding_window=True)
LLAMA = Family("llama", DENSE, bias_fields=("attention_bias", "mlp_bias"))
