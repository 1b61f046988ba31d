"""Small random models of any class of transformers, for proofs at the start of a run.

Widths shrink, and of the layers stay those that differ. Windows and chunks become shorter than the rows of a proof, so
that what reaches across sequences shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

HIDDEN, HEADS, HEAD_DIM, VOCAB = 64, 4, 16, 128
_SIZES = {
    HIDDEN: "hidden_size n_embd d_model word_embed_proj_dim embedding_dim emb_dim lru_width",
    # Heads, experts, and windows shorter than a proof's rows.
    HEADS: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads swa_num_attention_heads n_mamba_heads "
    "sliding_window attention_chunk_size attention_window_size window_size local_attention index_topk",
    HEAD_DIM: "head_dim kv_channels v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim global_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state state_size ssm_state_size swa_head_dim "
    "hidden_size_per_layer_input index_n_heads",  # fewer heads are often all 0 after ReLU: top-k would meet ties
    96: "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim ffn_hidden_size n_inner "
    "shared_intermediate_size dense_intermediate_size expert_ffn_hidden_size intermediate_size_mlp block_ff_dim "
    "moe_shared_expert_intermediate_size moe_latent_size",
    2: "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token linear_num_key_heads "
    "expert_layer_period attn_layer_period zero_expert_num hc_mult",
    1: "n_group topk_group n_groups mamba_n_groups first_k_dense_replace num_dense_layers attn_layer_offset "
    "num_shared_experts n_shared_experts num_fused_layers expert_layer_offset",
    32: "q_lora_rank kv_lora_rank qk_head_dim index_head_dim query_pre_attn_scalar attention_head_dim o_lora_rank",
    VOCAB: "vocab_size vocab_size_per_layer_input attention_hidden_size mamba_d_ssm d_inner",
    8: "mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank chunk_size mamba_chunk_size laurel_rank rotary_dim",
}
_KEYS = {name: size for size, names in _SIZES.items() for name in names.split()}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_PERIODS = (
    "full_attention_interval", "no_rope_layer_interval", "global_attn_every_n_layers", "sliding_window_pattern",
    "_sliding_window_pattern", "attn_layer_period", "expert_layer_period",
)  # fmt: skip
_SHARED = "num_kv_shared_layers"  # the last layers, which read keys and values of earlier ones
_NOT_ARGUMENTS = ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path")


def shrink(config: PreTrainedConfig, *, widths: bool = True) -> PreTrainedConfig:
    """Return a small config of the class, a layer of each kind; `widths`: small, too."""
    given = config.to_dict()
    changed = {name: value for name, value in given.items() if name not in _NOT_ARGUMENTS}
    depth = config.num_hidden_layers
    per_layer = {name: v for name, v in changed.items() if isinstance(v, list) and len(v) == depth}
    if per_layer:
        shared = [i >= depth - (changed.get(_SHARED) or 0) for i in range(depth)]
        chosen = _kinds(list(zip(*map(tuple, per_layer.values()), shared, strict=True)))
        changed |= {_SHARED: sum(shared[i] for i in chosen)} if any(shared) else {}
    else:
        periods = [changed[name] for name in _PERIODS if _is_size(changed.get(name))]
        chosen = list(range(min(depth, max([2, *periods]))))
    changed |= {name: [value[i] for i in chosen] for name, value in per_layer.items()}
    changed |= {name: len(chosen) for name in _DEPTHS if changed.get(name) == depth}
    if own := changed.get("per_layer_config"):  # sizes of single layers, from transformers 5.24
        changed["per_layer_config"] = {
            chosen.index(int(layer)): {name: _KEYS.get(name, size) if widths else size for name, size in sizes.items()}
            for layer, sizes in own.items()
            if int(layer) in chosen
        }
    if widths:
        changed |= {name: size for name, size in _KEYS.items() if _is_size(changed.get(name))}
        changed |= _related(given, changed)
    changed |= {name: _small_rope(value, changed) for name, value in changed.items() if name.startswith("rope_")}
    rotated, rest = (given.get(f"qk_{part}_head_dim") or 0 for part in ("rope", "nope"))
    if widths and rotated and given.get("head_dim") == rotated + rest:  # Mistral 4 rotates a share of each head
        changed["head_dim"] = 2 * HEAD_DIM
        changed["rope_parameters"]["partial_rotary_factor"] = 0.5
    for name, token in (("pad_token_id", None), ("bos_token_id", 1), ("eos_token_id", 2)):
        ids = changed.get(name) or 0
        if max(ids if isinstance(ids, list) else [ids]) >= (VOCAB if widths else config.vocab_size):
            changed[name] = token
    return type(config)(**changed)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _kinds(layers: list[tuple[Any, ...]]) -> list[int]:
    """Return the first layer of each kind, at least two layers, in order."""
    first = {repr(kind): number for number, kind in reversed(list(enumerate(layers)))}
    chosen = sorted(first.values())
    return chosen if len(chosen) > 1 else list(range(min(2, len(layers))))


def _related(given: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return sizes that follow from others."""
    heads = given.get("num_attention_heads", given.get("n_head", 1))
    sizes: dict[str, Any] = {}
    for name in _KV_HEADS:
        if _is_size(given.get(name)):
            sizes[name] = HEADS if given[name] == heads else min(2, given[name])
    if "expand" in given:  # Mamba's inner width
        inner = int(given["expand"] * HIDDEN)
        sizes |= {name: size for name, size in (("intermediate_size", inner), ("num_heads", 8)) if name in given}
    if changed.get("attention_hidden_size"):  # Zamba's attention reads two hidden states
        sizes["attention_hidden_size"] = 2 * HIDDEN
    return sizes


def _small_rope(value: Any, changed: dict[str, Any]) -> Any:
    """Return rotary settings with lists of factors cut to the small head."""
    if not isinstance(value, dict):
        return value
    if any(isinstance(inner, dict) for inner in value.values()):
        return {name: _small_rope(inner, changed) for name, inner in value.items()}
    share = value.get("partial_rotary_factor", changed.get("partial_rotary_factor")) or 1.0
    pairs = int(HEAD_DIM * share) // 2
    return {name: inner[:pairs] if isinstance(inner, list) else inner for name, inner in value.items()}


def random_model(config: PreTrainedConfig, *, attention: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with weights of a seed, whose layers all count.

    A class's own initial weights are so small that a leak between sequences would drown in rounding.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().to(device)


def random_rows(lengths: tuple[int, ...], *, device: torch.device) -> list[torch.Tensor]:
    """Return [n] int64 tokens of each length, special ones left out."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).to(device) for length in lengths]


def gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients, one after another, and forget them."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([part.flatten() for part in parts])
