"""Weights, gradients and optimizer state of the plan are those of live engines, byte for byte, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.plan.setup import Machine, PlannedModel, RunSetup
from mega_rl.plan.state.ranks import state_of
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.plan.states_on_ranks import CASES, PARTS, config_of, run_cases

pytestmark = pytest.mark.timeout(600)  # the first test pays for all launches
UNTIED = ("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "llama", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every family; sizes that no padding divides for "odd"."""
    root = tmp_path_factory.mktemp("models")
    odd = {"vocab_size": 51, "intermediate_size": 66, "head_dim": 18}
    return {
        name: write_tiny_checkpoint(
            root / name.replace(" ", "_"),
            family=name.split()[0],
            tied=name not in UNTIED,
            **(odd if name.endswith("odd") else {}),
        )
        for name in {family for _, family, _ in CASES.values()}
    }


@pytest.fixture(scope="module")
def live(checkpoints: dict[str, Path]) -> dict[str, list[dict[str, int]]]:
    """Bytes of every case, by rank."""
    results: dict[str, list[dict[str, int]]] = {}
    for world_size in (1, 2, 4):
        cases = {
            name: (str(checkpoints[family]), case) for name, (size, family, case) in CASES.items() if size == world_size
        }
        by_rank = run_ranks(world_size, run_cases, cases, timeout_s=300)
        results |= {name: [rank[name] for rank in by_rank] for name in cases}
    return results


@pytest.mark.parametrize("name", CASES)
def test_the_state_of_every_rank_is_exact(
    name: str, live: dict[str, list[dict[str, int]]], checkpoints: dict[str, Path]
) -> None:
    """No tolerance: padding of the buffers, shards that end inside a parameter, and tied embeddings included."""
    world_size, family, case = CASES[name]
    hf = read_hf_config(checkpoints[family])
    setup = RunSetup(config_of(checkpoints[family], case), {"model.path": hf}, Machine(world_size))
    model = PlannedModel("actor", hf, case.get("head", "lm"), case.get("trainable", True))
    planned = [state_of(setup, model, rank) for rank in range(world_size)]
    assert [{part: getattr(state, part) for part in PARTS} for state in planned] == live[name]
