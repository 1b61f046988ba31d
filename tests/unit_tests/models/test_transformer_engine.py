"""Transformer Engine's own Python computes what the local layers do: names, marks, arguments, values and gradients.

Its compiled half is that of `tests/fake_te`, plain torch on a CPU, which `tests/fake_te/test_kernels.py` compares with
torch's operators. So this holds of what Transformer Engine, Megatron-Core and this package say to each other, and of no
kernel. Local layers run in ranks that know nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_te import package
from tests.fake_te.on_ranks import FAULTS, Case, run
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import without

pytestmark = [
    pytest.mark.skipif(package.missing() is not None, reason=str(package.missing())),
    pytest.mark.timeout(600),  # the first test pays for the launches of all
]

SP = {"sequence_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": False},
    "qwen3": {},
    "llama": {"tied": False},
    "qwen3_moe": {"tied": False},
    "deepseek_v3": {"tied": False, "rms_norm_eps": 1e-6},  # as published: Transformer Engine's layers have one epsilon
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, **SP}),
    "ep2": (2, {"ep": 2}),
    "tp2-sp-etp1": (2, {"tp": 2, "etp": 1, **SP}),
    "cp2": (2, {"cp": 2}),
}
# The case by name -> (model, layout, what else it has). Other layouts of the same models are for `make test-full`.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = without(
    {
        "qwen2 1": ("qwen2", "1", {}),
        "qwen3 1": ("qwen3", "1", {}),
        "qwen3 1 bf16": ("qwen3", "1", {"dtype": "bf16"}),
        "llama 1": ("llama", "1", {}),
        "qwen3_moe 1": ("qwen3_moe", "1", {}),
        "deepseek_v3 1": ("deepseek_v3", "1", {}),
        "qwen2 tp2": ("qwen2", "tp2", {}),
        "qwen2 tp2-sp": ("qwen2", "tp2-sp", {}),
        "qwen3 tp2": ("qwen3", "tp2", {}),
        "qwen3 tp2-sp": ("qwen3", "tp2-sp", {}),
        "llama tp2-sp": ("llama", "tp2-sp", {}),
        "qwen3_moe tp2-sp": ("qwen3_moe", "tp2-sp", {}),
        "qwen3_moe tp2-sp-etp1": ("qwen3_moe", "tp2-sp-etp1", {}),
        "qwen3_moe ep2": ("qwen3_moe", "ep2", {}),
        "deepseek_v3 tp2-sp": ("deepseek_v3", "tp2-sp", {}),
        "deepseek_v3 ep2": ("deepseek_v3", "ep2", {}),
        "qwen3 cp2": ("qwen3", "cp2", {"runs": False}),
        "qwen3_moe cp2": ("qwen3_moe", "cp2", {"runs": False}),
        "deepseek_v3 cp2": ("deepseek_v3", "cp2", {"runs": False}),
    },
    "qwen3 tp2",
    "qwen2 tp2-sp",
    "llama tp2-sp",
    "qwen3_moe tp2-sp",
    "deepseek_v3 ep2",
    "qwen3_moe cp2",
)
RUNNING = [name for name, (_, _, more) in CASES.items() if more.get("runs", True) and "dtype" not in more]
# FP32 on both sides, and FP32 alone: Transformer Engine has no FP64. Sums of a few hundred terms in another order.
LOGPROBS = 1e-5
GRADIENTS = 1e-5
WEIGHTS = 1e-5
FAULTY = {name: ("deepseek_v3", "tp2-sp") if name == "whole weights marked" else ("qwen3", "1") for name in FAULTS}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Case]]:
    """Cases by the number of ranks, and by name."""
    root = tmp_path_factory.mktemp("models")
    for model, settings in MODELS.items():
        write_tiny_checkpoint(root / model, family=model, num_hidden_layers=2, **settings)
    made: dict[int, dict[str, Case]] = {}
    for name, (model, layout, more) in CASES.items():
        size, settings = LAYOUTS[layout]
        made.setdefault(size, {})[name] = Case(str(root / model), settings, **more)
    return made


@pytest.fixture(scope="module")
def local(cases: dict[int, dict[str, Case]]) -> dict[str, Any]:
    """What local layers give, by case."""
    found: dict[str, Any] = {}
    for size, named in cases.items():
        found |= run_ranks(size, run, named, timeout_s=250, device="cpu")[0]
    return found


@pytest.fixture(scope="module")
def te(cases: dict[int, dict[str, Case]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Transformer Engine's layers give, by case, and with every fault, by the fault."""
    folder = tmp_path_factory.mktemp("te")
    wanted = {size: dict(named) for size, named in cases.items()}
    for fault, (model, layout) in FAULTY.items():
        size, settings = LAYOUTS[layout]
        checkpoint = next(case for name, case in cases[size].items() if name == f"{model} {layout}").checkpoint
        wanted[size][fault] = Case(checkpoint, settings, fault=fault)
    torch.save(wanted, folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fake_te.program", folder / "cases.pt", folder / "results.pt"],
        cwd=package.ROOT,
        env=package.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return results


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))


def test_the_layers_are_transformer_engine_s(te: dict[str, Any], local: dict[str, Any]) -> None:
    """With its attention, its experts and its Adam, and weight gradients that go where they are added up."""
    for name, report in te.items():
        layers = report["classes"]["layers"]
        assert {"TEDotProductAttention", "TERowParallelLinear", "UnfusedDotProductAttention"} <= set(layers), name
        assert ("TEColumnParallelGroupedLinear" in layers) == ("moe" in name or "deepseek" in name or name in FAULTY and FAULTY[name][0] == "deepseek_v3")
        assert report["classes"]["fused"] == {True}, name
        assert report["classes"]["adam"] == ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"]
    for name, report in local.items():
        assert not [layer for layer in report["classes"]["layers"] if layer.startswith("TE")], name


@pytest.mark.parametrize("name", CASES)
def test_weights_have_the_marks_of_local_ones(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """Cut, summed under sequence parallelism, reduced apart: by the tensors of a checkpoint that a weight holds.

    That the engines are there says that every weight has its place in a checkpoint: loading refuses others.
    """
    assert te[name]["marks"] == local[name]["marks"]


@pytest.mark.parametrize("name", RUNNING)
def test_values_and_gradients_are_those_of_local_layers(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """Of packed micro-batches: log-probs, the gradient of every weight, and the norm over all of them."""
    actual, expected = te[name], local[name]
    assert actual["micros"] == expected["micros"] > 1
    assert float((actual["logprobs"] - expected["logprobs"]).abs().max()) <= LOGPROBS
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for tensor, gradient in expected["gradients"].items():
        assert off(actual["gradients"][tensor], gradient) <= GRADIENTS, tensor
    assert actual["norm"] == pytest.approx(expected["norm"], rel=GRADIENTS)
