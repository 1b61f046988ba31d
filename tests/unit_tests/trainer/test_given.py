"""Learning from given answers: TRL's numbers on one rank, those of one rank on layouts, and resuming.

1e-5 in float32: a loss is a mean of some tens of log-probs, each with a rounding of 1e-6, over 20 steps of Adam.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.given import LAYOUTS, SETTINGS, train_given, write_inputs
from tests.helpers.selection import FULL
from tests.peers import package

KINDS = ("sft", "dpo", "rm")
OF_TRL = (*KINDS, "kto", "ipo", "simpo", "orpo")
NEAR = 1e-5
# Every layout and every kind once; `make test-full` has all pairs.
TELLING = [("sft", "tp2"), ("dpo", "dp2"), ("rm", "pp2"), ("dpo", "cp2"), ("rm", "fsdp2"), ("kto", "dp2")]
WIDE = [(kind, layout) for kind in (*KINDS, "kto") for layout, (size, _) in LAYOUTS.items() if size == 2]
MISSING = package.missing("trl")


def run_cases(rank: int, folder: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {case: train_given(folder, *case) for case in cases}


def run_alone(rank: int, folder: str) -> dict[str, Any]:
    """Every kind on one rank; DPO with the reference's log-probs computed once, and with adapters; a resumed run."""
    answers: dict[str, Any] = {kind: train_given(folder, kind, "1") for kind in OF_TRL}
    answers["scores"] = exported_scores(folder)
    for name, rank in (("dpo", 0), ("adapted", 4)):
        for when in ("step", "once"):
            more = {"model.adapter.rank": rank, "algorithm.kind.reference": when}
            run_dir = f"{folder}/runs/{name}-{when}"
            answers[f"{name} {when}"] = train_given(folder, "dpo", "1", **more, **{"trainer.run_dir": run_dir})
    return answers | resumed(folder)


def exported_scores(folder: str) -> torch.Tensor:
    """Train a reward model for a step, write it for transformers, and score all answers, [rows]."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.loader import load
    from mega_rl.trainer.assemble import running

    own = {"model.path": f"{folder}/rm", "data.train_files": [f"{folder}/rm.jsonl"], "algorithm.kind": "rm"}
    more = {"trainer.steps": 1, "checkpoint.hf_final": True, "trainer.run_dir": f"{folder}/runs/scores"}
    with running([load(None, {**SETTINGS, **own, **more})], accelerator) as ((trainer,), _):
        trainer.fit()
        source, actor = trainer.batches, trainer.algorithm.actor  # type: ignore[attr-defined]
        rows = source.rows(source.order.take(0, 80)).rows  # type: ignore[attr-defined]
        return (actor.evaluate(rows).values * rows.loss_mask).sum(dim=1)


def resumed(folder: str) -> dict[str, Any]:
    """The weights after six steps, without and with a break after three; and the losses on held-out rows."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.loader import load
    from mega_rl.trainer.assemble import running
    from tests.helpers.engines import exported

    answers: dict[str, Any] = {}
    own = {"model.path": f"{folder}/dpo", "data.train_files": [f"{folder}/dpo.jsonl"], "algorithm.kind": "dpo"}
    more = {
        "algorithm.kind.reference": "once", "data.shuffle": True, "data.val_files": [f"{folder}/dpo.jsonl"],
        "trainer.val_interval": 6, "trainer.steps": 6, "checkpoint.save_interval": 3, "checkpoint.keep": 9,
        "trainer.prompts_per_step": 32, "trainer.minibatch_size": 16, "checkpoint.resume": "auto",
    }  # fmt: skip
    for name in ("whole", "again"):
        run_dir = Path(folder, "runs", name)
        if name == "again":
            shutil.copytree(Path(folder, "runs/whole"), run_dir)
            shutil.rmtree(run_dir / "checkpoints/step_000006")
        config = load(None, {**SETTINGS, **own, **more, "trainer.run_dir": str(run_dir)})
        with running([config], accelerator) as ((trainer,), _):
            answers[f"{name} start"] = trainer.start
            trainer.fit()
            answers[name] = exported(trainer.algorithm.actor.engine)  # type: ignore[attr-defined]
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        answers[f"{name} log"] = {line["step"]: line for line in lines}
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = run_ranks(1, run_alone, str(folder))[0]
    return answers


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[tuple[str, str], Any]:
    cases = WIDE if FULL else TELLING
    answers: dict[tuple[str, str], Any] = run_ranks(2, run_cases, str(folder), cases, timeout_s=600.0)[0]
    return answers


def same_training(own: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(own["losses"]) == len(other["losses"])
    assert own["losses"] == pytest.approx(other["losses"], abs=NEAR)
    pairs = [*zip(own["gradients"], other["gradients"], strict=False), (own["weights"], other["weights"])]
    for one, two in pairs:
        distance, name = worst_difference(one, two)
        assert distance < NEAR, name


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_one_rank_gives_trls_numbers(folder: Path, alone: dict[str, Any]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.peers.trl_training", str(folder), *OF_TRL]
    process = subprocess.run(
        command, env=package.environment(), cwd=package.ROOT, capture_output=True, text=True, timeout=400
    )
    assert process.returncode == 0, process.stderr[-4000:]
    for kind in OF_TRL:
        peer = torch.load(folder / f"{kind}.pt")
        assert len(alone[kind]["gradients"]) == 2
        same_training(alone[kind], peer)


@pytest.mark.parametrize(("kind", "layout"), WIDE if FULL else TELLING)
def test_layouts_train_as_one_rank(
    kind: str, layout: str, alone: dict[str, Any], on_two: dict[tuple[str, str], Any]
) -> None:
    same_training(on_two[kind, layout], alone[kind])


def test_exported_reward_model_scores_alike_in_transformers(folder: Path, alone: dict[str, Any]) -> None:
    """Within 1e-5: float32 kernels of two implementations, and rows that are padded on one side only."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    exported = folder / "runs/scores/hf/step_000001"
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    rows = [json.loads(line) for line in (folder / "rm.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + row[side] + "<eos>" for row in rows for side in ("chosen", "rejected")]
    with torch.no_grad():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)).logits[:, 0]
    torch.testing.assert_close(alone["scores"], scores, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", ["dpo", "adapted"])
def test_reference_once_gives_the_same_training(alone: dict[str, Any], name: str) -> None:
    """The reference of adapters is their base."""
    same_training(alone[f"{name} once"], alone[f"{name} step"])
    assert alone["adapted step"]["losses"] != alone["dpo step"]["losses"]


def test_resumed_run_has_the_same_bits(alone: dict[str, Any]) -> None:
    assert (alone["whole start"], alone["again start"]) == (0, 3)
    assert all(torch.equal(alone["whole"][name], weight) for name, weight in alone["again"].items())


def test_held_out_loss_before_training_is_that_of_equal_models(alone: dict[str, Any]) -> None:
    first, last = alone["whole log"][0], alone["whole log"][6]
    assert first["val/loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-6)
    assert last["val/loss"] == alone["again log"][6]["val/loss"] < first["val/loss"]
