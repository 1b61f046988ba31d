"""Uneven pipeline stages, activation recomputation and determinism change the cost of a step, never its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import (
    exported,
    exported_gradients,
    make_config,
    own_rows,
    replaced,
    running_engine,
    worst_difference,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.distributed.engine_cases import losses

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

# Sums of a few hundred terms in another order, through four layers.
TOLERANCE = 2e-5
# name -> (world size, area, settings)
UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2, 1 + 3": (2, {"pp": 2, "pipeline": "Et|tttL"}),
    "pp2, 3 + 1": (2, {"pp": 2, "pipeline": "Ettt|tL"}),
    "pp2, all layers first": (2, {"pp": 2, "pipeline": "Etttt|L"}),
    "pp2, all layers last": (2, {"pp": 2, "pipeline": "E|ttttL"}),
    "pp2 vpp2, 0 + 2 + 1 + 1": (2, {"pp": 2, "vpp": 2, "pipeline": "E|tt|t|tL"}),
    "pp2 vpp2, the head alone": (2, {"pp": 2, "vpp": 2, "pipeline": "Et|tt|t|L"}),
    "pp4, 0 + 2 + 2 + 0": (4, {"pp": 4, "pipeline": "E|tt|tt|L"}),
    "pp4, 1 + 1 + 1 + 1": (4, {"pp": 4, "pipeline": "Et|t|t|tL"}),
    "pp4 vpp2, empty stages": (4, {"pp": 4, "vpp": 2, "pipeline": "E|t||t|t||t|L"}),
}
UNEVEN = without(UNEVEN, "pp2, 3 + 1", "pp2, all layers last", "pp2 vpp2, 0 + 2 + 1 + 1", "pp4, 1 + 1 + 1 + 1")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "selective, MLP": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {"recompute": "full"},
    "full, two layers": {"recompute": "full", "recompute_layers": 2},
}


def outcome(rank: int, checkpoint: str, cases: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Gradients, their norm, log-probs and the weights after a step of each case: {name: {area: settings}}."""
    results = {}
    for name, areas in cases.items():
        config = make_config(Path(checkpoint), layout="1")
        config = replaced(config, "optim", clip_grad=0.0)
        config = replaced(config, "engine.megatron.optimizer", distributed=False)
        for area, settings in areas.items():
            config = replaced(config, area, **settings)
        with running_engine(config) as engine:
            rows = own_rows(random_experience(), engine)
            logprobs = engine.forward(rows).logprobs
            metrics = engine.train_minibatch(rows, losses("lm"), lr=1e-4)
            results[name] = {
                "logprobs": logprobs,
                "norm": metrics["grad_norm"],
                "gradients": exported_gradients(engine),
                "weights": exported(engine),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
        results[name]["afterwards"] = torch.are_deterministic_algorithms_enabled()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by case."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)
    of_one = {"1": {}, "again": {}, "deterministic": {"trainer": {"deterministic": True}}}
    of_one["norms recomputed"] = {"model": {"recompute": "selective", "recompute_modules": ["layernorm"]}}
    of_one |= {f"recompute {name}": {"model": settings} for name, settings in RECOMPUTE.items()}
    answers: dict[str, Any] = dict(run_ranks(1, outcome, str(checkpoint), of_one)[0])
    for world_size in (2, 4):
        cases = {name: {"engine.megatron": sizes} for name, (size, sizes) in UNEVEN.items() if size == world_size}
        answers |= run_ranks(world_size, outcome, str(checkpoint), cases)[0]
    return answers


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_stages(results: dict[str, Any], name: str) -> None:
    """Stages of any length, none of its layers included, give what one rank gives."""
    one, many = results["1"], results[name]
    assert float((many["logprobs"] - one["logprobs"]).abs().max()) <= 1e-4
    assert many["norm"] == pytest.approx(one["norm"], rel=1e-5)
    distance, weight = worst_difference(many["gradients"], one["gradients"])
    assert distance <= TOLERANCE, weight


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_repeats_every_bit(results: dict[str, Any], name: str) -> None:
    """The same operators run on the same numbers, so gradients and updated weights are equal, not just close."""
    one, many = results["1"], results[f"recompute {name}"]
    for kind in ("gradients", "weights"):
        assert [key for key in one[kind] if not torch.equal(one[kind][key], many[kind][key])] == []


def test_recomputed_norms(results: dict[str, Any]) -> None:
    """Their first pass runs without autograd, where torch's RMSNorm takes another path that rounds otherwise."""
    distance, weight = worst_difference(results["norms recomputed"]["gradients"], results["1"]["gradients"])
    assert distance <= TOLERANCE, weight


def test_two_runs_have_the_same_bits(results: dict[str, Any]) -> None:
    """With trainer.deterministic by promise; on a CPU without it too."""
    for name in ("again", "deterministic"):
        for kind in ("gradients", "weights"):
            one, other = results["1"][kind], results[name][kind]
            assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    assert results["deterministic"]["deterministic"]
    assert not results["deterministic"]["afterwards"]
    assert not results["again"]["deterministic"]
