"""A stop request of one rank is one of all, and a second Ctrl-C does not wait."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from torch import Tensor

from mega_rl.parallel.comm import SingleRank
from mega_rl.tracking import progress
from mega_rl.trainer.loop import StopRequest


class WithAnother(SingleRank):
    """Two ranks, the other of which has been sent signal `received`."""

    def __init__(self, received: int) -> None:
        self.received = received

    def max(self, tensor: Tensor) -> Tensor:
        return tensor.clamp(min=self.received)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The process's own handlers come back, whatever a test does, and no answer is left for the next test's log."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    join_answers()
    for number, handler in before.items():
        signal.signal(number, handler)


def join_answers() -> None:
    """Wait for the threads that answer signals."""
    for thread in threading.enumerate():
        if thread.name == "answer to a signal":
            thread.join()


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_this_rank(number: signal.Signals) -> None:
    """It is remembered: every later question has the same answer."""
    stop = StopRequest(SingleRank())
    send(number)
    assert stop()
    assert stop()
    assert stop.exit_code == 128 + number


def test_a_signal_to_another_rank() -> None:
    """A rank that went on alone would wait for the others in its next collective."""
    stop = StopRequest(WithAnother(signal.SIGTERM))
    assert stop()
    assert stop.exit_code == 143


def test_a_signal_while_the_ranks_talk_is_not_lost() -> None:
    """It came too late for this question, which all ranks must answer alike; the next one finds it."""

    class Slow(SingleRank):
        def max(self, tensor: Tensor) -> Tensor:
            if not tensor:
                send(signal.SIGTERM)
            return tensor.clone()

    stop = StopRequest(Slow())
    assert not stop()
    assert stop.exit_code == 0
    assert stop()
    assert stop.exit_code == 143


def test_the_first_interrupt_is_answered_at_once_and_a_second_does_not_wait(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "mega_rl")
    stop = StopRequest(SingleRank())
    with progress.rounds("step", 60, done=6):
        send(signal.SIGINT)
        join_answers()
    assert caplog.messages == ["SIGINT: finishing step 7, then saving; Ctrl-C again stops at once"]
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert stop()
    assert "interrupted: ended at once, without a checkpoint of the step in progress\n" in capfd.readouterr().err


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = StopRequest(SingleRank())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    stop.restore()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
