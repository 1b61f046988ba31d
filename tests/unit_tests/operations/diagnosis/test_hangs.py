"""Four ranks over gloo, of which one stops, dies, skips a collective or never returns: the report names it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from mega_rl.operations.observations import find_py_spy, newest_report
from mega_rl.tracking.health.records import read_records
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.unit_tests.operations.diagnosis.hanging_on_ranks import FAULTY, TIMEOUT_S, WORLD_SIZE, hang

WITHIN_S = TIMEOUT_S + 10.0 + 60.0  # a busy machine starts ranks slowly


def report_of(tmp_path: Path, fault: str) -> tuple[str, str, dict[int, str]]:
    """(last line of the report, the report, what each rank said) after a fault of rank 2."""
    with pytest.raises(RanksFailed) if fault != "loop" else nullcontext():
        run_ranks(WORLD_SIZE, hang, str(tmp_path), fault, timeout_s=WITHIN_S)
    report = newest_report(tmp_path)
    assert report is not None, [path.name for path in (tmp_path / "health").iterdir()]
    lines = {rank: tmp_path / f"line_{rank}.txt" for rank in range(WORLD_SIZE)}
    said = {rank: path.read_text() for rank, path in lines.items() if path.exists()}
    return report[1].rstrip("\n").splitlines()[-1], report[1], said


def check_innocents(said: dict[int, str], cause: str) -> None:
    """Rank 0 says the cause; the others, in one line, where they were."""
    assert said[0].startswith(cause)
    for rank in (1, 3):
        assert "\n" not in said[rank]
        assert re.search(r"(waited 3 s|lost the connection).* in '\w[\w ]+' of step 3", said[rank]), said


def test_stopped_rank_is_named_with_its_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cause, text, said = report_of(tmp_path, "stop")
    pid = read_records(tmp_path)[FAULTY].pid
    assert re.match(rf"rank 2 \(pid {pid}, \S+\) is stopped \(state T\)", cause)
    assert re.search(r"last seen in 'update actor' of step 3, while rank.* waits? for it in \w+ all_reduce \d+$", cause)
    assert re.search(r"dp all_reduce \d+ of ranks 0, 2: rank 0 for \d+ s; not there: rank 2", text)
    if find_py_spy() is not None:
        assert re.search(r"Stacks of rank 2\n  Thread .*\n +fail \(.*hanging_on_ranks\.py:\d+\)", text), text
    check_innocents(said, cause)
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 1
    assert capsys.readouterr().out.rstrip("\n").endswith(cause)


def test_killed_rank_is_named(tmp_path: Path) -> None:
    cause, _, said = report_of(tmp_path, "kill")
    # Without a launcher nobody has its exit code.
    assert re.match(r"rank 2 \(pid \d+, \S+\) has died without a word, last seen in", cause)
    check_innocents(said, cause)


def test_rank_that_skips_a_collective_has_diverged(tmp_path: Path) -> None:
    cause, text, _ = report_of(tmp_path, "skip")
    assert re.fullmatch(
        r"diverged: rank 2 waits in world all_reduce \d+ while rank 0 waits for it in dp all_reduce \d+", cause
    ), text


def test_endless_reward_is_named_with_its_line(tmp_path: Path) -> None:
    """The rank is interrupted there, and ends by itself."""
    cause, _, said = report_of(tmp_path, "loop")
    assert (tmp_path / "hung.txt").read_text().startswith("rank 2")
    assert re.match(
        r"rank 2 \(pid \d+, \S+\) hung in reward function spin at \S+hanging_on_ranks.py:\d+ in 'reward' of step 3",
        cause,
    ), cause
    assert said[0].startswith(cause)
