"""A run by measured success, or from streams, goes on from a checkpoint with the same prompts, in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer.dynamic_sampling_on_ranks import REWARD, records
from tests.unit_tests.trainer.order.orders_on_ranks import SAVED, STEPS, Run, on_ranks

ALONE = {
    "whole": Run("1"),
    "resumed": Run("1", "whole"),
    "forgetful": Run("1", "whole", forget=True),
    "dynamic": Run("1", dynamic=True),
    "dynamic resumed": Run("1", "dynamic", dynamic=True),
    "stream": Run("1", kind="stream", dynamic=True),
    "stream resumed": Run("1", "stream", kind="stream", dynamic=True),
    "forgetful stream": Run("1", "stream", kind="stream", dynamic=True, forget=True),
}
LAYOUTS = ("tp2", "dp2", "fsdp 2") if FULL else ()  # on each, and from a checkpoint of one rank
TWO = {f"{layout} whole": Run(layout) for layout in LAYOUTS}
TWO |= {f"{layout} resumed": Run(layout, f"{layout} whole") for layout in LAYOUTS}
TWO |= {f"{layout} from one": Run(layout, "whole") for layout in ("tp2", "dp2") if FULL or layout == "dp2"}
TWO |= {"dp2 dynamic resumed": Run("dp2", "dynamic", dynamic=True)}
TWO |= {"dp2 stream resumed": Run("dp2", "stream", kind="stream", dynamic=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    (inputs / "hopeless.py").write_text(REWARD, encoding="utf-8")
    lines = (inputs / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (inputs / "few.jsonl").write_text("".join(lines[:24]), encoding="utf-8")
    rows = [json.loads(line) for line in lines[24:]]
    for part in range(3):
        table = pa.Table.from_pylist(rows[32 * part : 32 * (part + 1)])
        pq.write_table(table, inputs / f"many-{part}.parquet", row_group_size=7)
    return inputs


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """Results of every rank by run."""
    one = run_ranks(1, on_ranks, str(folder), ALONE, timeout_s=120)
    two = run_ranks(2, on_ranks, str(folder), TWO, timeout_s=240)
    return {name: [one[0][name]] for name in ALONE} | {name: [rank[name] for rank in two] for name in TWO}


def assert_same_end(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """The prompts and weights of the steps after the saved one, bit for bit."""
    assert (whole["start"], resumed["start"]) == (0, SAVED)
    assert resumed["batches"] == whole["batches"][SAVED:]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())


@pytest.mark.parametrize(
    "name", ["resumed", "dynamic resumed", "stream resumed", *(f"{layout} resumed" for layout in LAYOUTS)]
)
def test_a_resumed_run_is_bit_equal(folder: Path, runs: dict[str, Any], name: str) -> None:
    whole = {"resumed": "whole", "dynamic resumed": "dynamic", "stream resumed": "stream"}.get(
        name, name.replace("resumed", "whole")
    )
    assert_same_end(runs[name][0], runs[whole][0])
    expected, actual = records(folder, whole), records(folder, name)
    for record in (*expected.values(), *actual.values()):
        record.pop("data/stream_wait_s", None)
    assert actual == {step: expected[step] for step in range(SAVED + 1, STEPS + 1)}


def test_a_run_that_forgets_its_rates_is_not(runs: dict[str, Any]) -> None:
    """Guards the test above against rates that do not matter."""
    with pytest.raises(AssertionError):
        assert_same_end(runs["forgetful"][0], runs["whole"][0])


def test_a_stream_without_its_position_is_read_from_its_begin(runs: dict[str, Any]) -> None:
    """A position saves the reading of what was drawn, and changes no prompt."""
    assert_same_end(runs["forgetful stream"][0], runs["stream"][0])


@pytest.mark.parametrize("name", TWO)
def test_all_ranks_and_layouts_draw_the_same_prompts(runs: dict[str, Any], name: str) -> None:
    """Rewards are equal to the last bit over layouts, so that rates are."""
    first, second = runs[name]
    assert first["batches"] == second["batches"]
    alone = runs[next((kind for kind in ("dynamic", "stream") if kind in name), "whole")][0]
    assert first["batches"] == alone["batches"][first["start"] :]


def test_rates_are_measured_from_the_first_step_on(folder: Path, runs: dict[str, Any]) -> None:
    metrics = records(folder, "whole")
    assert metrics[1]["data/unseen_fraction"] == pytest.approx(18 / 24)
    assert metrics[STEPS]["data/unseen_fraction"] < metrics[1]["data/unseen_fraction"]
    assert 0 < metrics[STEPS]["data/unsolved_fraction"] < 1
    manifest = json.loads(next((folder / "whole/checkpoints/step_000002").glob("manifest*")).read_text())
    assert manifest["numbers"]["order"] == {}
