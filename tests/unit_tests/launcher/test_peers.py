"""Errors of a rank that another one brought down."""

from __future__ import annotations

import pytest

from mega_rl.launcher.peers import innocence
from mega_rl.launcher.ranks import LOST_PEER, WAITED_IN_VAIN

GONE = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
LATE = RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv")


class DistNetworkError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GONE, LOST_PEER),
        (LATE, WAITED_IN_VAIN),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
                      "prematurely.\nLast error:\nNET/Socket : remote process exited or there was a network error"),
         LOST_PEER),
        (DistNetworkError("The client socket has failed"), LOST_PEER),
        (RuntimeError("shapes do not match"), None),
        (ValueError("gloo Connection closed by peer"), None),
    ],
)  # fmt: skip
def test_innocent_errors(error: Exception, code: int | None) -> None:
    assert innocence(error) == code


def test_the_first_error_of_a_chain_decides() -> None:
    """Groups that are closed while an error is on its way lose their peers."""

    def fails_while(first: Exception, second: Exception) -> Exception:
        try:
            try:
                raise first
            finally:
                raise second
        except Exception as error:
            return error

    assert innocence(fails_while(ValueError("a bug"), RuntimeError(str(GONE)))) is None
    assert innocence(fails_while(RuntimeError(str(GONE)), ValueError("cannot close"))) == LOST_PEER
