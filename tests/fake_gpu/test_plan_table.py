"""The plan's peaks of training passes are those counted on the fake device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.activations import training_pass
from mega_rl.plan.setup import Machine, PlannedModel, RunSetup
from mega_rl.plan.state import state_of
from tests.fake_gpu import guard
from tests.fake_gpu.launch import reports_of
from tests.fake_gpu.models import MODELS
from tests.helpers.selection import FULL

SP = {"sequence_parallel": True}
SELECTIVE = {"recompute": "selective"}
SIZES: dict[str, Any] = {"tokens": 16384, "length": 2048, "micros": 1}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": "0.6b"},
    "dense, selective": {"model": "0.6b, 4 layers", **SELECTIVE},
    "dense, full": {"model": "0.6b, 4 layers", "recompute": "full"},
    "dense, tp4-sp": {"model": "8b", "world": 8, "layout": {"tp": 4, **SP}},
    "dense, tp4-sp, selective": {"model": "8b, 4 layers", "world": 8, "layout": {"tp": 4, **SP}, **SELECTIVE},
    "dense, first of pp2": {"model": "8b, 4 layers", "world": 2, "layout": {"pp": 2}, "micros": 4},
    "dense, cp2": {"model": "8b, 4 layers", "world": 2, "layout": {"cp": 2}},
    "critic": {"model": "8b, 4 layers", "head": "value"},
    "mixture, tp2-sp-ep4": {"model": "30b-a3b", "world": 4, "layout": {"tp": 2, "ep": 4, "etp": 1, **SP}},
    "latent, tp2-sp-ep2": {"model": "v3", "world": 4, "layout": {"tp": 2, "ep": 2, "etp": 1, **SP}},
}


@dataclass(frozen=True)
class Peak:
    """The most that a training pass needs beside the model's state, in bytes."""

    planned: int
    counted: int
    state: int  # weights and gradients, counted
    planned_state: int


def setup_of(case: dict[str, Any]) -> tuple[RunSetup, PlannedModel]:
    """Return the run and the model that a case is one rank of."""
    case = SIZES | case
    rows = case["tokens"] // case["length"] * case["micros"]
    settings = {f"engine.megatron.{name}": value for name, value in case.get("layout", {}).items()}
    settings |= {
        "engine.megatron.transformer_impl": "local",
        "model.dtype": "bf16",
        "model.recompute": case.get("recompute", "none"),
        "trainer.microbatch.max_tokens": case["tokens"],
        "data.max_prompt_tokens": case["length"] // 2,
        "rollout.max_new_tokens": case["length"] // 2,
    }
    hf = parse_hf_config(MODELS[case["model"]])
    setup = RunSetup(with_settings(Config(), settings), {"model.path": hf}, Machine(case.get("world", 1)))
    replicas = rows * setup.layout.dp
    prompts = {"trainer.prompts_per_step": replicas, "trainer.minibatch_size": replicas}
    setup = RunSetup(with_settings(setup.config, prompts), {"model.path": hf}, Machine(case.get("world", 1)))
    head = case.get("head", "lm")
    return setup, PlannedModel("critic" if head == "value" else "actor", hf, head, trainable=True)


def peaks(names: Iterable[str]) -> dict[str, Peak]:
    """Return the planned and the counted peak of some cases; starts one program for all of them."""
    names = list(names)
    arguments = [json.dumps(SIZES | CASES[name] | {"passes": ["train"]}) for name in names]
    reports = reports_of(arguments)
    return {name: peak_of(CASES[name], report) for name, report in zip(names, reports, strict=True)}


def peak_of(case: dict[str, Any], report: dict[str, Any]) -> Peak:
    """Return the planned peak of a case beside that of its report."""
    assert "error" not in report, report["error"]
    setup, model = setup_of(case)
    at = case.get("rank", 0)
    pp_rank = setup.layout.coordinates(at).pp_rank
    state = state_of(setup, model, at)
    # Adam's moments are there from the end of the first step on.
    moments = 2 * state.optimizer // 3
    before = report["build"]["live"]
    planned = training_pass(setup, model, pp_rank).total
    held = state.weights + state.gradients + state.optimizer - moments
    return Peak(planned, report["train"]["peak"] - before, before, held)


# Three other cases are in test_fake_gpu.py, whose program runs them anyway.
pytestmark = [
    pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing())),
    pytest.mark.skipif(not FULL, reason="make test-full counts ten cases"),
]
TOLERANCE = 0.05  # working memory of kernels is an estimate


@pytest.fixture(scope="module")
def counted() -> dict[str, Peak]:
    """Peaks of the cases, from one program."""
    return peaks(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_needs_what_the_plan_says(name: str, counted: dict[str, Peak]) -> None:
    """Activations, logits and working memory; the state is exact but for counters and tables."""
    peak = counted[name]
    assert peak.planned == pytest.approx(peak.counted, rel=TOLERANCE)
    assert peak.planned_state == pytest.approx(peak.state, rel=0.01)
