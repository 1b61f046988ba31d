"""Taking an engine off the accelerator and back, and what is no finite gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.engines.engine_cases import FUSED, INSPECTED, OFFLOADS, SPOILED, run_all


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    checkpoint: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)
    return run_ranks(2, run_all, str(checkpoint), timeout_s=180)


@pytest.mark.parametrize("case", list(OFFLOADS))
def test_offload_gives_back_what_it_says(ranks: list[dict[str, Any]], case: str) -> None:
    """Every storage of parameters, gradients and optimizer state is empty; little else is left in the process."""
    for actual in (rank["offload"][case] for rank in ranks):
        assert actual["given back"] == actual["fell by"] > 0
        assert actual["parameters"] == 0
        assert actual["left"] < 0.2 * actual["given back"]
        assert actual["twice"] == "offload() called twice: call onload() first"


@pytest.mark.parametrize("case", list(OFFLOADS))
def test_training_goes_on_after_onload(ranks: list[dict[str, Any]], case: str) -> None:
    """Weights, main parameters, moments and outputs of the next step: every bit as without the detour."""
    for actual in (rank["offload"][case] for rank in ranks):
        assert actual["back"] == 0
        assert actual["same state"]
        assert actual["same outputs"]
        assert actual["again"]


@pytest.mark.parametrize("case", list(SPOILED))
def test_a_gradient_that_is_not_finite(ranks: list[dict[str, Any]], case: str) -> None:
    """A step without a token, a skipped step and then an error, on all ranks: no bit of weights, moments and step
    counts changes, and the engine goes on as if none had been."""
    for actual in (rank["spoiled"][case] for rank in ranks):
        assert actual["of the engine"].startswith("actor: the gradient norm is ")
        assert actual["message"].startswith("actor, step 9: the gradient norm is ")
        assert actual["of nothing"] == {"actor/trained_tokens": 0.0, "actor/skipped_steps": 1.0}
        assert actual["still"]
        assert actual["metrics"]["actor/skipped_steps"] == 1.0
        assert all(map(math.isfinite, actual["metrics"].values()))
        assert actual["skipped"]
        assert actual["unchanged"]
        assert actual["usable"]


@pytest.mark.parametrize("case", list(FUSED))
def test_layers_that_add_into_main_grad_train_as_those_that_do_not(ranks: list[dict[str, Any]], case: str) -> None:
    """Transformer Engine's, without apex: once for each weight, on layers that have the switch and on no other."""
    for steps in (rank["fused"][case] for rank in ranks):
        plain, fused = steps["plain"], steps["fused"]
        assert fused["norm"] == pytest.approx(plain["norm"], rel=1e-6 if case == "fp32" else 1e-3)
        for name, weight in plain["weights"].items():
            torch.testing.assert_close(fused["weights"][name], weight, rtol=0, atol=1e-6 if case == "fp32" else 1e-2)


@pytest.mark.parametrize("layout", INSPECTED)
def test_inspect_sees_the_forward_before_a_weight_changes(ranks: list[dict[str, Any]], layout: str) -> None:
    """The outputs of `forward` up to rounding; what it raises stops the update, what it returns is reported."""
    for actual in (rank["inspected"][layout] for rank in ranks):
        assert actual["message"] == "stopped"
        assert max(actual["seen"]) <= 1e-5
        assert actual["unchanged"]
        assert actual["metric"] == 3.0
        assert actual["moved"]
