from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mega_rl.rollout.sglang.control import Control, ServerError
from tests.helpers.update_server import KEYS, UpdateServer


@pytest.fixture
def server() -> Iterator[UpdateServer]:
    with UpdateServer(3) as running:
        running.paused = running.in_session = True
        yield running


@pytest.fixture
def control(server: UpdateServer) -> Iterator[Control]:
    steering = Control(server.endpoint, timeout_s=20.0)
    yield steering
    steering.close()


UPDATE = {"flush_cache": False, "abort_all_requests": False}
GROUP = {"address": "127.0.0.1", "port": 5, "rank_offset": 1, "world_size": 3, "group": "g", "backend": "gloo"}
CALLS: list[tuple[Callable[[Control], Any], str, Any]] = [
    (lambda c: c.call("POST", "/pause_generation", {"mode": "abort"}), "/pause_generation", {"mode": "abort"}),
    (lambda c: c.flush(), "/flush_cache", None),
    (lambda c: c.object("GET", "/model_info"), "/model_info", None),  # with the api key
    (
        lambda c: c.update_from_tensor(["e30="], load_format="flattened_bucket", version=7),
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["e30="], "load_format": "flattened_bucket", "weight_version": "7", **UPDATE},
    ),
    (
        lambda c: c.update_from_distributed(names=["w"], dtypes=["bfloat16"], shapes=[(2, 3)], group="g"),
        "/update_weights_from_distributed",
        {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g", "load_format": None, **UPDATE},
    ),
    (
        lambda c: c.init_group(**GROUP),
        "/init_weights_update_group",
        {
            "master_address": "127.0.0.1",
            "master_port": 5,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "gloo",
        },
    ),
    (lambda c: c.destroy_group("g"), "/destroy_weights_update_group", {"group_name": "g"}),
]


@pytest.mark.parametrize(
    ("call", "path", "body"), CALLS, ids=[f"{path[1:]}-{i}" for i, (_, path, _) in enumerate(CALLS)]
)
def test_every_call_has_its_endpoint_key_and_body(
    server: UpdateServer, control: Control, call: Callable[[Control], Any], path: str, body: Any
) -> None:
    server.weights = {"a": 1.0}
    call(control)
    assert server.paths() == [path]  # with another key the call is not recorded
    assert body is ... or server.calls[0][1] == body
    assert control.requests == 1


# What befalls an update -> what the error says of it.
ENDS = {
    "refuse": 'HTTP 400: {"success": false, "message": "not now xx',
    "error": "HTTP 500: Internal Server Error",
    "unsuccessful": "no success: partially updated",
    "html": "no JSON",
    "list": "no object but [1]",
    "cut": "RemoteProtocolError",
    "reset": "RemoteProtocolError",
    "die": "",
    "hang": "waited 0.3 s for its answer",
    "drip": "waited 0.3 s for its answer",
}


@pytest.mark.parametrize("kind", ENDS)
def test_every_fault_of_a_call_raises_in_time(server: UpdateServer, control: Control, kind: str) -> None:
    path = "/update_weights_from_tensor"
    server.faults = {path: (kind, 1)}
    if "waited" in ENDS[kind]:
        control = Control(server.endpoint, timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(ServerError) as caught:
        control.update_from_tensor(["e30="])
    assert time.monotonic() - start < 10.0
    text = str(caught.value)
    assert text.startswith(f"SGLang server 3 at {server.endpoint.url}, {path}: ")
    assert ENDS[kind] in text
    assert len(text) < 700
    assert "\n" not in text
    assert kind != "refuse" or text.endswith('the reason"}')  # of long words the end is kept too
    assert caught.value.server == 3
    assert caught.value.path == path


def test_no_error_and_no_repr_shows_a_key(server: UpdateServer, control: Control) -> None:
    server.faults = {"/continue_generation": ("echo", 1)}
    with pytest.raises(ServerError) as caught:
        control.call("POST", "/continue_generation", {})
    assert "keys *** ***" in str(caught.value)
    shown = repr(caught.value) + repr(control.endpoint) + repr(vars(control))
    assert KEYS.api_key not in shown
    assert KEYS.admin_key not in shown


@pytest.mark.parametrize("kind", ["refuse", "hang"])
def test_flush_ends_at_its_deadline_with_the_reason(server: UpdateServer, control: Control, kind: str) -> None:
    server.faults = {"/flush_cache": (kind, 1)}
    control.timeout_s, start = 0.9, time.monotonic()
    with pytest.raises(ServerError, match=r"waited 0.* s for") as caught:
        control.flush()
    assert 0.8 < time.monotonic() - start < 5.0
    if kind == "refuse":
        assert "waited 0.9 s for the server to be idle" in str(caught.value)
        assert server.number("/flush_cache") >= 2
