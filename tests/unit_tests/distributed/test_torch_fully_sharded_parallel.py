"""PyTorch's FSDP2 around Megatron-Core's modules computes what DDP and one rank compute, and shards what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.config.schema import MegatronConfig
from mega_rl.config.schema.engine import TorchFsdpConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import without
from tests.unit_tests.distributed.fsdp_cases import (
    Case,
    Results,
    assert_bf16_like_ddp,
    assert_exported,
    assert_like_one_rank,
    assert_offloaded,
    train_worlds,
)

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

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
    "pp2-vpp2-dp2": Case(FSDP2, parallel=MegatronConfig(pp=2, vpp=2), export="hf pp2-vpp2"),
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
def results(root: Path) -> Results:
    """By world size and case, what every rank found."""
    return train_worlds(run_ranks, root, {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS})


@pytest.mark.parametrize(("world", "name"), SAME_AS_ONE_RANK)
def test_steps_are_those_of_one_rank(results: Results, world: str, name: str) -> None:
    (one,) = results["1"][name if name in ONE_RANK else "tied"]
    assert_like_one_rank(one, results[world][name])


def test_bf16_is_that_of_ddp(results: Results) -> None:
    """FP32 main parameters and gradients on both sides, bf16 in the layers and in what is exported."""
    assert_bf16_like_ddp(results["2"])


def test_a_value_head_is_fp32_in_bf16_too(results: Results) -> None:
    """It trains, and what it says has more than eight bits."""
    for actual in results["2"]["value bf16"]:
        assert actual["norms"][0] > 0
        assert actual["after"].abs().max() > 0
        assert not torch.equal(actual["after"], actual["after"].bfloat16().float())


@pytest.mark.parametrize("name", list(EXPECTED_UNITS))
def test_what_is_sharded(results: Results, name: str) -> None:
    """Layers, embedding and head one by one, the rest with the root; no linear layer inside a layer by itself."""
    for actual in results["2"][name]:
        assert actual["modules"]["units"] == EXPECTED_UNITS[name]
        assert actual["modules"]["sharded"]
        assert actual["modules"]["group"]


def test_an_explicit_group(results: Results) -> None:
    """A group of the same ranks made by hand, memory given away between steps: every bit the same."""
    own, other = results["2"]["tied"], results["2"]["new groups, offload"]
    assert_offloaded(own, other)
    assert all(torch.equal(one["after"], two["after"]) for one, two in zip(own, other, strict=True))


def test_state_is_sharded(results: Results) -> None:
    """Each of two ranks holds half of the moments, each of four a quarter (rows do not always divide)."""
    (whole,) = results["1"]["tied"]
    for world, name, size in (("2", "tied", 2), ("4", "dp4", 4)):
        held = [actual["moments"] for actual in results[world][name]]
        assert sum(held) == whole["moments"]
        assert max(held) <= 1.1 * whole["moments"] / size


def test_frozen_weights_stay(results: Results) -> None:
    """To the bit."""
    for actual in results["2"]["frozen"]:
        moved = {key for key, start in actual["start"].items() if not torch.equal(actual["weights"][key], start)}
        assert moved == {k for k in actual["start"] if not k.startswith(("model.embed", "model.layers.1."))}


@pytest.mark.parametrize(("world", "name"), EXPORTS)
def test_weights_leave_as_a_hugging_face_checkpoint(results: Results, root: Path, world: str, name: str) -> None:
    case = (TWO_RANKS if world == "2" else FOUR_RANKS)[name]
    assert_exported(root / case.export, results[world][name])
