"""The viewer: for those with the token, on the loopback address, reading files alone; live in a real Chromium."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mega_rl.errors import UserError
from mega_rl.tracking.metrics.records import encode_step
from mega_rl.tracking.report.server import LiveRuns, ViewServer
from tests.helpers.browser import chromium
from tests.unit_tests.tracking.report.planted import dump, plant

DEADLINE_S = 30.0


@contextmanager
def serving(*runs: Path) -> Iterator[ViewServer]:
    with ViewServer(runs, refresh_s=1) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(DEADLINE_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewServer]:
    with serving(plant(tmp_path / "a")) as running:
        yield running


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=DEADLINE_S)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    result = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return result


def cookie(server: ViewServer) -> str:
    return f"{server.cookie}={server.token}"


def test_token_becomes_a_cookie(server: ViewServer) -> None:
    status, headers, _ = ask(server, server.address.removeprefix(f"http://127.0.0.1:{server.server_port}"))
    assert (status, headers["Location"]) == (303, "/")
    assert headers["Set-Cookie"] == f"{cookie(server)}; HttpOnly; SameSite=Strict; Path=/"
    status, headers, page = ask(server, "/", Cookie=cookie(server))
    assert status == 200
    assert "Content-Security-Policy" in page
    assert server.token not in page
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/data", "/?token=", "/?token=wrong", "/data?token={}", "/?token=\xe9"])
def test_nothing_is_shown_without_the_token(server: ViewServer, path: str) -> None:
    status, _, text = ask(server, path.format(server.token).replace("\xe9", "%C3%A9"))
    assert status == 403
    assert "reward" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1]:80", ""])
def test_other_host_names_are_refused(server: ViewServer, host: str) -> None:
    assert ask(server, "/", Cookie=cookie(server), Host=host)[0] == 403


@pytest.mark.parametrize("path", ["/../metrics.jsonl", "/metrics.jsonl", "/%2e%2e/etc/passwd", "//evil.example/"])
def test_paths_lead_to_no_file(server: ViewServer, path: str) -> None:
    assert ask(server, path, Cookie=cookie(server))[0] in (404, 400)


def test_requests_can_only_read(server: ViewServer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method, Cookie=cookie(server))[0] == 501


def test_malformed_address_is_refused(server: ViewServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as caller:
        caller.sendall(b"GET http://[bad/ HTTP/1.0\r\n\r\n")
        assert b" 400 " in caller.recv(1000).splitlines()[0]
    assert "Traceback" not in capfd.readouterr().err


def test_malformed_cookie_is_refused(server: ViewServer) -> None:
    for value in ("nonsense", f"{server.cookie}=", f'{server.cookie}="\\', "a" * 1000):
        assert ask(server, "/", Cookie=value)[0] == 403


def test_only_news_is_sent(server: ViewServer) -> None:
    _, _, text = ask(server, "/data", Cookie=cookie(server))
    content = json.loads(text)
    assert "curves" in content
    _, _, text = ask(server, f"/data?number={content['number']}", Cookie=cookie(server))
    assert json.loads(text) == {"number": content["number"], "ranks": []}


def test_it_listens_only_on_loopback(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_taken_port_is_named(server: ViewServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--port=\d+: cannot be listened on"):
        ViewServer([tmp_path / "a"], port=server.server_port)


def test_later_damage_does_not_end_the_viewer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = LiveRuns([plant(tmp_path / "a")])
    before = runs.content()
    (tmp_path / "a" / "metrics.jsonl").write_text("nonsense\n")
    assert runs.content() == before
    assert "keeps what was read before" in caplog.text


def test_nothing_in_the_run_changes(tmp_path: Path) -> None:
    run = plant(tmp_path / "a")
    dump(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    runs = LiveRuns([run])
    runs.content()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_page_begins_before_the_first_step(tmp_path: Path) -> None:
    run = plant(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").unlink()
    with serving(run) as server, chromium(tmp_path / "profile") as browser:
        browser.open(server.address)
        assert "No metrics yet" in browser.evaluate("document.body.innerText")
        (run / "metrics.jsonl").write_text(lines)
        deadline = time.monotonic() + DEADLINE_S
        while not browser.evaluate("document.querySelectorAll('.curve').length"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert browser.console == []


def test_page_follows_its_run(tmp_path: Path) -> None:
    run = plant(tmp_path / "a", steps=20)
    with serving(run) as server, chromium(tmp_path / "profile") as browser:
        browser.open(server.address)
        assert browser.evaluate("location.href") == f"http://127.0.0.1:{server.server_port}/"
        assert browser.evaluate("document.cookie") == ""
        browser.evaluate("document.querySelector('details[data-theme=Reward]').open = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(encode_step(21, {"reward/mean": 9.0, "own/new": 1.0}) + "\n")
        deadline = time.monotonic() + DEADLINE_S
        while "step 21" not in browser.evaluate("document.querySelector('header').innerText"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert browser.evaluate("document.querySelector('details[data-theme=Reward]').open")
        assert browser.evaluate("document.querySelector('#status').textContent").startswith("live")
        assert browser.console == []
        own = f"http://127.0.0.1:{server.server_port}/"
        assert all(address.startswith(own) for address in browser.requests)
