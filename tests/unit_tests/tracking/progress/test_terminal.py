"""The live line, and the log above it."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mega_rl.tracking import progress
from mega_rl.tracking.progress import Phase, terminal
from mega_rl.tracking.progress.terminal import Display, live_line, show_progress
from tests.helpers.terminal import record

LONGEST_S = 2.0
BUSY = """
import time
from mega_rl.tracking import progress
from mega_rl.tracking.progress.terminal import show_progress
from mega_rl.tracking.metrics.tables import RoleFacts, show_startup
import logging
show_progress()
with progress.rounds("step", 3) as steps, progress.phase("generate", total=8, unit="rows"):
    time.sleep(0.6)
    logging.getLogger("mega_rl").info("a line above the live one, longer than the terminal is wide: /a/path/to/keep")
    steps.advance()
    show_startup([RoleFacts("actor", model="a/model")])
    time.sleep(0.6)
print("the end")
"""


def phase(name: str, *, seconds: float = 0.0, **facts: object) -> Phase:
    made = Phase(name, **facts)  # type: ignore[arg-type]
    made.began -= seconds
    return made


def test_the_live_line_has_the_round_the_innermost_phase_and_the_time_left() -> None:
    steps = phase("step", seconds=60.5, total=60, done=5, rounds=True)
    steps.first = 0
    steps.advance()
    generate = phase("generate", seconds=3.2, total=256, done=34, unit="rows")
    generate.note = "token 7/64"
    outer = phase("preparing", seconds=70)
    assert live_line((outer, steps, generate))[2:] == "step 7/60 · generate 34/256 rows token 7/64 0:03 · ~9:04 left"
    assert live_line((phase("reading", total=1.5e9, done=4e8, unit="B"),))[2:] == "reading 400/1,500 MB 0:00"
    assert live_line((phase("waiting", seconds=61, deadline_s=600),))[2:] == "waiting 1:01 of at most 10:00"
    assert live_line(()) == ""


def test_work_of_another_thread_stands_beside_what_the_trainer_does() -> None:
    samples = phase("samples", total=8, done=2)
    samples.thread = 0
    assert live_line((phase("update actor"), samples))[2:] == "update actor 0:00 · samples 2/8"


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Handlers, levels and the form of warnings are put back."""
    root, package = logging.getLogger(), logging.getLogger("mega_rl")
    before = list(root.handlers), root.level, package.level, warnings.formatwarning
    yield
    progress.close()
    logging.captureWarnings(False)
    root.handlers[:], warnings.formatwarning = before[0], before[3]
    root.setLevel(before[1])
    package.setLevel(before[2])
    logging.getLogger("mega_rl.tracking.progress").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_information_and_foreign_warnings_come_from_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    show_progress()
    show_progress()  # again is harmless
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("foreign\nwarning", UserWarning, stacklevel=1)
    logging.getLogger("mega_rl.anything").info("information")
    logging.getLogger("mega_rl.anything").warning("own warning")
    with progress.phase("loading", announce=True):
        pass
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    if rank == "1":
        assert lines == ["WARNING rank 1: own warning"]
    else:
        assert [line for line in lines if "foreign" not in line] == ["information", "WARNING own warning", "loading"]
        assert sum("UserWarning: foreign warning (" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("announce", "busy_s", "reminder"),
    [
        (True, 0.8, "still waiting for servers 0:00 of at most 0:09"),
        (False, 0.8, "still waiting for servers 0:00 of at most 0:09"),  # as a validation or an evaluation
        (False, 0.0, None),
    ],
)
def test_a_silent_log_without_a_terminal_says_what_goes_on(
    announce: bool,
    busy_s: float,
    reminder: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mega_rl")
    monkeypatch.setattr(terminal, "REMINDER_S", 0.5)
    progress.listen(display := Display(Console(file=io.StringIO())))
    display.written -= 60.0  # other processes may have written since
    with progress.phase("waiting for servers", deadline_s=9, announce=announce):
        time.sleep(busy_s)
        for _ in range(0 if busy_s else 16):  # a log that is not silent needs no reminder
            time.sleep(0.05)
            display.write("a line")
    progress.close()
    assert [line for line in caplog.messages if line.startswith("still")][:1] == [reminder] * (reminder is not None)


def test_a_silent_phase_shows_that_time_passes_and_log_lines_stand_above_the_line() -> None:
    recording = record([sys.executable, "-c", BUSY], columns=80, timeout_s=30)
    assert recording.exit_code == 0
    silences = [silence for silence, at in recording.silences() if recording.first_s <= at < recording.ended_s - 1.0]
    assert max(silences) < LONGEST_S
    assert "step 1/3 · generate 0/8 rows" in recording.text
    assert re.search(r"step 2/3 · generate 0/8 rows 0:0\d · ~0:0\d left", recording.text)
    kept = recording.screen()
    assert "a line above the live one, longer than the terminal is wide: /a/path/to/keep" in kept
    assert "\nrole   trains  model" in kept, "a table begins on a line of its own"
    assert kept.rstrip().endswith("the end"), "the line is gone at the end"


def test_a_program_outlives_the_reader_of_its_lines(tmp_path: Path) -> None:
    """As of `| head`: rich would end the program at the next line."""
    program = "import logging, time; from mega_rl.tracking.progress import show_progress; show_progress()\n"
    program += "for number in range(3): logging.getLogger('mega_rl').info('line %d', number); time.sleep(0.3)\n"
    program += "open('whole', 'w')"
    command = f'"{sys.executable}" -c "$0" 2>&1 | head -1'
    assert "line 0" in subprocess.check_output(["sh", "-c", command, program], cwd=tmp_path, text=True)
    assert (tmp_path / "whole").exists()


def test_control_characters_are_escaped_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x1b]0;title\x07b\r\n17:00:00 step 99\x9bm\u202eevil\u2028 kept: é 日\u3000本 \U0001f600"
    show_progress(live=False)
    try:
        logging.getLogger("mega_rl.x").warning("%s", hostile)
        try:
            raise ValueError(hostile)
        except ValueError:
            logging.getLogger("mega_rl.x").exception("failed")
    finally:
        progress.close()
    written = capsys.readouterr().err
    shown = "a\\x1b[2J\\x1b]0;title\\x07b\\r\\n17:00:00 step 99\\x9bm\\u202eevil\\u2028 kept: é 日\u3000本 \U0001f600"
    assert shown in written
    assert not [line for line in written.splitlines() if line.startswith("17:00:00 step")]
    assert not set(written) & set("\x1b\x07\r\x9b\u202e\u2028")
