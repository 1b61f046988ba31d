"""Tiny Hugging Face checkpoints and batches for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mega_rl.converters.families import FAMILIES
from mega_rl.types import Experience, response_mask

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-3,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
SIGMOID = {**ROUTED, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LITE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CHOSEN = {"num_experts": 8, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 6}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
# The test data of every family: what its tiny config has beside `SMALL`.
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "apertus": {},
    "arcee": {"head_dim": 16, "mlp_bias": True, "attention_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": None},
    "qwen2_moe": {**QWEN_MOE, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**QWEN_MOE, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "deepseek_v2": {**LATENT, **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**LATENT, **SIGMOID, **GROUPS},
    "kimi_k2": {**LATENT, **SIGMOID, "n_group": 1, "topk_group": 1},
    "mistral4": {
        **LATENT,
        **ROUTED,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {**GROWING},
    },
    "deepseek_v32": {**LATENT, **SIGMOID, **GROUPS, **CHOSEN},
    "glm_moe_dsa": {**LATENT, **SIGMOID, **CHOSEN, "num_experts_per_tok": 4, "indexer_rope_interleave": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "glm4_moe": {**SIGMOID, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_norm_min": 0.4,
    },
    "glm4_moe_lite": {**LATENT, **LITE, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "dots1": {**SIGMOID, "head_dim": 16, "norm_topk_prob": True, "n_shared_experts": 2},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "hy_v3": {**LITE, "head_dim": 16, "num_experts": 8, "num_shared_experts": 2, "router_scaling_factor": 1.5},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_next": {**QWEN_MOE, **DELTA, "shared_expert_intermediate_size": 40},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**QWEN_MOE, **DELTA, "shared_expert_intermediate_size": 40},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8},
    "smollm3": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "ministral3": {"head_dim": 16, "rope_parameters": {**GROWING}},
}


def write_tiny_checkpoint(
    directory: Path,
    *,
    family: str = "qwen3",
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    mtp_layers: int = 0,
    **overrides: Any,
) -> Path:
    """A random checkpoint as transformers writes it: 4 layers, hidden 32, 4 heads, vocabulary 50 (see `TINY`).

    Weights are five times a real initialisation, so that wrong layouts change log-probs by much more than rounding.
    Routers are larger still: their choices are far apart. Norms, biases, sinks and the experts' corrections are none
    of them at their neutral value. `mtp_layers` adds multi-token prediction layers, which transformers does not read.
    """
    from transformers import AutoModelForCausalLM

    from mega_rl.converters.hf.untabled import config_of

    settings = {**SMALL, "tie_word_embeddings": tied, **TINY[family], **overrides}
    torch.manual_seed(seed)
    config = config_of(settings | {"model_type": FAMILIES[family].transformers_type})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif name.endswith(("bias", "_bias")):
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif name.endswith(("sinks", "mlp.gate.weight", "router.weight")):
                tensor.copy_(torch.randn_like(tensor))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.to(dtype)
    for name, buffer in kept.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias.data = buffer  # stays float32
    model.save_pretrained(directory)
    if FAMILIES[family].stand_in:
        _edit_config(directory, model_type=family, auto_map={"AutoModelForCausalLM": "modeling_deepseek.Model"})
    if mtp_layers:
        _add_mtp_layers(directory, family=family, first=config.num_hidden_layers, count=mtp_layers)
    return directory


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}, indent=2), encoding="utf-8")


def _add_mtp_layers(directory: Path, *, family: str, first: int, count: int) -> None:
    """Multi-token prediction layers as DeepSeek and GLM store them: like the last layer, with what joins its inputs."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    hidden = tensors["model.norm.weight"].numel()
    last = f"model.layers.{first - 1}."
    shapes = {name.removeprefix(last): tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    final = "final_layernorm.weight" if family == "hy_v3" else "shared_head.norm.weight"
    shapes |= {name: (hidden,) for name in ("enorm.weight", "hnorm.weight", final)}
    shapes |= {"eh_proj.weight": (hidden, 2 * hidden)}
    dtypes = {name: tensors[last + name].dtype for name in shapes if last + name in tensors}
    usual = tensors["model.norm.weight"].dtype
    for layer in range(first, first + count):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}"] = (0.1 * torch.randn(shape)).to(dtypes.get(name, usual))
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        if "lm_head.weight" in tensors:
            tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    _edit_config(directory, num_nextn_predict_layers=count)


@torch.no_grad()
def hf_logits(path: Path, tokens: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [B, S, V] float32 of transformers' own model."""
    from mega_rl.verify.twin import load_transformers

    logits: torch.Tensor = load_transformers(path, dtype)(tokens, use_cache=False).logits
    return logits.float()


def random_experience(
    *, num_prompts: int = 4, samples: int = 2, vocab_size: int = 50, longest: int = 24, seed: int = 0
) -> Experience:
    """Rows of different lengths with random tokens, advantages and old log-probs; weights of a token mean."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_prompts * samples

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, longest, generator=generator)

    lengths = torch.randint(6, longest + 1, (rows,), generator=generator)
    prompt_lengths = torch.randint(2, 5, (rows,), generator=generator)
    mask = response_mask(prompt_lengths, lengths, width=longest)
    inside = torch.arange(longest) < lengths[:, None]
    tokens = torch.randint(2, vocab_size, (rows, longest), generator=generator) * inside
    weights = mask.float() / mask.sum()
    return Experience.from_rows(
        tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        prompt_index=torch.arange(num_prompts).repeat_interleave(samples),
        sample_index=torch.arange(samples).repeat(num_prompts),
        rollout_logprobs=(normal(0.3) - 3) * mask,
        old_logprobs=(normal(0.3) - 3) * mask,
        ref_logprobs=(normal(0.3) - 3) * mask,
        values=normal(0.5) * mask,
        advantages=normal(1.0) * mask,
        returns=normal(1.0) * mask,
        loss_weights=weights,
        token_weights=weights,
    )


def write_digit_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """A character tokenizer of digits, letters and a few signs: id 0 pads, id 1 ends a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *"0123456789+-=*. abcdefghijklmnopqrstuvwxyz"]
    names += [f"<{number}>" for number in range(len(names), vocab_size)]
    assert len(names) == vocab_size
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
