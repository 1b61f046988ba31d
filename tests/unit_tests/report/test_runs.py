"""Runs as a report reads them: labels, seeds, settings that differ; mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.errors import UserError
from mega_rl.report.runs import differing_keys, labels_of, read_runs, seed_groups
from tests.unit_tests.report.planted import plant


def test_a_run_has_series_of_its_metrics_and_flat_settings(tmp_path: Path) -> None:
    (run,) = read_runs([plant(tmp_path / "a", steps=5)])
    assert list(run.series["reward/mean"].steps) == [1, 2, 3, 4, 5]
    assert run.config == {"trainer.seed": "0", "trainer.run_dir": str(tmp_path / "a"), "optim.lr": "1e-06"}
    assert (run.label, run.last_step) == ("a", 5)


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    with (plant(tmp_path / "a", steps=5) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert read_runs([tmp_path / "a"])[0].last_step == 5


def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path: Path) -> None:
    seeds = [
        plant(tmp_path / f"s{seed}", settings={
            "trainer": {"seed": seed, "run_dir": str(tmp_path / f"s{seed}")},
            "data": {"train_files": [f"{tmp_path}/s{seed}/data/train.jsonl"]},
        })
        for seed in (0, 1)
    ]  # fmt: skip
    other = plant(tmp_path / "other", settings={"optim": {"lr": 2e-6}})
    runs = read_runs([seeds[0], other, seeds[1]])
    assert seed_groups(runs) == [[0, 2], [1]]
    assert "optim.lr" in differing_keys(runs)


def test_a_run_whose_first_step_goes_on_has_no_series_yet(tmp_path: Path) -> None:
    (plant(tmp_path / "a") / "metrics.jsonl").unlink()
    (run,) = read_runs([tmp_path / "a"])
    assert (run.series, run.last_step, run.config["optim.lr"]) == ({}, 0, "1e-06")


def test_runs_without_a_config_are_no_seeds_of_one_another(tmp_path: Path) -> None:
    for name in "ab":
        (plant(tmp_path / name) / "config.yaml").unlink()
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert seed_groups(runs) == [[0], [1]]
    assert differing_keys(runs) == []


def test_labels_are_the_shortest_that_differ() -> None:
    assert labels_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert labels_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]


def test_a_mistake_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder; give the folder of a run"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        read_runs([tmp_path])
    run = plant(tmp_path / "a")
    with pytest.raises(UserError, match="is given twice"):
        read_runs([run, tmp_path / "b" / ".." / "a"])
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        read_runs([run])
    (run / "config.yaml").write_text("a: &a [x]\nb: *a\n")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read: line 1: anchors"):
        read_runs([run])
    (run / "config.yaml").unlink()
    (run / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read: .* line 1"):
        read_runs([run])
