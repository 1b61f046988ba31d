"""One step of training on packed sequences gives the gradients of one rank, for what each family has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import MegatronOptimizerConfig, OptimConfig
from mega_rl.converters.families import FAMILIES as CONVERTED
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported_gradients, make_config, own_rows, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.engine_cases import losses

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

# Sums of a few hundred terms in another order, through four layers; 4e-6 is measured.
TOLERANCE = 2e-5
LAYOUTS = {"1": 1, "tp2-sp": 2, "pp2": 2, "dp2": 2}
# The others have nothing that these lack.
LIKE_OTHERS = ("glm4_moe", "kimi_k2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
FAMILIES = tuple(name for name in CONVERTED if name not in LIKE_OTHERS)
NO_TENSOR_PARALLEL = ("gpt_oss",)  # Megatron-Core does not cut experts that have biases
# Data parallelism sums whatever gradients there are: the others are for `make test-full`.
DATA_PARALLEL = FAMILIES if FULL else ("gemma3_text", "deepseek_v3", "gpt_oss")
PAIRS = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if layout == "pp2"
    or (layout == "tp2-sp" and family not in NO_TENSOR_PARALLEL)
    or (layout == "dp2" and family in DATA_PARALLEL)
]


def gradients(rank: int, root: str, layouts: list[str]) -> dict[str, dict[str, Any]]:
    """Gradients by Hugging Face's names and their norm as the optimizer sees it, by "family layout"."""
    results = {}
    for layout in layouts:
        for family in FAMILIES:
            if layout != "1" and (family, layout) not in PAIRS:
                continue
            optim, optimizer = OptimConfig(clip_grad=1.0), MegatronOptimizerConfig(distributed=False)
            config = make_config(Path(root) / family, layout=layout, optim=optim, optimizer=optimizer)
            with running_engine(config) as e:
                metrics = e.train_minibatch(own_rows(random_experience(), e), losses("lm"), lr=0.0)
                results[f"{family} {layout}"] = {
                    "gradients": exported_gradients(e),
                    "norm": float(metrics["grad_norm"]),
                }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 found."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_tiny_checkpoint(root / family, family=family, tied=CONVERTED[family].tied)
    answers: dict[str, dict[str, Any]] = {}
    for world_size in (1, 2):
        layouts = [layout for layout, size in LAYOUTS.items() if size == world_size]
        answers |= run_ranks(world_size, gradients, str(root), layouts, timeout_s=300, device="cpu")[0]
    return answers


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_gradients_are_those_of_one_rank(results: dict[str, dict[str, Any]], family: str, layout: str) -> None:
    """Of every weight, clipped, relative to its norm; and the norm over all of them before clipping."""
    one, many = results[f"{family} 1"], results[f"{family} {layout}"]
    assert one["gradients"].keys() == many["gradients"].keys()
    for name, expected in one["gradients"].items():
        off = (many["gradients"][name].double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
        assert float(off) <= TOLERANCE, name
    assert many["norm"] == pytest.approx(one["norm"], rel=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_weight_learns(results: dict[str, dict[str, Any]], family: str) -> None:
    """Sinks, routers, shared experts, norms and biases: in some layer each kind has a gradient."""
    kinds: dict[str, float] = {}
    for name, gradient in results[f"{family} 1"]["gradients"].items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds[kind] = max(kinds.get(kind, 0.0), float(gradient.abs().max()))
        assert torch.isfinite(gradient).all(), name
    assert [kind for kind, most in kinds.items() if most == 0.0] == []
