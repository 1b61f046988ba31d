"""Keys: made, handed over, and wanted by every path. That a real server wants them: test_server.py."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mega_rl.errors import UserError
from mega_rl.rollout.sglang.control import GENERATION, KeyCheck, Keys

KEYS = Keys("the-api-key", "the-admin-key")


def ask(path: str, authorization: str | None, *, kind: str = "http") -> list[dict[str, Any]]:
    """What a client is answered by an application behind a KeyCheck, which itself answers 204."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request that is refused")

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    check = KeyCheck(app, api_key=KEYS.api_key, admin_key=KEYS.admin_key)
    asyncio.run(check({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


def status(path: str, authorization: str | None) -> int:
    return ask(path, authorization)[0]["status"]


# Known and unknown paths, and ways to write one that is open to the api key.
OTHERS = ["/update_weights_from_tensor", "/abort_request", "/no/such", "/", "", "/generate/", "//generate", "/HEALTH"]


@pytest.mark.parametrize("path", [*sorted(GENERATION), *OTHERS])
def test_each_path_opens_to_one_key(path: str) -> None:
    generates = path in GENERATION
    assert status(path, "Bearer the-api-key") == (204 if generates else 401)
    assert status(path, "Bearer the-admin-key") == (401 if generates else 204)


WRONG = [None, "", "Bearer", "Bearer ", "the-api-key", "the-admin-key", "bearer the-api-key", "Bearer the-api-key "]
WRONG += ["Bearer the-api-ke", "Bearer the-admin-key2", "Basic the-admin-key", "Bearer the-api-key, Bearer x"]


@pytest.mark.parametrize("given", WRONG)
def test_no_other_key_opens(given: str | None) -> None:
    for path in ("/generate", "/update_weights_from_tensor"):
        answer = ask(path, given)
        assert answer[0]["status"] == 401
        assert b"key" in answer[1]["body"]


def test_websockets_are_closed_and_start_up_passes() -> None:
    closed = ask("/v1/realtime", "Bearer the-admin-key", kind="websocket")
    assert [message["type"] for message in closed] == ["websocket.close"]
    assert ask("", None, kind="lifespan")[0]["status"] == 204  # reaches the application


def test_the_file_is_its_owners_alone_and_new(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    before = os.umask(0)
    try:
        KEYS.write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.read(path) == KEYS
    with pytest.raises(FileExistsError):
        KEYS.write(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        KEYS.write(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"api_key": "a", "admin_key": ""}', '{"api_key": 1, "admin_key": "b"}'])
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(UserError, match=r"keys\.json"):
        Keys.read(path)
