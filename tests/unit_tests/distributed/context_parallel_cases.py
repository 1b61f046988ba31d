"""What each rank does in test_context_parallel.py: one launch goes through attention alone and whole engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema import OptimConfig
from mega_rl.types import Experience
from tests.helpers.engines import exported, exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.engine_cases import losses

# Adam of a large eps: a small gradient makes a small step, so rounding of gradients stays rounding of weights.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, clip_grad=1.0)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 128,
}
# name -> (family, settings of its tiny checkpoint)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {}),
    "llama3": ("llama", {"tied": False, "rope_parameters": LLAMA3}),
    "qwen2-window": (
        "qwen2",
        {"tied": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "gemma3": ("gemma3_text", {}),
    "gpt_oss": ("gpt_oss", {"tied": False}),
    "deepseek_v3": ("deepseek_v3", {"tied": False}),
    "deepseek_v3-yarn": ("deepseek_v3", {"tied": False, "rope_parameters": {**YARN, "mscale": 1.0}}),
    "mixtral": ("mixtral", {"tied": False}),
}
# name -> (world size, parallel settings, models)
PAIRS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "1": (1, {}, tuple(MODELS)),
    "cp2": (2, {"cp": 2}, tuple(MODELS)),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}, ("mixtral", "deepseek_v3")),
    "cp4": (4, {"cp": 4}, ("qwen3-tied", "qwen2-window", "gpt_oss", "deepseek_v3-yarn")),
    "tp2-sp-cp2": (4, {"tp": 2, "sequence_parallel": True, "cp": 2}, ("qwen3-tied", "llama3", "deepseek_v3")),
    "pp2-cp2": (4, {"pp": 2, "cp": 2}, ("gemma3", "mixtral")),
    "pp2-vpp2-cp2": (4, {"pp": 2, "vpp": 2, "overlap_p2p": True, "cp": 2}, ("gemma3",)),
    "cp2-dp2": (4, {"cp": 2}, ("llama3",)),
}

if not FULL:  # each model once or twice, each layout of four ranks with one
    PAIRS |= {
        "cp2": (2, {"cp": 2}, ("qwen3-tied", "qwen2-window", "deepseek_v3-yarn")),
        "cp4": (4, {"cp": 4}, ("gpt_oss",)),
        "tp2-sp-cp2": (4, {"tp": 2, "sequence_parallel": True, "cp": 2}, ("deepseek_v3",)),
        "cp2-dp2": (4, {"cp": 2}, ()),  # test_layouts.py and "cp2"
        "pp2-cp2": (4, {"pp": 2, "cp": 2}, ()),  # "pp2-vpp2-cp2" has its stages
    }


def write_models(root: Path) -> None:
    """Every checkpoint."""
    for name, (family, settings) in MODELS.items():
        write_tiny_checkpoint(root / name, family=family, **settings)


def run_model(path: Path, parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Log-probs, loss, gradient norm and gradients, packed and padded; weights before and after two steps; inspection.

    The first step has length zero, so that the second one has the same gradients.
    Data-parallel rank 0 has all rows but one, so that the other one runs empty micro-batches.
    """
    config = replaced(make_config(path), "engine.megatron", **parallel)
    config = replaced(config, "optim", **vars(OPTIM))
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "trainer.microbatch", max_tokens=72)
    config = replaced(config, "model", **model)
    loss = losses("lm")
    result: dict[str, Any] = {}
    with running_engine(config) as engine:
        batch = uneven_rows(random_experience(), engine)
        result["start"] = exported(engine)
        for form, lr in (("packed", 0.0), ("padded", OPTIM.lr)):
            engine.batching = dataclasses.replace(engine.batching, packing=form == "packed", micro_batch_size=5)
            outputs = engine.forward(batch, with_entropy=True)
            seen: list[torch.Tensor] = []

            def inspect(minibatch: Experience, said: Any, seen: list[torch.Tensor] = seen) -> dict[str, float]:
                seen.append(said.logprobs)
                return {"inspected": 1.0}

            metrics = engine.train_minibatch(batch, loss, lr=lr, inspect=inspect)
            result[form] = {
                "logprobs": _whole(outputs.logprobs, engine),
                "entropy": _whole(outputs.entropy, engine),
                "inspected": _whole(seen[0], engine),
                "metrics": metrics,
                "gradients": exported_gradients(engine),
            }
        result["weights"] = exported(engine)
    return result


def uneven_rows(batch: Experience, engine: Any) -> Experience:
    """This data-parallel rank's rows: all but one for rank 0 of two."""
    if engine.data_parallel.size == 1:
        return own_rows(batch, engine)
    return batch[:7] if engine.data_parallel.rank == 0 else batch[7:]


def _whole(rows: torch.Tensor, engine: Any) -> torch.Tensor:
    """All data-parallel ranks' rows."""
    if engine.data_parallel.size == 1:
        return rows
    full = torch.zeros(8, rows.size(1))
    full[slice(0, 7) if engine.data_parallel.rank == 0 else slice(7, 8)] = rows
    return engine.data_parallel.sum(full)


def run_rank(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """What this rank finds of attention ("attention") and, if first or last, of engines ("model layout")."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from tests.unit_tests.distributed.shared_attention_cases import shared_attention

    actual: dict[str, Any] = {}
    if world_size > 1:
        from mega_rl.parallel import groups as process_groups
        from mega_rl.parallel.layout import ParallelLayout

        layout = ParallelLayout(world_size=world_size, cp=world_size)
        groups = process_groups.initialize(layout, accelerator=accelerator, timeout_s=60.0)
        actual["attention"] = shared_attention(groups.collection)
        process_groups.destroy()
    for layout_name, (size, parallel, models) in PAIRS.items():
        if size != world_size:
            continue
        for name in models:
            actual[f"{name} {layout_name}"] = run_model(Path(root) / name, parallel)
    if world_size == 2:
        recompute = {"recompute": "selective", "recompute_modules": ("core_attn",)}
        actual["gemma3 cp2 recomputed"] = run_model(Path(root) / "gemma3", {"cp": 2}, **recompute)
    return actual if rank in (0, world_size - 1) else {"attention": actual["attention"]}
