"""Weights, gradients and optimizer state of the plan equal those of live engines, byte for byte, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.parameters import adapted
from mega_rl.plan.setup import Machine, PlannedModel, RunSetup
from mega_rl.plan.state import Parameter, lay_out, state_of
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.plan.models import run_live
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
    return run_live(CASES, checkpoints, run_cases)


@pytest.mark.parametrize("name", CASES)
def test_state_of_every_rank_is_exact(
    name: str, live: dict[str, list[dict[str, int]]], checkpoints: dict[str, Path]
) -> None:
    """No tolerance: padding of the buffers, shards that end inside a parameter, and tied embeddings included."""
    world_size, family, case = CASES[name]
    hf = read_hf_config(checkpoints[family])
    setup = RunSetup(config_of(checkpoints[family], case), {"model.path": hf}, Machine(world_size))
    hf = adapted(hf, setup.config.model.adapter, case.get("head", "lm"))
    model = PlannedModel("actor", hf, case.get("head", "lm"), case.get("trainable", True))
    planned = [state_of(setup, model, rank) for rank in range(world_size)]
    assert [{part: getattr(state, part) for part in PARTS} for state in planned] == live[name]


@pytest.mark.parametrize(
    ("ranks", "distributed", "bucket_size", "spans", "buckets"),
    [
        (2, True, None, ((0, 100), (128, 198), (256, 266)), ((0, 384),)),  # from last to first, at multiples of 64
        (3, True, 90, ((0, 100), (384, 454), (512, 522)), ((0, 384), (384, 768))),  # ends: multiples of 128 and ranks
        (3, False, None, ((0, 100), (100, 170), (170, 180)), ((0, 180),)),
    ],
)
def test_buffers_equal_hand_computed_ones(
    ranks: int, distributed: bool, bucket_size: int | None, spans: object, buckets: object
) -> None:
    parameters = tuple(Parameter(1, numel, 2) for numel in (10, 70, 100))
    (buffer,) = lay_out(parameters, ranks=ranks, distributed=distributed, bucket_size=bucket_size)
    assert (buffer.spans, buffer.buckets) == (spans, buckets)
    owned = [buffer.owned(rank) for rank in range(ranks)]
    assert sum(owned) == 180 * (1 if distributed else ranks)
    if ranks == 2:
        assert owned == [100 + 64, 6 + 10], "shards end inside parameters"


def test_shared_embeddings_and_dtypes_are_kept_apart() -> None:
    first, *others = (Parameter(1, numel, 2) for numel in (50, 10, 10))
    shared = (first._replace(shared_embedding=True), *others)
    (buffer,) = lay_out(shared, ranks=1, distributed=True, bucket_size=None)
    assert buffer.buckets == ((0, 128), (128, 256))
    mixed = (Parameter(1, 10, 2), Parameter(1, 20, 4))
    assert [each.trained for each in lay_out(mixed, ranks=1, distributed=True, bucket_size=None)] == [10, 20]
