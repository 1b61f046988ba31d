"""Local rank 0 works, the other ranks of its node wait for it and never for longer than it lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl.errors import UserError, UserErrors
from mega_rl.hub import node
from mega_rl.hub.node import once_per_node
from tests.helpers.hub_server import Hub

WHAT = "model.path=org/model"


@pytest.fixture
def ranks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process rank N of two on one node."""

    def become(rank: int) -> None:
        for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))

    return become


def fails() -> dict[str, Any]:
    raise UserErrors(["model.path=org/model: gone", "optim.lr: too large"])


def must_not_run() -> dict[str, Any]:
    raise AssertionError("local rank 0 alone works")


def leave(content: dict[str, Any]) -> None:
    """Leave a report of local rank 0."""
    place = node._place(WHAT)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(content))


def ended_process() -> dict[str, Any]:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return {"pid": process.pid, "started": time.time()}


def test_without_a_launcher_the_work_is_done(hub: Hub) -> None:
    assert once_per_node(lambda: {"a": 1}, what=WHAT) == {"a": 1}


def test_the_result_of_local_rank_0_is_everyones(ranks: Callable[[int], None]) -> None:
    ranks(0)
    assert once_per_node(lambda: {"a": 1}, what=WHAT) == {"a": 1}
    ranks(1)
    assert once_per_node(must_not_run, what=WHAT) == {"a": 1}


def test_a_failure_of_local_rank_0_is_everyones_at_once(ranks: Callable[[int], None]) -> None:
    ranks(0)
    with pytest.raises(UserErrors, match="gone"):
        once_per_node(fails, what=WHAT)
    ranks(1)
    begun = time.monotonic()
    with pytest.raises(UserErrors) as caught:
        once_per_node(must_not_run, what=WHAT)
    assert caught.value.problems == ("model.path=org/model: gone", "optim.lr: too large")
    assert time.monotonic() - begun < 1.0


def test_a_crash_of_local_rank_0_is_reported_too(ranks: Callable[[int], None]) -> None:
    ranks(0)
    with pytest.raises(AssertionError):
        once_per_node(must_not_run, what=WHAT)
    ranks(1)
    with pytest.raises(UserError, match=f"{WHAT}: local rank 0 of this node failed; look at its log"):
        once_per_node(must_not_run, what=WHAT)


def test_a_rank_waits_while_local_rank_0_lives(ranks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "BEAT_S", 0.05)
    monkeypatch.setattr(node, "SILENCE_S", 0.4)
    ranks(1)
    release = threading.Event()
    place = node._place(WHAT)
    leader = threading.Thread(
        target=lambda: node._Meeting(place, WHAT).lead(lambda: {"waited": release.wait(10)})  # type: ignore[arg-type]
    )
    leader.start()
    threading.Timer(0.8, release.set).start()  # twice the silence that a rank bears
    assert once_per_node(must_not_run, what=WHAT) == {"waited": True}
    leader.join()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (None, "has not begun within 0 s"),
        ({"at": time.time() + 60}, "ended (process"),
        ({"pid": os.getpid(), "at": 0.0}, "gave no sign of life for 60 s"),
        ({"at": 0.0, "result": {"a": 1}}, "has not begun within 0 s"),  # left by an earlier launch
    ],
)
def test_a_rank_that_waits_in_vain_says_for_what(
    ranks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, report: dict[str, Any] | None, words: str
) -> None:
    monkeypatch.setattr(node, "BEGIN_S", 0.3)
    ranks(1)
    if report is not None:
        own = {"started": node.psutil.Process().create_time()}
        leave({**(own if "pid" in report else ended_process()), **report})
    with pytest.raises(UserError) as caught:
        once_per_node(must_not_run, what=WHAT)
    assert str(caught.value).startswith("model.path=org/model: local rank 0 of this node, which downloads for all, ")
    assert words in str(caught.value)


PROGRAM = """
import sys
from mega_rl.plan.preflight import preflight
print(preflight(None, sys.argv[1:]).model.path)
"""


def test_two_ranks_download_once(hub: Hub) -> None:
    """Two processes as a launcher starts them, the second first."""
    hub.delays["model.safetensors"] = 0.5
    processes = []
    for rank in (1, 0):
        environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank)}
        environment |= {"LOCAL_RANK": str(rank), "PYTHONPATH": str(Path(__file__).parents[3])}
        program = [sys.executable, "-c", PROGRAM, "model.path=org/model", "data.train_files=[d.jsonl]"]
        processes.append(subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(hub.downloads("model.safetensors")) == 1
    assert len([r for r in hub.requests if "/revision/" in r.path]) == 1
