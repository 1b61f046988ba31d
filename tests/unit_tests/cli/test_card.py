"""`mega-rl card`: what is proved of a model, as a page, as JSON and as an exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.cli.app import main
from mega_rl.rollout import decoding
from mega_rl.verify import launcher
from mega_rl.verify.layouts import FP32
from tests.helpers.hub_server import folder_files, serve_hub, use_hub
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.engines.any_model_cases import rewrite_config, small_config
from tests.unit_tests.verify.cases import bare_config, forked_ranks

pytestmark = pytest.mark.timeout(300)


def card_of(model: Path, *arguments: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]], str]:
    """(exit code, card, its proofs by name, page) of `mega-rl card`."""
    out = model / "card"
    code = main(["card", str(model), "--out", str(out), *arguments])
    card = json.loads((out / "card.json").read_text())
    return code, card, {one["name"]: one for one in card["proofs"]}, (out / "card.md").read_text()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "run_ranks", forked_ranks())


@pytest.mark.usefixtures("forked")
def test_dense_family_is_proved_on_both_engines(tmp_path: Path) -> None:
    """Every proof, with figures far below the tolerances."""
    code, card, proofs, page = card_of(bare_config(tmp_path / "bare", TINY["qwen3"]), "--layouts", "tp2+sp,pp2")
    assert {name: one["verdict"] for name, one in proofs.items()} == dict.fromkeys(
        ("names", "bits", "logits", "gradients", "layouts", "elements", "packing", "sampling", "plan"), "proved"
    )
    assert (code, card["good"]) == (0, True)
    assert [layout["name"] for layout in card["layouts"]] == ["1", "fsdp1", "tp2+sp", "pp2", "fsdp2"]
    for layout in card["layouts"]:
        errors = layout["errors"]
        assert len(errors["gradients"]) == len(errors["weights"]) > 20
        assert 0 < max(errors["gradients"].values()) < FP32["gradient"] / 5
        assert 0 < errors["logprob_error"] < FP32["logprob"] / 5
    assert proofs["packing"]["figure"] == "packed"
    assert f"transformers {card['versions']['transformers']}" in page
    assert "| gradients | proved | 1 " in page


@pytest.mark.usefixtures("forked")
def test_model_without_table_has_the_half_of_fsdp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_config("lfm2").save_pretrained(tmp_path)
    code, card, proofs, page = card_of(tmp_path)
    assert code == 0, page
    assert [layout["name"] for layout in card["layouts"]] == ["fsdp1", "fsdp2"]
    not_run = {name for name, one in proofs.items() if one["verdict"] == "not run"}
    assert not_run == {"elements", "plan"}
    assert proofs["plan"]["text"] == "model_type=lfm2 has no table"
    assert "not packed: " in proofs["packing"]["text"]
    assert main(["card", str(tmp_path), "--layouts", "tp2", "--out", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()
    assert "--layouts=tp2: model_type=lfm2 has no table" in capsys.readouterr().err


PLANTED = {  # fault -> (proof and how its text begins, others that fail with it)
    "one gradient": ("gradients", "fsdp1: gradient norm", {"layouts"}),
    "one weight": (
        "bits",
        "fsdp1: tensors not exported bit for bit (model.layers.1.",
        {"logits", "gradients", "layouts"},
    ),
    "names": ("names", "transformers loads model.layers.0.mlp.gate_proj.weight, ", {"gradients", "layouts"}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_not_proved(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ranks, and in rows of the cache; every other proof is made all the same."""

    def first_twice(cache: Any, indices: torch.Tensor) -> None:
        cache.batch_select_indices(torch.zeros_like(indices))

    monkeypatch.setattr(launcher, "run_ranks", forked_ranks(fault))
    monkeypatch.setattr(decoding, "select_rows", first_twice)
    code, card, proofs, page = card_of(bare_config(tmp_path / "bare", TINY["qwen3"]), "--layouts", "tp2")
    proof, begins, others = PLANTED[fault]
    assert (code, card["good"]) == (1, False)
    verdicts = {name for name, one in proofs.items() if one["verdict"] == "not proved"}
    assert verdicts == {proof, "sampling"} | others
    assert proofs[proof]["text"].startswith(begins)
    assert "is not its forward" in proofs["sampling"]["text"]
    assert "| sampling | not proved | " in page


def test_refused_name_has_a_card_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the Hub, whose weights are not asked for."""
    monkeypatch.chdir(tmp_path)
    small_config("stablelm").save_pretrained(tmp_path / "published")
    rewrite_config(tmp_path / "published", model_type="t5")
    with serve_hub() as hub:
        use_hub(hub, tmp_path / "home", monkeypatch)
        hub.add("models", "org/model", folder_files(tmp_path / "published") | {"model.safetensors": b""})
        code, card, _, page = card_of(Path("org/model"))
        assert {Path(one.path).name for one in hub.requests if "/resolve/" in one.path} == {"config.json"}
    assert (code, card["good"]) == (2, False)
    assert "no class with a language-model head" in page
    assert capsys.readouterr().err.count("error: ") == 1


def test_late_proof_is_not_proved() -> None:
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    from mega_rl.verify.card import within

    def late() -> tuple[str, str]:
        time.sleep(60)
        return "yes", ""

    assert within(0.05, "packing", late) == ("packing", "not proved", "no", "no answer within 0.05 s")
    assert within(9.0, "packing", lambda: ("packed", "all")) == ("packing", "proved", "packed", "all")
