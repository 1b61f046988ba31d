"""Sizes of a checkpoint's model that the rules between settings read. Imports no torch."""

from __future__ import annotations

from mega_rl.config.facts import ModelFacts
from mega_rl.converters.architecture import HFConfig


def facts_of(checkpoint: HFConfig) -> ModelFacts:
    """Return the sizes of a checkpoint's model that the rules between settings read."""
    moe = checkpoint.moe
    return ModelFacts(
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        num_kv_heads=checkpoint.num_kv_heads,
        ffn_hidden_size=checkpoint.ffn_hidden_size,
        vocab_size=checkpoint.vocab_size,
        max_position_embeddings=checkpoint.max_position_embeddings,
        multi_latent_attention=checkpoint.mla is not None,
        num_experts=0 if moe is None else moe.num_experts,
        expert_ffn_hidden_size=0 if moe is None else moe.ffn_hidden_size,
        expert_biases=moe is not None and checkpoint.linear_bias,
        shared_experts=moe is not None and moe.shared_ffn_hidden_size > 0,
    )
