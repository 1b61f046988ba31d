"""The same parity where GPUs are: one GPU against the CPU, and every layout that the machine has GPUs for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import LAYOUTS
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import run_cases
from tests.unit_tests.distributed.test_engine_parity import LOGPROB_TOLERANCE, worst_difference

pytestmark = pytest.mark.gpu

# fp32 kernels of another device sum in another order and use other exponentials.
GRADIENT_TOLERANCE = 1e-4


def cases(checkpoint: Path, layouts: list[str], dtype: str) -> list[dict[str, Any]]:
    """One case for each layout."""
    return [{"name": layout, "checkpoint": str(checkpoint), "layout": layout, "dtype": dtype} for layout in layouts]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)


def test_one_gpu_matches_the_cpu(checkpoint: Path) -> None:
    """Log-probs, loss, gradient norm and gradients in fp32."""
    on_cpu = run_ranks(1, run_cases, 1, cases(checkpoint, ["1"], "fp32"), device="cpu")[0]["1"]
    on_gpu = run_ranks(1, run_cases, 1, cases(checkpoint, ["1"], "fp32"), device="cuda")[0]["1"]
    assert (on_gpu["outputs"] - on_cpu["outputs"]).abs().max() <= LOGPROB_TOLERANCE
    assert on_gpu["metrics"]["grad_norm"] == pytest.approx(on_cpu["metrics"]["grad_norm"], rel=GRADIENT_TOLERANCE)
    distance, name = worst_difference(on_gpu["gradients"], on_cpu["gradients"])
    assert distance <= GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_layouts_on_gpus_match_one_gpu(checkpoint: Path, layout: str) -> None:
    """NCCL in place of gloo."""
    world_size = LAYOUTS[layout][0]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, there are {torch.cuda.device_count()}")
    one = run_ranks(1, run_cases, 1, cases(checkpoint, ["1"], "fp32"), device="cuda")[0]["1"]
    many = run_ranks(world_size, run_cases, world_size, cases(checkpoint, [layout], "fp32"), device="cuda")[0][layout]
    assert (many["outputs"] - one["outputs"]).abs().max() <= LOGPROB_TOLERANCE
    distance, name = worst_difference(many["gradients"], one["gradients"])
    assert distance <= GRADIENT_TOLERANCE, name
