"""Transformer Engine's own Python computes what the local layers do: names, marks, arguments, values and gradients.

Its compiled half is that of `tests/fake_te`, plain torch on a CPU. The tests cover what Transformer Engine,
Megatron-Core and this package say to each other, and no kernel. Local layers run in ranks that know nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.converters.hf.config import read_hf_config
from tests.fake_te import package
from tests.fake_te.on_ranks import FAULTS, LR, Case, run
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.plan.test_activations import GQA, OTHERS, SIZES, layout_of, per_token
from tests.unit_tests.plan.test_activations import TOLERANCE as PLANNED

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
    "qwen2 1",
    "llama 1",
    "qwen3_moe 1",
    "qwen3 tp2",
    "qwen2 tp2-sp",
    "llama tp2-sp",
    "qwen3_moe tp2-sp",
    "qwen3_moe tp2-sp-etp1",
    "deepseek_v3 ep2",
    "qwen3_moe cp2",
    "deepseek_v3 cp2",
)
RUNNING = [name for name, (_, _, more) in CASES.items() if more.get("runs", True) and "dtype" not in more]
# FP32 on both sides, and FP32 alone: Transformer Engine has no FP64. Sums of at most a hundred terms in another order:
# 1e-6 is measured of log-probs up to 5, and 1.4e-6 of a router's gradient.
LOGPROBS = 2e-6
GRADIENTS = 3e-6
# Adam divides a gradient by its size: where there is next to none, rounding moves a weight by a part of the step.
WEIGHTS = 0.1 * LR
FAULTY = without(
    {name: ("deepseek_v3", "tp2-sp") if name == "whole weights marked" else ("qwen3", "1") for name in FAULTS},
    "another epsilon",
    "another softmax scale",
    "last micro-batch alone",
)
ACTIVATIONS: dict[str, tuple[int, str, dict[str, Any]]] = without(
    {
        "llama": (1, "llama", {}),
        "qwen3": (1, "qwen3", {}),
        "qwen3, core_attn": (1, "qwen3", {"recompute": "selective"}),
        "qwen3, mlp": (1, "qwen3", {"recompute": "selective", "recompute_modules": ["mlp"]}),
        "qwen3, tp2-sp": (2, "qwen3", {"layout": {"tp": 2, **SP}}),
        "qwen3_moe": (1, "qwen3_moe", {}),
        "deepseek_v3": (1, "deepseek_v3", {}),
        "deepseek_v3, moe": (1, "deepseek_v3", {"recompute": "selective", "recompute_modules": ["moe"]}),
        "deepseek_v3, tp2-sp": (2, "deepseek_v3", {"layout": {"tp": 2, **SP}}),
    },
    "llama",
    "qwen3, core_attn",
    "qwen3, mlp",
    "deepseek_v3",
    "qwen3, tp2-sp",
    "deepseek_v3, moe",
    "deepseek_v3, tp2-sp",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints of every model, and those in `sizes`, whose sizes are all different."""
    folder = tmp_path_factory.mktemp("models")
    for model, settings in MODELS.items():
        if model in {model for model, _, _ in CASES.values()}:
            write_tiny_checkpoint(folder / model, family=model, num_hidden_layers=2, **settings)
        if model in {model for _, model, _ in ACTIVATIONS.values()}:
            more = {"num_key_value_heads": 8} if model == "deepseek_v3" else GQA
            write_tiny_checkpoint(folder / "sizes" / model, family=model, **{**settings, **SIZES, **more})
    return folder


@pytest.fixture(scope="module")
def cases(root: Path) -> dict[int, dict[str, Case]]:
    """Cases by the number of ranks, and by name."""
    made: dict[int, dict[str, Case]] = {}
    for name, (model, layout, more) in CASES.items():
        size, settings = LAYOUTS[layout]
        made.setdefault(size, {})[name] = Case(str(root / model), settings, **more)
    return made


