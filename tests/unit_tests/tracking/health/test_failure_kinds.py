"""Kinds of failures: errors of torch's backends, of the run, and of a user's code; and the age of collectives."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mega_rl.errors import HungError, RunError, StalledError, UserError
from mega_rl.tracking.health import flight_recorder
from mega_rl.tracking.health.records import LOST_PEER_CODE, TIMEOUT_CODE, innocent_code, kind_of

GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GONE), "lost peer"),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), "lost peer"),
        (RuntimeError("[/gloo/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"), "timeout"),
        (RuntimeError("Application timeout caused pair closure"), "lost peer"),
        (RuntimeError("my code: Application timeout caused pair closure"), "error"),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error.\nLast error:\nNET/Socket : "
                      "remote process exited or there was a network error"), "lost peer"),
        (dist.DistBackendError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "timeout"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), "lost peer"),
        (dist.DistStoreError("wait timeout after 8000ms, keys: /a"), "timeout"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "lost peer"),
        (dist.DistNetworkError("The client socket has failed"), "lost peer"),
        (StalledError("rank 1 has scored no response"), "timeout"),
        (HungError("rank 1 has scored no response"), "hung"),
        (RunError("reward: timed out after 3 s"), "error"),
        (RuntimeError("my service: Timed out waiting"), "error"),
        (RuntimeError("shapes do not match"), "error"),
        (UserError("data: no such file"), "error"),
        (ValueError("gloo: Connection reset by peer"), "error"),
        (KeyboardInterrupt(), "stopped"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_errors_have_a_kind_and_a_code(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    assert innocent_code(error) == {"lost peer": LOST_PEER_CODE, "timeout": TIMEOUT_CODE}.get(kind)


def test_age_of_a_collective_ignores_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    began_ns, wall_s, steady_s = 10**18, [0.0], [0.0]
    entry = {
        "process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce", "is_p2p": False, "p2p_seq_id": 0,
        "collective_seq_id": 7, "time_created_ns": began_ns, "timeout_ms": 8000, "state": "started", "retired": False,
    }  # fmt: skip
    monkeypatch.setattr(flight_recorder, "_entries", lambda: [entry])
    monkeypatch.setattr(flight_recorder, "_members", lambda name: (0, 1))
    monkeypatch.setattr(flight_recorder.time, "time_ns", lambda: began_ns + int(wall_s[0] * 1e9))
    monkeypatch.setattr(flight_recorder.time, "monotonic", lambda: steady_s[0])
    recorder = flight_recorder.FlightRecorder()

    def age() -> float:
        waiting, _, _ = recorder()
        assert waiting is not None
        return waiting.age_s

    steady_s[0], wall_s[0] = 5.0, 2.0
    assert age() == 2.0
    steady_s[0], wall_s[0] = 6.0, 2.0 + 86_400.0
    assert age() == 3.0
    recorder = flight_recorder.FlightRecorder()  # the clock had jumped before its first look
    steady_s[0] = 6.5
    assert age() == 0.5
