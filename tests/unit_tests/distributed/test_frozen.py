"""Weights that `model.frozen` names stay as they are, and the others train as if on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.frozen_cases import FROZEN, LAYOUTS, MISTAKES, selected, train_all

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

# fp32 sums in another order, through clipped steps of Adam whose eps damps what rounding does to it.
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-6
CASES = [(layout, name) for layout in LAYOUTS for name in FROZEN if selected(layout, name)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every rank found, by case."""
    root: Path = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "untied", family="qwen3", tied=False)
    write_tiny_checkpoint(root / "routed", family="qwen3_moe", tied=False)
    actual: dict[str, list[Any]] = {}
    for world_size in (1, 2, 4):
        answers = run_ranks(world_size, train_all, str(root), world_size, timeout_s=240)
        actual |= {case: [answer[case] for answer in answers] for case in answers[0]}
    return actual


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_frozen_weights_keep_every_bit_and_the_others_move(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """On every rank; no more and no less than the patterns say."""
    for actual in ranks[f"{layout} {name}"]:
        assert actual["trainable"]
        moved = {key for key, start in actual["start"].items() if not torch.equal(actual["weights"][key], start)}
        frozen = {key for key in actual["start"] if key.startswith(FROZEN[name].names)}
        assert frozen
        assert moved == actual["start"].keys() - frozen


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[0] != "1"])
def test_the_others_train_as_on_one_rank(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """Gradient norm of every step and weights after the last."""
    (one,) = ranks[f"1 {name}"]
    for many in ranks[f"{layout} {name}"]:
        assert many["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE)
        for key, expected in one["weights"].items():
            assert (many["weights"][key] - expected).abs().max() <= WEIGHT_TOLERANCE, key


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[0] in ("dp2", "pp2")])
def test_checkpoints_of_partly_frozen_models(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """Saved, trained on, loaded and trained on again: the same bits, though some layers have no optimizer state."""
    for actual in ranks[f"{layout} {name}"]:
        assert actual["resumed"]
        assert actual["same"]


@pytest.mark.parametrize("name", list(FROZEN))
def test_recomputation_changes_nothing(ranks: dict[str, list[Any]], name: str) -> None:
    """Layers behind a frozen embedding get the same gradients whether or not they are recomputed."""
    plain, recomputed = name.removesuffix(", recomputed"), name
    (expected,), (actual,) = ranks[f"1 {plain}"], ranks[f"1 {recomputed}"]
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-6)


@pytest.mark.parametrize("name", list(FROZEN))
def test_only_trained_weights_have_optimizer_state(ranks: dict[str, list[Any]], name: str) -> None:
    """As many first moments as elements that train, over all ranks; a tied embedding counts on both its stages."""
    (one,) = ranks[f"1 {name}"]
    trained = {key for key in one["start"] if not key.startswith(FROZEN[name].names)}
    elements = sum(one["start"][key].numel() for key in trained)
    for layout in ("1", "dp2", "dp2 not sharded", "pp2", "pp2 not sharded", "pp2-dp2"):
        if selected(layout, name):
            assert [actual["moments"] for actual in ranks[f"{layout} {name}"]] == [elements] * LAYOUTS[layout][0], (
                layout
            )


@pytest.mark.parametrize("name", list(MISTAKES))
def test_patterns_that_cannot_be_meant(ranks: dict[str, list[Any]], name: str) -> None:
    """An error on all ranks of the pipeline alike, though each sees its own stage only; none for what one stage has."""
    messages = ranks[f"mistake {name}"]
    expected = {
        "no such weight": "model.frozen=['decoder.layers.9.*']: no weight of the model has such a name",
        "the last stage has it": "",
        "everything": "freezes every weight: nothing is left to train",
        "tied output layer": "model.frozen=['output_layer.*']: no weight of the model has such a name",
    }[name]
    for message in messages:
        assert expected in message
        assert bool(message) == bool(expected)


def test_experts_are_numbered_over_the_whole_model(ranks: dict[str, list[Any]]) -> None:
    """Under expert parallelism the second rank's experts are 2 and 3 of 4."""
    for rank, names in enumerate(ranks["experts"]):
        numbers = {int(name.split("local_experts.")[1].split(".")[0]) for name in names}
        assert numbers == {2 * rank, 2 * rank + 1}
