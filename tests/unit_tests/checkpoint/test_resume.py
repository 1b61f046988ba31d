"""A resumed run is the run that never stopped, and may go on under another layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import selection
from tests.helpers.distributed import run_ranks
from tests.unit_tests.checkpoint.resume_cases import SAVED, STEPS, Run, refused_all, run_all
from tests.unit_tests.distributed.test_layout_invariance import ALGORITHMS, write_inputs

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

EP2 = "experts ep2"  # a mixture
FULL = {
    1: {"full 1": Run("1")},
    2: {
        "full dp2": Run("dp2", background=True),
        "full tp2": Run("tp2"),
        "full ep2": Run(EP2),
        "full bf16": Run("dp2", dtype="bf16"),
        "full fsdp": Run("fsdp 2", hf_final=True),
    },
}
RESUMED = {
    1: {
        "1 from 1": Run("1", "full 1"),
        "1 from tp2": Run("1", "full tp2"),
        "1 from ep2": Run("experts 1", "full ep2"),
        "fsdp 1 from fsdp 2": Run("fsdp 1", "full fsdp"),
    },
    2: {
        "dp2 from dp2": Run("dp2", "full dp2"),
        "pp2 from tp2": Run("pp2", "full tp2"),
        "ep2 from ep2": Run(EP2, "full ep2"),
        "tp2 from ep2": Run("experts tp2-sp-ep2", "full ep2"),
        "bf16 from bf16": Run("dp2", "full bf16", background=True, dtype="bf16"),
        "bf16 tp2 from dp2": Run("tp2", "full bf16", dtype="bf16"),
        "fsdp from fsdp": Run("fsdp 2", "full fsdp", background=True),
    },
}
# Of each kind, the rest as well in `make test-full`.
if not selection.FULL:
    RESUMED[1] = {name: RESUMED[1][name] for name in ("1 from tp2", "fsdp 1 from fsdp 2")}
    del RESUMED[2]["tp2 from ep2"], RESUMED[2]["bf16 tp2 from dp2"], FULL[1]
    # bfloat16 and experts are in test_layouts.py, too.
    del RESUMED[2]["bf16 from bf16"], FULL[2]["full bf16"], RESUMED[2]["ep2 from ep2"], FULL[2]["full ep2"]
# Runs on one engine from a checkpoint of the other, and how the refusal names both.
OTHER_ENGINE = {
    "fsdp from megatron": (Run("fsdp 2", "full dp2"), "engine: 'megatron' -> 'fsdp'"),
    "megatron from fsdp": (Run("dp2", "full fsdp"), "engine: 'fsdp' -> 'megatron'"),
}
SAME_LAYOUT = {
    name: run.source
    for of in RESUMED.values()
    for name, run in of.items()
    if run.layout == {n: full.layout for whole in FULL.values() for n, full in whole.items()}[run.source]
}
OTHER_LAYOUT = {name: run.source for of in RESUMED.values() for name, run in of.items() if name not in SAME_LAYOUT}
AFTER = range(SAVED + 1, STEPS + 1)  # the steps of a resumed run
MACHINE = ("time/", "perf/", "memory/", "checkpoint/")  # metrics that tell of it rather than of training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """Whole runs first; then, in fresh processes, what is resumed from their checkpoint after step 2."""
    actual: dict[str, Any] = {}
    for stage in (FULL, RESUMED):
        for world_size, wanted in stage.items():
            actual |= run_ranks(world_size, run_all, str(folder), wanted, timeout_s=180)[0]
    return actual


def metrics(folder: Path, run: str) -> dict[int, dict[str, float]]:
    """The records of a run by step, without what tells of time and machine."""
    records: dict[int, dict[str, float]] = {}
    for line in (folder / run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        assert step not in records
        records[step] = {name: value for name, value in record.items() if not name.startswith(MACHINE)}
    return records


@pytest.mark.parametrize("run", [*SAME_LAYOUT, *OTHER_LAYOUT])
def test_a_checkpoint_holds_every_weight(runs: dict[str, Any], run: str) -> None:
    """Actor and critic, every bit, under whatever layout they are loaded; Adam's counters too, each its own."""
    full = runs[(SAME_LAYOUT | OTHER_LAYOUT)[run]]
    saved, loaded = full["steps"][SAVED - 1], runs[run]["first"]
    assert runs[run]["start"] == SAVED
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert any(name.startswith("critic") for name in saved)
    updates = 2.0 * ALGORITHMS["ppo"].epochs  # a step: two mini-batches, each once an epoch
    assert set(runs[run]["counters"]) == {updates * SAVED}
    assert set(runs[run]["last counters"]) == {updates * STEPS}


