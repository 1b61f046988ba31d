"""Muon's steps are torch's on the matrices of the checkpoint, bit for bit, on every layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config.schema import AdapterConfig, MegatronConfig, MegatronOptimizerConfig, OptimConfig
from mega_rl.config.schema.engine import TorchFsdpConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import (
    exported,
    load_state,
    make_config,
    own_rows,
    parts,
    replaced,
    running_engine,
    save_state,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses

OPTIM = OptimConfig(name="muon", lr=0.5, weight_decay=0.3, clip_grad=0.0)
RATES = [1e-2, 5e-3, 2e-3]
SP = {"tp": 2, "sequence_parallel": True}
WHOLE = MegatronOptimizerConfig(distributed=False)
CASES: dict[str, dict[str, Any]] = {
    "dp2": {"family": "qwen3"},
    "dp2, not sharded": {"family": "qwen3", "optimizer": WHOLE},
    "bf16": {"family": "qwen3", "dtype": "bf16"},
    "tp2": {"family": "qwen3", "megatron": MegatronConfig(tp=2)},
    "tp2-sp": {"family": "qwen3", "megatron": MegatronConfig(**SP)},
    "pp2": {"family": "qwen3", "megatron": MegatronConfig(pp=2)},
    "torch_fsdp2": {"family": "qwen3", "ddp": TorchFsdpConfig()},
    "fsdp2": {"family": "qwen3", "engine": "fsdp"},
    "latent tp2-sp-ep2": {"family": "deepseek_v3", "megatron": MegatronConfig(**SP, ep=2, etp=1)},
    "latent, not sharded": {"family": "deepseek_v3", "megatron": MegatronConfig(ep=2), "optimizer": WHOLE},
    "stacked ep2": {"family": "gpt_oss", "megatron": MegatronConfig(ep=2)},
    "stacked fsdp2": {"family": "gpt_oss", "engine": "fsdp"},
    "delta fsdp2": {"family": "qwen3_next", "engine": "fsdp"},
    "joined on disk": {"family": "phi3", "megatron": MegatronConfig(tp=2)},
    "adapters tp2": {"family": "qwen3", "megatron": MegatronConfig(tp=2), "adapter": 4},
    "adapters fsdp2": {"family": "qwen3", "engine": "fsdp", "adapter": 4},
}
# Groups of rows that take turns in a tensor on disk, and rows of each kind in a group.
JOINED = {
    "phi3": {"qkv_proj": [1, 32, 16, 16], "gate_up_proj": [1, 64, 64]},
    "qwen3_next": {"in_proj_qkvz": [2, 8, 8, 24, 24], "in_proj_ba": [2, 2, 2], "q_proj": [4, 16, 16]},
}
RESUMED = {"dp2": "pp2", "pp2": "tp2", "tp2": "torch_fsdp2", "torch_fsdp2": "dp2", "fsdp2": "fsdp2"}


def engine_of(root: Path, family: str, adapter: int = 0, **case: Any) -> Any:
    """An engine of this launch's ranks with Muon; adapter: rank; case: arguments of `make_config`."""
    config = make_config(root / family, optim=OPTIM, **case)
    return running_engine(replaced(config, "model", adapter=AdapterConfig(rank=adapter)))


def step(engine: Any, rate: float) -> None:
    """A step by the gradients w * w, whose bits do not depend on the layout."""
    if hasattr(engine, "chunks"):
        for chunk, model in zip(engine.chunks, engine.models, strict=True):
            chunk.zero_grad_buffer()
            for parameter in model.parameters():
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.copy_(parameter.detach().square())
                elif parameter.requires_grad:
                    parameter.grad = parameter.detach().square()
        engine._apply_gradients(rate, {})
        return
    for parameter in (each for each in engine.parameters if each.requires_grad):
        parameter.grad = parameter.detach().square()
    engine._apply_gradients(rate, {})


def run_cases(rank: int, root: str) -> dict[str, Any]:
    """Weights before and after three steps on each layout, the last one also from checkpoints of other layouts."""
    results = {}
    for name, case in CASES.items():
        with engine_of(Path(root), **case) as engine:
            start = parts(engine)
            for number, rate in enumerate(RATES):
                if number == len(RATES) - 1 and name in RESUMED:
                    save_state(engine, Path(root, "checkpoints", name))
                step(engine, rate)
            results[name] = {"start": start, "end": parts(engine)}
    for source, target in RESUMED.items():
        with engine_of(Path(root), **CASES[target]) as engine:
            load_state(engine, Path(root, "checkpoints", source))
            step(engine, RATES[-1])
            results[target]["resumed"] = parts(engine)
    return results | {f"trained {name}": trained(Path(root), name) for name in ("dp2", "tp2", "pp2", "fsdp2")}


