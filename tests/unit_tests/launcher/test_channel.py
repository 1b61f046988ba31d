"""Messages between launchers, and strangers at their door."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mega_rl.launcher.nodes import channel, messages, remote
from mega_rl.launcher.nodes.channel import MAGIC, Channel, ChannelLost, Greeting, connect
from mega_rl.launcher.nodes.messages import Joining
from mega_rl.launcher.nodes.remote import Door
from mega_rl.launcher.ranks import Assignment, RankEnd
from mega_rl.launcher.store import listen

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as one:
        yield one


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: node 0's, the other's."""
    ends = open_pair(listener)
    yield ends
    for end in ends:
        end.close()


def open_pair(listener: socket.socket, *, silent_s: float = 30.0) -> tuple[Channel, Channel]:
    accepted: list[Channel] = []

    def greet() -> None:
        connection, _ = listener.accept()
        caller = Greeting(connection, "127.0.0.1", KEY)
        while caller.channel is None:
            select.select([connection], [], [])
            caller.advance(silent_s=silent_s)
        accepted.append(caller.channel)

    thread = threading.Thread(target=greet)
    thread.start()
    client = connect("127.0.0.1", listener.getsockname()[1], KEY, silent_s=silent_s)
    thread.join()
    return accepted[0], client


def received(end: Channel, count: int = 1) -> list[object]:
    deadline = time.monotonic() + 30
    messages_: list[object] = []
    while len(messages_) < count and time.monotonic() < deadline:
        messages_ += end.receive()
        time.sleep(0.005)
    return messages_


def test_messages_come_in_their_order_both_ways(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    for number in range(20):
        client.send({"type": "x", "number": number})
        server.send({"type": "y", "number": -number})
    assert received(server, 20) == [{"type": "x", "number": number} for number in range(20)]
    assert received(client, 20) == [{"type": "y", "number": -number} for number in range(20)]


def test_last_words_are_heard(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    client.send({"type": "bye"})
    client.close()
    assert received(server) == [{"type": "bye"}]
    with pytest.raises(ChannelLost, match="its connection is closed"):
        received(server)


def test_silence_is_noticed(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_S", 0.02)
    server, client = open_pair(listener)
    deadline = time.monotonic() + 30
    while server._received < 3 and time.monotonic() < deadline:
        assert server.receive() == [], "neither says anything"
    assert server._received >= 3, "beats are sent"
    client._closed.set()  # its thread of beats ends
    server._silent_s = 0.3
    with pytest.raises(ChannelLost, match=r"nothing was heard of it for 0\.3 s"):
        received(server)


def test_a_stranger_cannot_speak_in_a_launchers_name(pair: tuple[Channel, Channel]) -> None:
    """Nor repeat what it has said: each message has its number."""
    server, client = pair
    payload = json.dumps({"type": "end"}).encode()
    code = client._code(b"c", 0, payload)
    frame = len(payload).to_bytes(4, "big") + code + payload
    client._socket.sendall(frame)
    assert received(server) == [{"type": "end"}]
    client._socket.sendall(frame)
    with pytest.raises(ChannelLost, match="a message in its name is not of it"):
        received(server)


def test_what_a_launcher_said_is_no_message_to_itself(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    payload = json.dumps({"type": "end"}).encode()
    client._socket.sendall(len(payload).to_bytes(4, "big") + client._code(b"s", 0, payload) + payload)
    with pytest.raises(ChannelLost, match="is not of it"):
        received(server)


def test_a_length_beyond_the_limit_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    client._socket.sendall((channel.MAX_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ChannelLost, match="too long"):
        received(server)


def test_a_client_does_not_trust_a_server_without_the_key(listener: socket.socket) -> None:
    def pretend() -> None:
        connection, _ = listener.accept()
        connection.sendall(MAGIC + b"n" * 32)
        connection.recv(64)
        connection.sendall(b"c" * 32)
        connection.recv(1)

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(ChannelLost, match="does not know the key"):
        connect("127.0.0.1", listener.getsockname()[1], KEY)


def test_another_program_at_the_port_is_named(listener: socket.socket) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            connection.recv(100)

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(ChannelLost, match="another program answers there"):
        connect("127.0.0.1", listener.getsockname()[1], KEY)


def test_strangers_do_not_keep_launchers_out(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent ones, noise, another key, a wrong first message: none is waited for, and each has a deadline."""
    monkeypatch.setattr(remote, "HANDSHAKE_S", 0.5)
    port = listener.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    door = Door(listener, KEY)
    noise = socket.create_connection(("127.0.0.1", port))
    noise.sendall(b"\0" * 200)
    with pytest.raises(ChannelLost):
        connect("127.0.0.1", port, OTHER)
    wrong = connect("127.0.0.1", port, KEY)
    wrong.send({"type": "join", "number": "1", "host": "h", "command": "c"})
    good = connect("127.0.0.1", port, KEY)
    good.send(messages.of(messages.JOIN, Joining(1, "h", "c")))
    deadline = time.monotonic() + 30
    arrived: list[object] = []
    while not arrived and time.monotonic() < deadline:
        arrived += [joined for _, joined in door.arrivals()]
        time.sleep(0.01)
    assert arrived == [Joining(1, "h", "c")]
    while len(caplog.records) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum("it does not know the key" in text for text in caplog.messages) == 2
    assert sum("number must be of type int" in text for text in caplog.messages) == 1
    assert sum("it did not answer (timed out)" in text for text in caplog.messages) == 5
    door.close()
    for connection in (*silent, noise):
        connection.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_a_crowd_of_silent_callers_keeps_no_launcher_out(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, renewed: bool
) -> None:
    """1,600 of them: those that are turned away may call again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    port, threads = listener.getsockname()[1], threading.active_count()
    door, ended = Door(listener, KEY), threading.Event()
    crowd: list[socket.socket] = []

    def call() -> None:
        while not ended.is_set() and (renewed or len(crowd) < 1600):
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            if len(crowd) > 1600:
                crowd.pop(0).close()
                time.sleep(0.0005)

    try:
        caller = threading.Thread(target=call)
        caller.start()
        deadline = time.monotonic() + 60
        while len(crowd) < 1600:
            assert time.monotonic() < deadline, "the door takes no more calls"
            time.sleep(0.01)
        begin = time.monotonic()
        good = connect("127.0.0.1", port, KEY)
        good.send(messages.of(messages.JOIN, Joining(1, "h", "c")))
        arrived: list[object] = []
        while not arrived and time.monotonic() < begin + 5.0:
            arrived += [joined for _, joined in door.arrivals()]
            time.sleep(0.01)
        assert arrived == [Joining(1, "h", "c")]
        assert threading.active_count() <= threads + 4, "nobody has a thread of its own"
        assert len(caplog.records) <= remote.MAX_LINES
    finally:
        ended.set()
        caller.join()
        door.close()
        for connection in crowd:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "start"},
        {"type": "start", **vars(Assignment(0, 0, 1, 2, "h", 1)), "nproc": True},
        {"type": "start", **vars(Assignment(0, 0, 1, 2, "h", 1)), "master_addr": 3},
    ],
)
def test_a_malformed_order_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be of type"):
        messages.assignment(message)


def test_records_survive_their_message() -> None:
    assignment = Assignment(2, 1, 3, 8, "h", 29500, "auto")
    assert messages.assignment(messages.of(messages.START, assignment)) == assignment
    ends = [RankEnd(3, 77, -9), RankEnd(4, 78, 0)]
    content = [messages.of(messages.ENDED, end) for end in ends]
    assert messages.ends(messages.of(messages.ENDED, generation=2, ends=content)) == (2, ends)
