"""A real server in the states in which a rank may die: what an adoption makes of each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server import group
from mega_rl.rollout.sglang.server import process as server
from mega_rl.rollout.sglang.server.kept import keeping_servers
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.helpers.sglang import START_S, generate, needs_sglang, owner, private_folder, request, wait_until

pytestmark = [
    needs_sglang,
    pytest.mark.skipif(not FULL, reason="make test-full: starts of two servers"),
    pytest.mark.timeout(900),
]

PROMPTS = [[3, 4, 5], [7]]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with keeping_servers(possible=True) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


def in_flight(endpoint: Endpoint, path: str, body: dict[str, Any], key: str) -> threading.Thread:
    """Start a request that nobody waits for."""

    def ask() -> None:
        with suppress(OSError):  # the server is killed meanwhile
            request(endpoint, path, body, key=key)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_busy_server_is_adopted_blocked_one_is_not(life: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", max_position_embeddings=16384)
    settings = ServerSettings(checkpoint, max_total_tokens=20000, start_timeout_s=START_S)
    first = owner(checkpoint, tmp_path, ready=True)
    said = json.loads(cast(Any, first.stdout).readline())
    endpoint = Endpoint(0, said["url"], Keys(said["api_key"], said["admin_key"]))
    expected = [answer["output_ids"] for answer in generate(endpoint, PROMPTS)]
    control = Control(endpoint, timeout_s=60.0)
    folder = private_folder(said["pid"])

    def adopted() -> ServerProcess:
        process = ServerProcess(settings, 0, tmp_path)
        process.start()
        process.wait_ready()
        return process

    # Generating for a rank that is gone.
    sampling = {"max_new_tokens": 15000, "ignore_eos": True}
    long = in_flight(endpoint, "/generate", {"input_ids": [[3]], "sampling_params": sampling}, "api")
    first.kill()
    first.wait()
    process = adopted()
    assert process.pid == said["pid"]
    long.join(30.0)
    assert not long.is_alive(), "its request was aborted"

    # In the middle of an update: paused, some weights new, a request that waits.
    request(endpoint, "/update_weight_version", {"new_version": "7", "abort_all_requests": False}, key="admin")
    control.call("POST", "/pause_generation", {"mode": "abort"})
    waiting = in_flight(endpoint, "/generate", {"input_ids": [[3]], "sampling_params": sampling}, "api")
    process.leave()
    process = adopted()
    assert process.pid == said["pid"]
    waiting.join(30.0)
    assert control.object("GET", "/model_info")["weight_version"] == "default"
    assert [answer["output_ids"] for answer in generate(endpoint, PROMPTS)] == expected

    # In a process group of which a member has died: its scheduler answers nobody.
    monkeypatch.setattr(server, "_ADOPT_S", 5.0)
    group_of_two = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    in_flight(endpoint, "/init_weights_update_group", {**group_of_two, "group_name": "x", "backend": "gloo"}, "admin")
    wait_until("the group's beginning", lambda: "group_name=x" in process.log_file.read_text("utf-8"), timeout_s=60.0)
    process.leave()
    monkeypatch.setattr(server, "_HEALTH_S", 5.0)
    process = adopted()
    assert process.pid != said["pid"]
    assert not group.members(said["pid"])
    assert not folder.exists()
    process.stop()
    control.close()
