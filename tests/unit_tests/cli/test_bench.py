"""`mega-rl bench learn`: tables, files, exit codes, signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mega_rl.cli.app import main
from mega_rl.verify.learn import run
from mega_rl.verify.learn.tasks import TASKS, Curve, LearningTask, Variant
from tests.unit_tests.verify.tiny_task import TINY

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose runs are made up."""

    def run_task(task: LearningTask, variants: list[Variant], *, seeds: Sequence[int]) -> dict[str, list[Curve]]:
        ends = {"right": 0.9, "wrong": 0.2}
        return {
            variant.name: [Curve(seed, ((1, 0.1), (2, ends[variant.name] + 0.01 * seed)), 1.0) for seed in seeds]
            for variant in variants
        }

    monkeypatch.setattr(run, "run_task", run_task)
    monkeypatch.setitem(TASKS, "tiny", TINY)
    monkeypatch.setitem(TASKS, "upside_down", replace(TINY, name="upside_down", better="lower"))


@pytest.mark.usefixtures("tiny")
def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds", "3", "--first-seed", "0", "--json", str(tmp_path / "r.json")]
    assert main(["bench", "learn", "tiny", *arguments]) == 0
    out = capsys.readouterr().out
    assert "0.91" in out
    assert "holds: right: beats wrong, bands apart" in out
    (record,) = json.loads((tmp_path / "r.json").read_text())
    assert record["holds"] is True
    assert record["variants"][0]["final"]["mean"] == pytest.approx(0.91)
    assert [seed["seed"] for seed in record["variants"][1]["seeds"]] == [0, 1, 2]
    assert [seed["points"][-1][1] for seed in record["variants"][1]["seeds"]] == pytest.approx([0.2, 0.21, 0.22])


@pytest.mark.usefixtures("tiny")
def test_failed_statement_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "learn", "tiny", "upside_down", "--seeds", "2"]) == 1
    out = capsys.readouterr().out
    assert "FAILS: right: beats wrong" in out


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "step"), (signal.SIGINT, "step"), (signal.SIGTERM, "last step"), (signal.SIGINT, "between runs")],
)
def test_signal_stops_the_command_without_results(
    number: signal.Signals,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps of two prompts and two samples: the second seed's first reward is the fifth."""
    calls: list[str] = []

    def reward(prompt: str, response: str) -> float:
        calls.append(response)
        if len(calls) == {"step": 9, "last step": 13}.get(moment):
            os.kill(os.getpid(), number)
        return float(prompt == response)

    write_model = run.write_model

    def interrupted(folder: Path, vocabulary: str, *, stop: str, seed: int) -> None:
        if seed == 1 and moment == "between runs":
            os.kill(os.getpid(), number)
        write_model(folder, vocabulary, stop=stop, seed=seed)

    monkeypatch.setattr(run, "write_model", interrupted)
    short: dict[str, object] = {
        "trainer.steps": 2,
        "trainer.prompts_per_step": 2,
        "trainer.minibatch_size": 2,
        "rollout.n": 2,
        "rollout.max_new_tokens": 1,
        "algorithm.advantage": "rloo",
    }
    monkeypatch.setitem(TASKS, "tiny", replace(TINY, reward=reward, settings=short))
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    results = tmp_path / "results.json"
    arguments = ["--seeds", "3", "--first-seed", "0", "--json", str(results)]
    assert main(["bench", "learn", "tiny", *arguments]) == 128 + number
    printed = capsys.readouterr()
    line = f"stopped by {number.name}: the run in progress does not count, no results are written"
    assert printed.err.count(line) == 1
    assert "Traceback" not in printed.err
    assert "tiny, right, seed 0" in printed.err
    assert "tiny, right, seed 1" not in printed.err
    assert "95 %" not in printed.out
    assert not results.exists()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_mistakes_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "learn", "sortin"]) == 2
    assert capsys.readouterr().err.startswith("error: sortin: is not a task; legal: bandit ")


def test_page_has_the_recorded_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    import learn_page  # type: ignore[import-not-found]

    results = learn_page.read_results(DOCS / "learning.json")
    assert [result.task.name for result in results] == list(TASKS)
    for result in results:
        assert result.holds
        assert list(result.curves) == [variant.name for variant in result.task.variants]
        assert all([run.seed for run in curves] == [20, 21, 22, 23, 24] for curves in result.curves.values())
    assert f"\n\n{learn_page.markdown_table(results)}\n\n" in (DOCS / "learning.md").read_text(encoding="utf-8")
    learn_page.plot_tasks(results, tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
