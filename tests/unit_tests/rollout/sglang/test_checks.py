"""What is refused before anything is sent. Answers of servers are those of SGLang 0.5.21, cut to what is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, mismatches, sent_shapes
from tests.helpers.models import write_tiny_checkpoint

SERVER = {
    "version": "0.5.21",
    "dtype": "float32",
    "tp_size": 2,
    "dp_size": 1,
    "pp_size": 1,
    "quantization": None,
    "speculative_algorithm": None,
    "is_embedding": False,
}
FAMILIES = {"qwen3": {}, "llama": {"tied": False}, "qwen3_moe": {"tied": False}, "deepseek_v3": {"tied": False}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checks")
    return {
        family: write_tiny_checkpoint(root / family, family=family, **options) for family, options in FAMILIES.items()
    }


def expected_for(path: Path, **parallel: Any) -> ExpectedServer:
    hf = read_hf_config(path)
    layout = ParallelLayout(**parallel)
    return ExpectedServer(hf, sent_shapes(Sharding(hf, layout)), "float32", tp=2)


def model_info(path: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    described = {key: config[key] for key in ("model_type", "architectures")}
    return {"model_path": str(path), "is_generation": True, **described, **changes}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "parallel", [{}, {"world_size": 2, "tp": 2}, {"world_size": 2, "pp": 2}], ids=["1", "tp2", "pp2"]
)
def test_server_of_the_same_model_fits(checkpoints: dict[str, Path], family: str, parallel: dict[str, int]) -> None:
    path = checkpoints[family]
    assert mismatches(model_info(path), SERVER, expected_for(path, **parallel)) == []
    # Nor is anything found where the checkpoint is on another host.
    assert mismatches(model_info(path, model_path="/elsewhere"), SERVER, expected_for(path, **parallel)) == []


def test_sent_tensors_are_equal_for_all_layouts(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3_moe"]
    alone = expected_for(path).sent
    assert alone == {name: info.shape for name, info in hf_tensors(read_hf_config(path), head="lm").items()}
    for parallel in ({"tp": 2}, {"ep": 2}, {"pp": 2}):
        assert expected_for(path, world_size=2, **parallel).sent == alone


MODELS = ({"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]}, {"is_generation": False})


@pytest.mark.parametrize(
    ("changes", "results"),
    [
        (MODELS[0], "serves model_type='llama', the trainer's model is 'qwen3'"),
        (MODELS[1], "serves architectures=['LlamaForCausalLM']"),
        (MODELS[2], "does not generate"),
        ({"version": "0.4.9"}, "version='0.4.9' must be '0.5.21'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be 'float32'"),
        ({"dtype": "auto"}, "dtype='auto'"),
        ({"tp_size": 1}, "tp_size=1 must be 2: as rollout.sglang.server.tp"),
        ({"dp_size": 2}, "dp_size=2 must be 1: without enable_dp_attention"),
        ({"pp_size": 2}, "pp_size=2 must be 1"),
        ({"quantization": "fp8"}, "quantization='fp8' must be None"),
        ({"speculative_algorithm": "EAGLE"}, "the draft model would keep its old weights"),
    ],
)
def test_setting_or_model_that_differs_is_named(checkpoints: dict[str, Path], changes: Any, results: str) -> None:
    path = checkpoints["qwen3"]
    model, server = (changes, {}) if changes in MODELS else ({}, changes)
    (problem,) = mismatches(model_info(path, **model), {**SERVER, **server}, expected_for(path))
    assert results in problem


NORM, HEAD, EXTRA = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.2.extra.weight"
Shapes = dict[str, tuple[int, ...]]
SENT: dict[str, tuple[Callable[[Shapes], Shapes], list[str]]] = {
    "missing": (
        lambda sent: {name: shape for name, shape in sent.items() if name not in (NORM, HEAD)},
        [f"{HEAD} would be sent as [], its model has [64, 32]", f"{NORM} would be sent as [], its model has [32]"],
    ),
    "unknown": (lambda sent: sent | {EXTRA: (3,)}, [f"{EXTRA} would be sent as [3], its model has []"]),
    "transposed": (
        lambda sent: sent | {HEAD: (32, 64)},
        [f"{HEAD} would be sent as [32, 64], its model has [64, 32]"],
    ),
}


@pytest.mark.parametrize("reachable", [True, False], ids=["read", "elsewhere"])
@pytest.mark.parametrize("change", SENT)
def test_every_tensor_that_does_not_fit_is_named(checkpoints: dict[str, Path], change: str, *, reachable: bool) -> None:
    path = checkpoints["qwen3"]
    expected = expected_for(path)
    alter, results = SENT[change]
    altered = replace(expected, sent=alter(dict(expected.sent)))
    info = model_info(path) if reachable else model_info(path, model_path="/elsewhere")
    assert sorted(mismatches(info, SERVER, altered)) == sorted(results)


def test_checkpoint_files_are_compared_too(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = checkpoints["qwen3"]
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = torch.zeros(3)
    tensors[NORM] = torch.zeros(31)
    save_file(tensors, tmp_path / "model.safetensors")
    results = mismatches(model_info(path, model_path=str(tmp_path)), SERVER, expected_for(path))
    assert sorted(results) == [
        "model.layers.0.extra.weight would be sent as [], its model has [3]",
        f"{NORM} would be sent as [32], its model has [31]",
    ]


@pytest.mark.parametrize("nonsense", [{}, {"model_path": None}, {"model_path": "\0"}, {"model_type": 5}])
def test_answers_of_nonsense_are_problems_not_crashes(checkpoints: dict[str, Path], nonsense: Any) -> None:
    assert mismatches(nonsense, {}, expected_for(checkpoints["qwen3"]))
    assert mismatches(nonsense, {key: [{}] for key in SERVER}, expected_for(checkpoints["qwen3"]))
