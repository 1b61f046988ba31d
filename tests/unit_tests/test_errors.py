"""Errors of one line for limits of the machine."""

from __future__ import annotations

import errno
import os

import pytest

from mega_rl.errors import RunError, UserError, limits_as_errors


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        RuntimeError("[enforce fail] Resource temporarily unavailable"),  # torch's, of std::thread
    ],
)
def test_a_limit_of_threads_or_processes_is_one_line(error: Exception) -> None:
    pattern = r"^\S+ allows no further thread or process \(.*\); raise 'ulimit -u', or"
    with pytest.raises(RunError, match=pattern), limits_as_errors():
        raise error


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError(errno.EIO, "y"), UserError("z"), RunError("u")])
def test_other_errors_stay(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, limits_as_errors():
        raise error
    assert raised.value is error
