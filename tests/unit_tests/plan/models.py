"""Real models by the sizes in their config.json, and results of live engines for the comparison with a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from tests.helpers.distributed import run_ranks

QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "hidden_act": "silu", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False},
}
QWEN3_235B_A22B: dict[str, Any] = {
    **{**QWEN3, "model_type": "qwen3_moe", "num_attention_heads": 64, "num_key_value_heads": 4},
    **{"num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}


def hf_config(**sizes: Any) -> HFConfig:
    """Return Qwen3-8B with other sizes."""
    return parse_hf_config({**QWEN3, **sizes}, where="config.json")


QWEN3_8B = hf_config()
QWEN3_0_6B = hf_config(
    hidden_size=1024, num_attention_heads=16, intermediate_size=3072, num_hidden_layers=28, tie_word_embeddings=True
)
QWEN3_32B = hf_config(hidden_size=5120, num_attention_heads=64, intermediate_size=25600, num_hidden_layers=64)
QWEN3_235B = parse_hf_config(QWEN3_235B_A22B, where="config.json")

Cases = Mapping[str, tuple[int, str, dict[str, Any]]]  # name -> (world size, family, case)


def run_live(cases: Cases, checkpoints: Mapping[str, Path], run_cases: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the result of every case by rank, with one launch for each world size."""
    results: dict[str, list[Any]] = {}
    for world_size in {size for size, _, _ in cases.values()}:
        own = {
            name: (str(checkpoints[family]), case) for name, (size, family, case) in cases.items() if size == world_size
        }
        by_rank = run_ranks(world_size, run_cases, own, timeout_s=300)
        results |= {name: [rank[name] for rank in by_rank] for name in own}
    return results
