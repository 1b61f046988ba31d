"""Checkpoints of the FSDP engine: saved on two ranks, taken back on one, two and four, however these share a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.cli import app as cli
from mega_rl.config.schema.engine import FsdpConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.checkpoint.fsdp_engine_cases import STEPS, Case, load_all, save_all

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches

COPIES = FsdpConfig(shard_ranks=1)
HOST = FsdpConfig(cpu_offload=True)
FROZEN = ("model.embed_tokens.*", "model.layers.0.*")
SAVED = {
    "tied": Case("tied"),
    "untied": Case("untied"),  # 51 rows of vocabulary: two ranks have different numbers of them
    "mixtral": Case("mixtral"),  # the experts of a layer are one parameter
    "critic": Case("critic"),  # its head is one row: most ranks have none
    "copies": Case("tied", fsdp=COPIES),
    "host": Case("tied", fsdp=HOST),
    "frozen": Case("tied", frozen=FROZEN),
    "bf16": Case("tied", dtype="bf16"),
}
LOADED = {
    1: {
        "tied on 1": Case("tied", "tied"),
        "mixtral on 1": Case("mixtral", "mixtral"),
        "tied on 1 from copies": Case("tied", "copies"),
    },
    2: {
        **{f"{name} again": Case(case.model, name, case.fsdp, case.dtype, case.frozen) for name, case in SAVED.items()},
        "copies from shards": Case("tied", "tied", COPIES),
        "host from shards": Case("tied", "tied", HOST),
        "shards from host": Case("tied", "host"),
    },
    4: {
        "tied on 4": Case("tied", "tied"),
        "untied on 4": Case("untied", "untied"),
        "mixtral on 4": Case("mixtral", "mixtral"),
        "critic on 4": Case("critic", "critic"),
        "two copies on 4": Case("tied", "tied", FsdpConfig(shard_ranks=2)),
        "host on 4 from copies": Case("tied", "copies", HOST),
    },
}
# In `make test-full`: each way to share a state stays in another case.
MORE = ("tied on 1", "copies again", "untied on 4", "tied on 4", "shards from host", "bf16 again")
MORE += ("mixtral again", "critic again", "host again", "tied on 1 from copies")
assert set(MORE) <= {name for cases in LOADED.values() for name in cases}
LOADED = {size: without(cases, *cases.keys() & set(MORE)) for size, cases in LOADED.items()}
CASES = {name: case for cases in LOADED.values() for name, case in cases.items()}
NORM_TOLERANCE = 1e-5  # relative, of fp32 gradients of the same weights, summed in another order
WEIGHT_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, settings in {
        "tied": {},
        "untied": {"tied": False, "vocab_size": 51},
        "mixtral": {"family": "mixtral", "tied": False},
        "critic": {"family": "llama"},
    }.items():
        write_tiny_checkpoint(folder / name, **{"num_hidden_layers": 2, **settings})  # type: ignore[arg-type]
    path = folder / "critic" / "model.safetensors"
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(7))
    save_file({**load_file(path), "score.weight": head}, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def saved(root: Path) -> list[dict[str, Any]]:
    return run_ranks(2, save_all, str(root), SAVED)


@pytest.fixture(scope="module")
def loaded(root: Path, saved: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank found."""
    actual: dict[str, list[dict[str, Any]]] = {}
    for world_size, cases in LOADED.items():
        answers = run_ranks(world_size, load_all, str(root), cases)
        actual |= {name: [answer[name] for answer in answers] for name in cases}
    return actual


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal to the bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(saved: list[dict[str, Any]], loaded: dict[str, Any], name: str) -> None:
    """Weights and moments, wherever their rows lie now, and Adam's number of steps."""
    expected = saved[0][CASES[name].source]
    assert any(tensor.abs().max() > 0 for key, tensor in expected["held"].items() if key.startswith("exp_avg_sq"))
    for actual in loaded[name]:
        assert differing(actual["held"], expected["held"]) == []
        assert differing(actual["exported"], expected["exported"]) == []
        assert actual["steps"] == [STEPS]


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(" again")])
def test_the_same_layout_goes_on_bit_for_bit(saved: list[dict[str, Any]], loaded: dict[str, Any], name: str) -> None:
    """The step after a load is that of the engine that never stopped."""
    for actual, rank in zip(loaded[name], saved, strict=True):
        stayed = rank[CASES[name].source]
        assert actual["norm"] == stayed["norm"]
        assert actual["next steps"] == stayed["next steps"] == [STEPS + 1]
        assert differing(actual["after"], stayed["after"]) == []
        assert differing(stayed["after"], stayed["held"]) != []


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(" again")])
def test_another_layout_makes_the_same_step(saved: list[dict[str, Any]], loaded: dict[str, Any], name: str) -> None:
    stayed = saved[0][CASES[name].source]
    moved = max(float((stayed["after"][key] - tensor).abs().max()) for key, tensor in stayed["held"].items())
    assert moved > 1e-3
    for actual in loaded[name]:
        assert actual["norm"] == pytest.approx(stayed["norm"], rel=NORM_TOLERANCE)
        assert actual["next steps"] == [STEPS + 1]
        for key, tensor in stayed["after"].items():
            assert (actual["after"][key] - tensor).abs().max() <= WEIGHT_TOLERANCE, key


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_leaves_as_a_hugging_face_checkpoint(
    root: Path, saved: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    """`mega-rl checkpoint export` gives every bit of what the engine's own exporter gave."""
    case = SAVED[name]
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[case.dtype]
    model = ["--hf", str(root / case.model), "--dtype", dtype]
    command = ["checkpoint", "export", str(root / "saved" / name), str(tmp_path / "out"), *model]
    if case.head == "value":  # saved under the name of an actor, which has another head
        assert cli.main(command) == 2
        return
    assert cli.main(command) == 0
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), saved[0][name]["exported"]) == []


def test_frozen_weights_have_no_moments(saved: list[dict[str, Any]]) -> None:
    held = saved[0]["frozen"]["held"]
    assert "weights model.embed_tokens.weight" in held
    assert not any(key.startswith("exp_avg model.embed_tokens") for key in held)
    assert not any(key.startswith("exp_avg model.layers.0.") for key in held)
    assert any(key.startswith("exp_avg model.layers.1.") for key in held)
