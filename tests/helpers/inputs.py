"""Files that a run reads, as small as they can be and still pass for the real thing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QWEN3 = {  # of the published config.json files
    "0.6b": (28, 1024, 16, 8, 3072),
    "8b": (36, 4096, 32, 8, 12288),
    "32b": (64, 5120, 64, 8, 25600),
    "30b-a3b": (48, 2048, 32, 4, 6144),
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def qwen3_config(size: str = "0.6b", **changes: Any) -> dict[str, Any]:
    """config.json of Qwen3-0.6B, 8B, 32B or 30B-A3B."""
    layers, hidden, heads, kv_heads, ffn = QWEN3[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": size == "0.6b",
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        **(EXPERTS if size == "30b-a3b" else {}),
        **changes,
    }


SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "max_position_embeddings": 8192,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}  # fmt: skip


def published_config(path: str) -> dict[str, Any]:
    """config.json of a model of the Hub that a recipe names."""
    qwen3 = path.removeprefix("Qwen/Qwen3-").removesuffix("-Base").lower()
    return SMOLLM2 if "SmolLM2" in path else qwen3_config(qwen3)


def write_shard(path: Path, tensors: Sequence[str] = ("weight",)) -> Path:
    """A safetensors file of one float per name."""
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * len(tensors)))
    return path


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """A checkpoint directory with this config.json; its weights and tokenizer have the form and not the content."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_shard(directory / "model.safetensors")
    tokenizer = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages }}{{ enable_thinking }}"})
    )
    return directory


def write_prompts(path: Path, rows: int = 4) -> Path:
    """A JSONL file of prompts and answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(rows)))
    return path