@pytest.mark.parametrize("run", list(SAME_LAYOUT))
def test_a_resumed_run_is_bit_equal(folder: Path, runs: dict[str, Any], run: str) -> None:
    """Metrics and weights of the steps after the saved one."""
    full = SAME_LAYOUT[run]
    expected, actual = metrics(folder, full), metrics(folder, run)
    assert list(expected) == list(range(STEPS + 1))
    assert actual == {step: expected[step] for step in AFTER}
    assert actual[4].keys() > actual[3].keys()  # step 4 validates
    assert actual[3]["kl/reference_step"] == 3.0
    assert actual[3]["kl/reference_distance"] > 0.0  # of a reference that is neither the policy nor its start
    for after_full, after_resume in zip(runs[full]["steps"][SAVED:], runs[run]["steps"], strict=True):
        assert all(torch.equal(after_full[name], after_resume[name]) for name in after_full)
    assert_same_tokens(runs[full]["tokens"], runs[run]["tokens"])


def assert_same_tokens(whole: list[torch.Tensor], resumed: list[torch.Tensor]) -> None:
    """Of the steps after the saved one and the validations after every second and the last of them."""
    assert len(resumed) == len(AFTER) + len({step for step in AFTER if step % 2 == 0 or step == STEPS})
    assert len(whole) > len(resumed)
    for full, after in zip(whole[-len(resumed) :], resumed, strict=True):
        assert torch.equal(full, after)


@pytest.mark.parametrize("run", [run for run in OTHER_LAYOUT if "bf16" not in run])
def test_a_run_resumed_under_another_layout_agrees(folder: Path, runs: dict[str, Any], run: str) -> None:
    """The same tokens; metrics of the first step to 1e-6 of their size, or of one, since they are means of terms of
    that size: sums in another order; a maximum is a single term and gets 1e-5. Later to 1e-4, as between whole runs on
    two layouts, and weights to 1e-5.

    In bfloat16 such sums round to other values, and samples part.
    """
    full = OTHER_LAYOUT[run]
    expected, actual = metrics(folder, full), metrics(folder, run)
    for step in AFTER:
        assert actual[step].keys() == expected[step].keys()
        tolerance = 1e-6 if step == SAVED + 1 else 1e-4
        for name, value in expected[step].items():
            if name.endswith("num_microbatches") or name.startswith("rollout/logprob_diff"):
                continue
            bound = max(tolerance, 1e-5) if name.endswith("_max") else tolerance
            assert math.isclose(actual[step][name], value, rel_tol=bound, abs_tol=1e-6), (step, name)
    assert_same_tokens(runs[full]["tokens"], runs[run]["tokens"])
    end, resumed_end = runs[full]["steps"][-1], runs[run]["steps"][-1]
    assert max(float((end[name] - resumed_end[name]).abs().max()) for name in end) <= 1e-5
    moved = max(float((end[name] - runs[run]["first"][name]).abs().max()) for name in end)
    assert moved > 1e-3


def test_engine_resumes_only_its_own_checkpoints(folder: Path, runs: dict[str, Any]) -> None:
    """One line, the same on both ranks, that names both."""
    wanted = {name: run for name, (run, _) in OTHER_ENGINE.items()}
    first, second = run_ranks(2, refused_all, str(folder), wanted)
    assert first == second
    for name, (_, difference) in OTHER_ENGINE.items():
        assert f"is of another run ({difference}); set checkpoint.resume=never to start anew" in first[name]
        assert len(first[name].splitlines()) == 1


def test_the_last_weights_are_a_hugging_face_checkpoint(folder: Path, runs: dict[str, Any]) -> None:
    """`checkpoint.hf_final` of a run on the FSDP engine: every bit of the actor, with its tokenizer."""
    exported = folder / "full fsdp" / "hf" / f"step_{STEPS:06d}"
    on_disk = load_file(exported / "model.safetensors")
    expected = runs["full fsdp"]["steps"][-1]
    assert {f"actor {name}" for name in on_disk} == {name for name in expected if name.startswith("actor ")}
    assert all(torch.equal(tensor, expected[f"actor {name}"]) for name, tensor in on_disk.items())
    assert (exported / "tokenizer.json").exists()