def trained(root: Path, name: str) -> dict[str, Tensor]:
    """How far an update by a loss moves each weight."""
    with engine_of(root, **CASES[name]) as engine:
        start = exported(engine)
        engine.train_minibatch(own_rows(random_experience(), engine), losses("lm"), lr=1e-2)
        return {name: weight - start[name] for name, weight in exported(engine).items()}


def on_one_rank(rank: int, root: str) -> dict[str, Tensor]:
    return trained(Path(root), "dp2")


def matrices(family: str, name: str, tensor: Tensor) -> list[Tensor]:
    """Views of a tensor of a checkpoint that Muon steps one by one, [rows, columns] or [groups, rows, columns]."""
    if not re.search(r"\.\d+\.", name) or re.search(r"\.(gate|router)\.|bias|conv1d|shared_expert_gate|sinks", name):
        return []
    if tensor.dim() == 3:  # GPT-OSS: [experts, inputs, outputs], outputs of gate and up projection in turns
        turns = 2 if "gate_up" in name else 1
        return [expert[:, turn::turns].T for expert in tensor for turn in range(turns)]
    groups, *sizes = JOINED.get(family, {}).get(name.split(".")[-2], [1, len(tensor)])
    return list(tensor.view(groups, -1, tensor.size(1)).split(sizes, 1)) if tensor.dim() == 2 else []


def reference(family: str, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after the same steps of torch's Muon and AdamW, in float32."""
    weights, dtype = {name: t.float().clone() for name, t in start.items()}, start["model.norm.weight"].dtype
    trained = {name: w for name, w in weights.items() if ".lora_" in name or ".lora_" not in " ".join(start)}
    views = {name: matrices(family, name, tensor) for name, tensor in trained.items()}
    own = [(view, torch.nn.Parameter(view.flatten(0, -2).clone())) for each in views.values() for view in each]
    buffer = "e_score_correction_bias"
    others = {n: torch.nn.Parameter(weights[n]) for n, each in views.items() if not each and buffer not in n}
    decayed = [p for name, p in others.items() if p.dim() > 1 and not name.endswith("bias")]
    spared = [p for name, p in others.items() if p.dim() == 1 or name.endswith("bias")]
    muon = torch.optim.Muon(
        [p for _, p in own], weight_decay=OPTIM.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": spared, "weight_decay": 0.0}],
        betas=(OPTIM.beta1, OPTIM.beta2),
    )
    for rate in RATES:
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
                for parameter in group["params"]:
                    parameter.grad = parameter.detach().to(dtype).square().float()
            optimizer.step()
    for view, parameter in own:
        view.copy_(parameter.detach().view(view.shape))
    return {name: weight.to(dtype) for name, weight in weights.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("muon")
    for family in {case["family"] for case in CASES.values()}:
        write_tiny_checkpoint(root / family, family=family, tied=family == "qwen3")
    results = dict(run_ranks(2, run_cases, str(root), device="cpu", timeout_s=300)[0])
    return results | {"one rank": run_ranks(1, on_one_rank, str(root), device="cpu")[0]}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch_s_muon(results: dict[str, Any], name: str) -> None:
    """Matrices bit for bit, since Newton-Schulz sees the same matrix; AdamW's weights to rounding."""
    family, actual = CASES[name]["family"], results[name]
    expected = reference(family, actual["start"])
    assert expected.keys() == actual["end"].keys()
    for tensor, weight in expected.items():
        way, gap = (weight.double() - actual[other][tensor].double() for other in ("start", "end"))
        assert way.norm() > 0 or "e_score_correction_bias" in tensor or name.startswith("adapters")
        assert gap.norm() <= (0.0 if matrices(family, tensor, weight) else 1e-4) * way.norm(), tensor


@pytest.mark.parametrize("name", RESUMED.values())
def test_resumed_on_another_layout_with_the_same_bits(results: dict[str, Any], name: str) -> None:
    """The third step after two on another layout; AdamW's kernels may round in other places there."""
    for tensor, expected in results[name]["end"].items():
        actual = results[name]["resumed"][tensor]
        same = torch.equal(actual, expected) if matrices("qwen3", tensor, expected) else False
        assert same or (actual - expected).norm() <= 1e-6 * expected.norm(), tensor


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "fsdp2"])
def test_an_update_by_a_loss_is_that_of_one_rank(results: dict[str, Any], name: str) -> None:
    """Sums of gradients in another order round otherwise; bf16, in which torch iterates, makes 2^-8 of what flips."""
    for tensor, expected in results["one rank"].items():
        assert (results[f"trained {name}"][tensor] - expected).norm() <= 2e-2 * expected.norm(), tensor
