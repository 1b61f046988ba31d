"""Messages between launchers, and strangers that call node 0."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mega_rl.operations.launcher import channel
from mega_rl.operations.launcher.channel import MAGIC, Channel, ChannelLost, Door, Joining, connect
from mega_rl.operations.launcher.ranks import listen
from tests.unit_tests.operations.launcher.programs import wait_until

KEY, OTHER = b"k" * 32, b"o" * 32
ME = Joining(1, "h", "c")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as one:
        yield one


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def ends() -> tuple[Channel, Channel]:
    """Return both ends of an open channel: node 0's, the other's."""
    here, there = socket.socketpair()
    server, client = (Channel(one, KEY, is_server=one is here) for one in (here, there))
    assert (server.receive(), client.receive()) == ([], [])
    return server, client


def received(end: Channel, count: int = 1) -> list[object]:
    messages: list[object] = []

    def enough() -> bool:
        messages.extend(end.receive())
        return len(messages) >= count

    wait_until(enough)
    return messages


def frame(session: bytes, sender: bytes, number: int, message: object) -> bytes:
    payload = json.dumps(message).encode()
    code = hmac.digest(session, sender + number.to_bytes(8, "big") + payload, hashlib.sha256)
    return len(payload).to_bytes(4, "big") + code + payload


def join(door: Door, listener: socket.socket, *, within_s: float = 30.0) -> Joining:
    """Return what a launcher joins with that calls now."""
    joined: list[Channel] = []
    thread = threading.Thread(target=lambda: joined.append(connect("127.0.0.1", port_of(listener), KEY, ME)))
    thread.start()
    deadline = time.monotonic() + within_s
    arrived: list[tuple[Channel, Joining]] = []
    while not arrived and time.monotonic() < deadline:
        arrived += door.arrivals()
        time.sleep(0.01)
    thread.join()
    ((_, joining),) = arrived
    joined[0].close()
    return joining


def test_messages_come_in_order_and_before_the_loss() -> None:
    server, client = ends()
    for number in range(20):
        client.send({"type": "x", "number": number})
        server.send({"type": "y", "number": -number})
    assert received(client, 20) == [{"type": "y", "number": -number} for number in range(20)]
    client.close()
    assert received(server, 20) == [{"type": "x", "number": number} for number in range(20)]
    with pytest.raises(ChannelLost, match="its connection is closed"):
        received(server)


def test_end_with_unread_messages_is_a_closed_connection() -> None:
    """The kernel then resets the connection instead of closing it."""
    server, client = ends()
    server.send({"type": "x"})
    client.close()
    with pytest.raises(ChannelLost, match="its connection is closed"):
        received(server, 1)


def test_silence_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_S", 0.02)
    monkeypatch.setattr(channel, "SILENT_S", 0.5)
    server, client = ends()
    client.keep_alive()
    for _ in range(100):  # beats keep it open
        assert server.receive() == []
        time.sleep(0.01)
    client._closed.set()
    with pytest.raises(ChannelLost, match=r"nothing was heard of it for 0\.5 s"):
        received(server)


@pytest.mark.parametrize(
    ("sender", "number", "error"),
    [(b"c", 0, ""), (b"c", 1, "it does not know the key"), (b"s", 0, "it does not know the key")],
    ids=["right", "repeated", "reflected"],
)
def test_forged_messages_end_the_channel(sender: bytes, number: int, error: str) -> None:
    server, client = ends()
    client._socket.sendall(frame(client._session, sender, number, {"type": "end"}))
    if not error:
        assert received(server) == [{"type": "end"}]
        return
    with pytest.raises(ChannelLost, match=error):
        received(server)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n",
            "another program answers there",
        ),
        (MAGIC + b"n" * 32 + frame(b"c" * 32, b"s", 0, {"type": "welcome"}), "it does not know the key"),
    ],
    ids=["another program", "no key"],
)
def test_client_trusts_no_other_server(listener: socket.socket, answer: bytes, error: str) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        connection.sendall(answer)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):
                pass

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(ChannelLost, match=error):
        connect("127.0.0.1", port_of(listener), KEY, ME)


def test_strangers_do_not_keep_launchers_out(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 1.0)
    address = ("127.0.0.1", port_of(listener))
    door = Door(listener, KEY)
    silent = [socket.create_connection(address) for _ in range(5)]
    noise = socket.create_connection(address)
    noise.sendall(b"\0" * 200)
    strangers = [(OTHER, ME), (KEY, Joining("1", "h", "c"))]  # type: ignore[arg-type]
    for key, joining in strangers:
        thread = threading.Thread(target=call, args=(address, key, joining), daemon=True)
        thread.start()
    assert join(door, listener) == ME

    def all_are_gone() -> bool:
        door.arrivals()
        return len(caplog.records) >= 8

    wait_until(all_are_gone)
    for words, count in {
        "does not know the key": 1,
        "another program answers": 1,
        "of type int": 1,
        "timed out": 5,
    }.items():
        assert sum(words in text for text in caplog.messages) == count, caplog.messages
    for connection in (*silent, noise):
        connection.close()


def call(address: tuple[str, int], key: bytes, joining: Joining) -> None:
    with contextlib.suppress(ChannelLost, OSError):
        connect(*address, key, joining)
