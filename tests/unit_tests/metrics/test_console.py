"""The line per step, and the bar below it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from mega_rl.metrics.console import ConsoleSink, GenerationBar, step_line

METRICS = {
    "actor/loss": -0.00213,
    "reward/mean": 0.53125,
    "kl/ref": 0.0123,
    "actor/grad_norm": 0.87654,
    "rollout/response_tokens": 4000.0,
    "rollout/logprob_diff_max": 1.5e-6,
    "time/step_s": 3.2,
    "advantage/mean": 0.0,
}


def test_line_holds_the_important_numbers_in_order() -> None:
    expected = (
        "step 12 | reward 0.5312 | loss -0.0021 | kl 0.0123 | grad 0.877 | diff 1.5e-06 | time 3.20s | 1250 tok/s"
    )
    assert step_line(12, METRICS) == expected
    assert step_line(0, {"val/reward_mean": 0.5}) == "step 0 | val 0.5000"


def test_one_log_line_per_step_and_no_bar_away_from_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    sink = ConsoleSink(progress_bar=True, total_steps=3, console=Console(file=stream, force_terminal=False))
    for step in (1, 2, 3):
        sink.log(step, METRICS)
    sink.close()
    assert [record.getMessage() for record in caplog.records] == [step_line(step, METRICS) for step in (1, 2, 3)]
    assert stream.getvalue() == ""


@contextmanager
def root_logging_to(stream: io.StringIO) -> Iterator[logging.StreamHandler[io.StringIO]]:
    """Logging set up on a standard error that the test can read."""
    handler, root = logging.StreamHandler(stream), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_bar_counts_steps_stays_below_the_log_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(file=stream, force_terminal=True, width=200, color_system=None)
    with root_logging_to(stream) as handler:
        sink = ConsoleSink(progress_bar=True, total_steps=40, console=console)
        assert handler.stream is not stream, "the log goes through the bar's stream while there is a bar"
        sink.log(17, METRICS)
        sink.close()
        assert handler.stream is stream
        assert sys.stderr is stream
        sink.close()
    text = stream.getvalue()
    assert step_line(17, METRICS) in text
    assert text.rindex("17/40") > text.index(step_line(17, METRICS))
    assert "reward 0.531" in text[text.rindex("17/40") :]


def test_a_generation_shows_itself_below_the_bar_while_it_lasts() -> None:
    stream = io.StringIO()
    generation = GenerationBar()
    generation.show(1, 8, 10.0)  # before there is a bar
    sink = ConsoleSink(
        progress_bar=True, total_steps=3, console=Console(file=stream, force_terminal=True), generation=generation
    )
    generation.show(2, 8, 123.4)
    assert sink._progress is not None
    (task,) = [task for task in sink._progress.tasks if task.total == 8]
    assert (task.completed, task.visible, task.description) == (2, True, "samples, 123 tok/s")
    generation.show(8, 8, 120.0)
    assert not task.visible
    generation.show(1, 4, 50.0)  # the next one
    assert (task.completed, task.total, task.visible) == (1, 4, True)
    sink.close()
    generation.show(2, 4, 50.0)  # after it
    assert task.completed == 1
