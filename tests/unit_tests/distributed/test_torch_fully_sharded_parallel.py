"""PyTorch's FSDP2 around Megatron-Core's modules computes what DDP and one rank compute, and shards what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import MegatronConfig, TorchFsdpConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.distributed.fsdp_cases import (
    Case,
    assert_bf16_like_ddp,
    assert_exported,
    train_all,
)

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

# As in test_mcore_fully_sharded_data_parallel.py.
LOGPROB_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-6
FROZEN = ("embedding.*", "decoder.layers.1.*")
FSDP2 = TorchFsdpConfig()
ONE_RANK = {
    "tied": Case(),
    "untied": Case(model="untied"),
    "value": Case(model="untied", head="value"),
    "frozen": Case(frozen=FROZEN),
}
TWO_RANKS = {
    "tied": Case(FSDP2, export="hf tied"),
    "new groups, offload": Case(FSDP2, groups="new", offload=True),
    "untied": Case(FSDP2, model="untied", export="hf untied"),
    "value": Case(FSDP2, model="untied", head="value"),
    "frozen": Case(FSDP2, frozen=FROZEN),
    "pp2": Case(FSDP2, parallel=MegatronConfig(pp=2), export="hf pp2"),
    "ddp": Case(),
    "ddp bf16": Case(dtype="bf16"),
    "bf16": Case(FSDP2, dtype="bf16", export="hf bf16"),
    "value bf16": Case(FSDP2, model="untied", head="value", dtype="bf16"),
}
FOUR_RANKS = {
    "dp4": Case(FSDP2),
    "tp2-sp": Case(FSDP2, parallel=MegatronConfig(tp=2, sequence_parallel=True), export="hf tp2-sp"),
    "tp2": Case(FSDP2, parallel=MegatronConfig(tp=2), export="hf tp2"),
    "pp2-dp2": Case(FSDP2, parallel=MegatronConfig(pp=2)),
    "pp2-vpp2-dp2": Case(FSDP2, parallel=MegatronConfig(pp=2, vpp=2, overlap_p2p=True), export="hf pp2-vpp2"),
}
FOUR_RANKS = without(FOUR_RANKS, "tp2", "pp2-dp2")  # the others have their parts
LAYERS = [f"decoder.layers.{layer}" for layer in range(4)]
EXPECTED_UNITS = {
    "tied": ["", *LAYERS],  # both ends read the embedding, which therefore stays with the root
    "untied": ["", *LAYERS, "embedding", "output_layer"],
    "value": ["", *LAYERS, "embedding", "output_layer"],
}
SAME_AS_ONE_RANK = [("2", name) for name in TWO_RANKS if "bf16" not in name] + [("4", name) for name in FOUR_RANKS]


EXPORTS = [("2", name) for name, case in TWO_RANKS.items() if case.export]
EXPORTS += [("4", name) for name, case in FOUR_RANKS.items() if case.export]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict[str, list[Any]]]:
    """By world size and case, what every rank found."""
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "untied", family="qwen3", tied=False)
    actual: dict[str, dict[str, list[Any]]] = {}
    for world_size, cases in {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}.items():
        answers = run_ranks(world_size, train_all, str(root), cases, timeout_s=300)
        actual[str(world_size)] = {name: [answer[name] for answer in answers] for name in answers[0]}
    return actual


@pytest.mark.parametrize(("world", "name"), SAME_AS_ONE_RANK)
def test_steps_are_those_of_one_rank(results: dict[str, Any], world: str, name: str) -> None:
    """Outputs, losses, norms before clipping (sums, not means), and the weights after two steps, on every rank."""
    (one,) = results["1"][name if name in ONE_RANK else "tied"]
    for many in results[world][name]:
        assert (many["before"] - one["before"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["after"] - one["after"]).abs().max() <= LOGPROB_TOLERANCE
        assert many["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE)
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
        for key, expected in one["weights"].items():
            assert (many["weights"][key] - expected).abs().max() <= WEIGHT_TOLERANCE, key
    assert max(float((one["weights"][key] - one["start"][key]).abs().max()) for key in one["start"]) > 1e-3
    assert world == "4" or many["microbatches"] > 1


def test_bf16_is_that_of_ddp(results: dict[str, Any]) -> None:
    """FP32 main parameters and gradients on both sides, bf16 in the layers and in what is exported."""
    assert_bf16_like_ddp(results["2"])


def test_a_value_head_is_fp32_in_bf16_too(results: dict[str, Any]) -> None:
    """It trains, and what it says has more than eight bits."""
    for actual in results["2"]["value bf16"]:
        assert actual["norms"][0] > 0
        assert actual["after"].abs().max() > 0
        assert not torch.equal(actual["after"], actual["after"].bfloat16().float())


@pytest.mark.parametrize("name", list(EXPECTED_UNITS))
def test_what_is_sharded(results: dict[str, Any], name: str) -> None:
    """Layers, embedding and head one by one, the rest with the root; no linear layer inside a layer by itself."""
    for actual in results["2"][name]:
        assert actual["modules"]["units"] == EXPECTED_UNITS[name]
        assert actual["modules"]["sharded"]
        assert actual["modules"]["group"]


def test_an_explicit_group(results: dict[str, Any]) -> None:
    """A group of the same ranks made by hand: every bit the same."""
    for own, other in zip(results["2"]["tied"], results["2"]["new groups, offload"], strict=True):
        assert own["norms"] == other["norms"]
        assert torch.equal(own["after"], other["after"])
        assert all(torch.equal(own["weights"][key], other["weights"][key]) for key in own["weights"])


def test_state_is_sharded(results: dict[str, Any]) -> None:
    """Each of two ranks holds half of the moments, each of four a quarter (rows do not always divide)."""
    (whole,) = results["1"]["tied"]
    for world, name, size in (("2", "tied", 2), ("4", "dp4", 4)):
        held = [actual["moments"] for actual in results[world][name]]
        assert sum(held) == whole["moments"]
        assert max(held) <= 1.1 * whole["moments"] / size


def test_offload_between_steps(results: dict[str, Any]) -> None:
    """Memory comes back as it was: every bit of the run is that of one that never gave it away."""
    for stayed, moved in zip(results["2"]["tied"], results["2"]["new groups, offload"], strict=True):
        assert moved["freed"] > 4 * 3 * 51_000 / 2  # two ranks share FP32 parameters, gradients and moments at least
        assert moved["left"] == 0
        assert moved["norms"] == stayed["norms"]
        assert all(torch.equal(moved["weights"][key], stayed["weights"][key]) for key in stayed["weights"])


def test_frozen_weights_stay(results: dict[str, Any]) -> None:
    """To the bit."""
    for actual in results["2"]["frozen"]:
        moved = {key for key, start in actual["start"].items() if not torch.equal(actual["weights"][key], start)}
        assert moved == {k for k in actual["start"] if not k.startswith(("model.embed", "model.layers.1."))}


@pytest.mark.parametrize(("world", "name"), EXPORTS)
def test_weights_leave_as_a_hugging_face_checkpoint(results: dict[str, Any], root: Path, world: str, name: str) -> None:
    case = (TWO_RANKS if world == "2" else FOUR_RANKS)[name]
    assert_exported(root / case.export, results[world][name])
