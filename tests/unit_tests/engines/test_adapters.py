"""Adapters compute what merged weights compute, and their gradients are those of the merged weights, projected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.config.schema import MegatronOptimizerConfig
from mega_rl.config.schema.training import AdapterConfig
from mega_rl.engines.fsdp_model import sharded_parameters
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import (
    LAYOUTS,
    exported,
    exported_gradients,
    load_state,
    make_config,
    own_rows,
    replaced,
    running_engine,
    save_state,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses, whole

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # family, targets
    "dense": ("qwen3", ALL),
    "queries and values": ("qwen3", ("q_proj", "v_proj")),
    "joined": ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "mixture": ("qwen3_moe", ALL),
    "latent": ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj")),
}
TOLERANCE = 3e-5  # relative, float32: sums in another order give 1e-6, and 1e-5 in experts with few tokens


def write_pair(folder: Path, family: str, targets: tuple[str, ...]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a checkpoint with adapters and one with merged weights; return each module's (A, B)."""
    write_tiny_checkpoint(folder / "merged", family=family)
    write_tiny_checkpoint(folder / "adapted", family=family)
    weights = load_file(folder / "merged" / "model.safetensors")
    adapters, generator = {}, torch.Generator().manual_seed(3)
    for name in [name for name in weights if re.search(rf"\.({'|'.join(targets)})\.weight$", name)]:
        rows, columns = weights[name].shape
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
        adapters[name.removesuffix(".weight")] = a, b
        weights[name] = weights[name] + SCALE * b @ a
    save_file(weights, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    write_tiny_checkpoint(folder / "base", family=family)
    base = load_file(folder / "base" / "model.safetensors")
    parts = {f"{m}.lora_{end}.weight": part for m, (a, b) in adapters.items() for end, part in (("A", a), ("B", b))}
    save_file(base | parts, folder / "adapted" / "model.safetensors", metadata={"format": "pt"})
    return adapters


def compute(rank: int, checkpoint: str, layout: str, targets: tuple[str, ...]) -> dict[str, Any]:
    """Return log-probs and gradients of one step of length zero; targets: none for a model without adapters."""
    engine_name = "fsdp" if layout.startswith("fsdp") else "megatron"
    config = make_config(
        Path(checkpoint),
        layout="1" if engine_name == "fsdp" else layout,
        engine=engine_name,
        optimizer=MegatronOptimizerConfig(distributed=False),
    )
    config = replaced(config, "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron", etp=1)
    if targets:
        config = replaced(config, "model", adapter=AdapterConfig(RANK, ALPHA, list(targets)))
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        logprobs = whole(engine.forward(rows).logprobs, engine)
        base = whole(engine.forward_base(rows).logprobs, engine)
        metrics = engine.train_minibatch(rows, losses("lm"), lr=0.0)
        read = fsdp_gradients if engine_name == "fsdp" else exported_gradients
        return {"logprobs": logprobs, "base": base, "norm": metrics["grad_norm"], "gradients": read(engine)}


def fsdp_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of adapters by their names on disk."""
    return {
        name.replace(".adapter.a", ".lora_A.weight").replace(".adapter.b", ".lora_B.weight"): p.grad.full_tensor()
        for name, p in sharded_parameters(engine.model).items()
        if p.grad is not None
    }


@pytest.mark.parametrize("case", CASES)
def test_adapters_equal_merged_weights_on_every_layout(case: str, tmp_path: Path) -> None:
    """With W' = W + s B A: dA = s B^T dW' and dB = s dW' A^T."""
    family, targets = CASES[case]
    adapters = write_pair(tmp_path, family, targets)
    judge, base = (run_ranks(1, compute, str(tmp_path / name), "1", ())[0] for name in ("merged", "base"))
    expected = {}
    for module, (a, b) in adapters.items():
        of_weight = judge["gradients"][f"{module}.weight"].double()
        expected[f"{module}.lora_A.weight"] = SCALE * b.double().T @ of_weight
        expected[f"{module}.lora_B.weight"] = SCALE * of_weight @ a.double().T
    norm = torch.stack([one.square().sum() for one in expected.values()]).sum().sqrt()
    for layout in ("1", "tp2-sp", "tp2", "pp2", "tp2-sp-pp2", "fsdp2"):
        if layout in ("tp2", "fsdp2") and case in ("mixture", "latent"):
            continue  # needs sequence parallelism; experts are no linear layers in transformers
        got = run_ranks(
            {"fsdp2": 2}.get(layout) or LAYOUTS[layout][0], compute, str(tmp_path / "adapted"), layout, targets
        )[0]
        for name, one in (("logprobs", judge), ("base", base)):
            torch.testing.assert_close(got[name], one["logprobs"], atol=2e-5, rtol=0, msg=f"{layout} {name}")
        for name, one in expected.items():
            far = (got["gradients"][name].double() - one).norm() / one.norm().clamp(min=1e-9)
            assert far < TOLERANCE, f"{layout}: {name} is off by {far:.1e}"
        assert got["norm"] == pytest.approx(float(norm), rel=TOLERANCE), layout


def steps(rank: int, checkpoint: str, layout: str, folder: str, resumes: bool) -> dict[str, Any]:
    """Return merged weights and adapters after two steps, the second resumed from a checkpoint where asked."""
    name = "fsdp" if layout.startswith("fsdp") else "megatron"
    config = make_config(Path(checkpoint), layout="1" if name == "fsdp" else layout, engine=name)
    config = replaced(config, "model", adapter=AdapterConfig(RANK, ALPHA, list(ALL)))
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        if resumes:
            load_state(engine, Path(folder))
        else:
            engine.train_minibatch(rows, losses("lm"), lr=1e-2)
            save_state(engine, Path(folder))
        engine.train_minibatch(rows, losses("lm"), lr=1e-2)
        parts = {name: tensor.detach().cpu().clone() for name, tensor in engine.export_parts()}
        return {"parts": parts, "merged": exported(engine)}


@pytest.mark.parametrize(("layout", "other"), [("tp2-sp", "pp2"), ("fsdp2", "fsdp1")])
def test_adapters_resume_on_another_layout(layout: str, other: str, tmp_path: Path) -> None:
    """The base stays as it is, byte for byte; merged weights are W + s B A."""
    write_tiny_checkpoint(tmp_path / "base")
    ranks = {"fsdp1": 1}
    first = run_ranks(ranks.get(layout, 2), steps, str(tmp_path / "base"), layout, str(tmp_path / "run"), False)[0]
    same = run_ranks(ranks.get(layout, 2), steps, str(tmp_path / "base"), layout, str(tmp_path / "run"), True)[0]
    moved = run_ranks(ranks.get(other, 2), steps, str(tmp_path / "base"), other, str(tmp_path / "run"), True)[0]
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, tensor in first["parts"].items():
        assert torch.equal(tensor, same["parts"][name]), name
        torch.testing.assert_close(tensor, moved["parts"][name], rtol=1e-3, atol=1e-4)
        if "lora" not in name:
            assert torch.equal(tensor, base[name]), name
    module = "model.layers.1.self_attn.k_proj"
    a, b = (first["parts"][f"{module}.lora_{end}.weight"] for end in "AB")
    assert b.any()
    assert torch.equal(first["merged"][f"{module}.weight"], base[f"{module}.weight"] + SCALE * (b @ a))
