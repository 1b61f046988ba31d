"""Random Hugging Face checkpoints of every family, written without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Head
from mega_rl.converters.safetensors.writer import CheckpointWriter, TensorSpec
from mega_rl.parallel.layout import ParallelLayout
from tests.unit_tests.converters.tiny_configs import TINY

# name -> what it takes to store; the vocabulary of 99 rows is padded under tp=2.
DENSE_LAYOUTS = {
    "1": ParallelLayout(),
    "tp2": ParallelLayout(world_size=2, tp=2),
    "pp2": ParallelLayout(world_size=2, pp=2),
    "tp2-pp2": ParallelLayout(world_size=4, tp=2, pp=2),
    "pp2-vpp2": ParallelLayout(world_size=2, pp=2, vpp=2),
    "uneven": ParallelLayout(world_size=4, tp=2, pp=2, pipeline=(3, 1)),
    "uneven-vpp": ParallelLayout(world_size=2, pp=2, vpp=2, pipeline=(0, 2, 1, 1)),
}
MOE_LAYOUTS = {
    "ep2": ParallelLayout(world_size=2, ep=2),
    "ep4-pp2": ParallelLayout(world_size=8, ep=4, pp=2),
    "ep2-tp2": ParallelLayout(world_size=4, tp=2, ep=2),
    "ep2-etp2": ParallelLayout(world_size=4, tp=2, ep=2, etp=2),
}


def layouts_of(family: str) -> dict[str, ParallelLayout]:
    """The layouts on which a family of TINY can be stored."""
    hf = parse_hf_config(TINY[family])
    if hf.moe is None:
        return DENSE_LAYOUTS
    return DENSE_LAYOUTS | {
        name: layout for name, layout in MOE_LAYOUTS.items() if not hf.linear_bias or layout.etp == 1
    }


def write_random(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head: Head = "lm",
    fused_experts: bool | None = None,
    shard_bytes: int = 60_000,
    seed: int = 0,
    left_out: Iterable[str] = (),
    **overrides: Any,
) -> Path:
    """A checkpoint of `TINY[family]` with prediction layers, tokenizer and templates; every element is random.

    `left_out` names tensors that it lacks.
    """
    folder.mkdir(parents=True)
    config = TINY[family] | overrides
    # Bytes that no library would write: any rewriting of the file shows.
    text = json.dumps(config, indent=3).replace("{\n", "{\n\n", 1) + "\n\n"
    (folder / "config.json").write_text(text)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(json.dumps({"of": name}))
    hf = parse_hf_config(config)
    state = random_state(hf, dtype=dtype, head=head, fused_experts=fused_experts, seed=seed)
    for name in left_out:
        del state[name]
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]
    with CheckpointWriter(folder, specs, shard_bytes=shard_bytes) as writer:
        for name, tensor in state.items():
            writer.write(name, tensor)
    return folder


def random_state(
    hf: HFConfig, *, dtype: torch.dtype, head: Head, fused_experts: bool | None, seed: int
) -> dict[str, Tensor]:
    """Every tensor of a model by name on disk."""
    fused = hf.fused_experts if fused_experts is None else fused_experts
    hf = replace(hf, mtp="load", fused_experts=fused)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(torch.float32 if tensor.float32 else dtype)
        for name, tensor in hf_tensors(hf, head=head).items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