@pytest.fixture(scope="module")
def local(cases: dict[int, dict[str, Case]]) -> dict[str, Any]:
    """What local layers give, by case."""
    reports: dict[str, Any] = {}
    for size, named in cases.items():
        reports |= run_ranks(size, run, named, timeout_s=250, device="cpu")[0]
    return reports


@pytest.fixture(scope="module")
def everything(root: Path, cases: dict[int, dict[str, Case]]) -> dict[str, Any]:
    """What Transformer Engine's layers give, by case and by fault, and the memory that they keep, by case."""
    by_size = {size: dict(named) for size, named in cases.items()}
    for fault, (model, layout) in FAULTY.items():
        size, settings = LAYOUTS[layout]
        by_size[size][fault] = Case(str(root / model), settings, fault=fault)
    jobs: list[tuple[int, str, dict[str, Any]]] = [(size, "engines", named) for size, named in by_size.items()]
    for size in sorted({size for size, _, _ in ACTIVATIONS.values()}):
        named = {name: (str(root / "sizes" / m), case) for name, (n, m, case) in ACTIVATIONS.items() if n == size}
        jobs.append((size, "activations", named))
    torch.save(jobs, root / "jobs.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fake_te.program", root / "jobs.pt", root / "results.pt"],
        cwd=package.ROOT,
        env=package.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results = torch.load(root / "results.pt", weights_only=False)
    merged: dict[str, Any] = {"engines": {}, "activations": {}}
    for (_, name, _), result in zip(jobs, results, strict=True):
        merged[name] |= result
    return merged


@pytest.fixture(scope="module")
def te(everything: dict[str, Any]) -> dict[str, Any]:
    """What Transformer Engine's layers give, by case and by fault."""
    engines: dict[str, Any] = everything["engines"]
    return engines


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))


def farthest(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative error among the gradients."""
    assert actual["gradients"].keys() == expected["gradients"].keys()
    return max(off(actual["gradients"][name], gradient) for name, gradient in expected["gradients"].items())


@pytest.mark.parametrize("name", CASES)
def test_the_layers_are_transformer_engine_s(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """With its attention, experts and Adam, and weight gradients that it adds into the buffers of the engine.

    In 16 bits attention is the fused kernel, which FP32 does not have.
    """
    report, model = te[name], CASES[name][0]
    assert {"TEDotProductAttention", "TERowParallelLinear"} <= report["layers"]
    assert ("TEColumnParallelGroupedLinear" in report["layers"]) == (model in ("qwen3_moe", "deepseek_v3"))
    assert report["fused"] == {True}
    assert report["adam"] == {"transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"}
    if name in RUNNING:
        assert report["attention"] == "unfused"
    assert not [layer for layer in local[name]["layers"] if layer.startswith("TE")]
    assert local[name]["adam"] == {"torch.optim.adamw.AdamW"}


@pytest.mark.parametrize("name", CASES)
def test_weights_have_the_marks_of_local_ones(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """Cut, summed under sequence parallelism, reduced apart: by the tensors of a checkpoint that a weight holds.

    An engine that is there has a place in the checkpoint for every weight: loading refuses others.
    """
    assert te[name]["marks"] == local[name]["marks"]


@pytest.mark.parametrize("name", RUNNING)
def test_values_and_gradients_are_those_of_local_layers(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """Of packed micro-batches: log-probs, the gradient of every weight, and the norm over all of them."""
    actual, expected = te[name], local[name]
    assert actual["micros"] == expected["micros"]
    assert float((actual["logprobs"] - expected["logprobs"]).abs().max()) <= LOGPROBS
    assert farthest(actual, expected) <= GRADIENTS
    assert actual["norm"] == pytest.approx(expected["norm"], rel=GRADIENTS)


def test_gradients_are_those_of_several_micro_batches(te: dict[str, Any]) -> None:
    """Else nothing would be added to the first one's."""
    assert all(te[name]["micros"] > 1 for name in RUNNING if LAYOUTS[CASES[name][1]][1].get("ep") != 2)


@pytest.mark.parametrize("name", RUNNING)
def test_steps_of_its_adam_are_those_of_torch_s(te: dict[str, Any], local: dict[str, Any], name: str) -> None:
    """The weights after three steps, and the norms of the gradients on the way."""
    actual, expected = te[name], local[name]
    assert actual["norms"] == pytest.approx(expected["norms"], rel=GRADIENTS)
    assert actual["weights"].keys() == expected["weights"].keys()
    for tensor, weight in expected["weights"].items():
        assert float((actual["weights"][tensor] - weight).abs().max()) <= WEIGHTS, tensor


def test_fused_attention_is_no_farther_from_fp32_than_local_attention(
    te: dict[str, Any], local: dict[str, Any]
) -> None:
    """In bf16, where a single number is good to 3 digits; the gradients' norm stands for all of them."""
    exact, name = local["qwen3 1"], "qwen3 1 bf16"
    assert te[name]["attention"] == "fused"
    errors = {who: float((got[name]["logprobs"] - exact["logprobs"]).abs().mean()) for who, got in
              (("te", te), ("local", local))}  # fmt: skip
    assert errors["te"] <= 1.5 * errors["local"]
    assert te[name]["norm"] == pytest.approx(exact["norm"], rel=1e-2)


def test_what_megatron_core_hands_over(te: dict[str, Any]) -> None:
    """Arguments bound to Transformer Engine's own signatures; packed sequences go by their lengths on both sides."""
    calls = te["deepseek_v3 tp2-sp"]["calls"]
    lengths = {f"{what}_{side}" for what in ("cu_seqlens", "max_seqlen") for side in ("q", "kv")}
    # Without the last it compares boundaries on the device under context parallelism, for which the host waits.
    kinds = {"qkv_format=thd", "attn_mask_type=padding_causal", "pad_between_seqs=False"}
    assert lengths | kinds <= calls["DotProductAttention.forward"]
    assert {"kv_channels", "softmax_scale", "tp_group"} <= calls["DotProductAttention.__init__"]
    modes = {"parallel_mode=column", "parallel_mode=row", "parallel_mode", "sequence_parallel=True"}
    assert modes <= calls["Linear.__init__"]
    assert {"eps", "normalization=RMSNorm", "zero_centered_gamma=False"} <= calls["LayerNormLinear.__init__"]
    assert {"num_gemms", "fuse_wgrad_accumulation=False"} <= calls["GroupedLinear.__init__"]
    assert {"m_splits", "is_first_microbatch=True", "is_first_microbatch=False"} <= calls["GroupedLinear.forward"]


@pytest.mark.parametrize(
    "fault", [name for name in FAULTY if name not in ("whole weights marked", "another signature")]
)
def test_a_fault_is_seen(te: dict[str, Any], local: dict[str, Any], fault: str) -> None:
    """By a hundred times the tolerance of gradients, which all of them change."""
    assert farthest(te[fault], local["qwen3 1"]) > 100 * GRADIENTS


def test_marks_of_whole_weights_are_seen(te: dict[str, Any], local: dict[str, Any]) -> None:
    """Left as they are, they make the norm count the down projections of latent attention on every rank."""
    fault, right = te["whole weights marked"], local["deepseek_v3 tp2-sp"]
    wrong = {name for name, marks in right["marks"].items() if fault["marks"][name] != marks}
    assert {name.split(".")[-2] for name in wrong} == {"q_a_proj", "kv_a_proj_with_mqa"}
    assert fault["norm"] > right["norm"] * (1 + 100 * GRADIENTS)


def test_another_signature_is_seen(te: dict[str, Any]) -> None:
    assert "got an unexpected keyword argument" in te["another signature"]["error"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_plan_expects_what_its_layers_keep(everything: dict[str, Any], root: Path, name: str) -> None:
    """Activations of all layers, the head and the logits, in bf16, as autograd is given them."""
    _, model, case = ACTIVATIONS[name]
    live, hf = everything["activations"][name], read_hf_config(root / "sizes" / model)
    planned = sum(per_token(hf, layout_of(case), case, spec="te"))
    assert planned == pytest.approx(live["bytes"] / live["tokens"] - OTHERS, rel=PLANNED)
