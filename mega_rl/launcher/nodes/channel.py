"""Messages between two launchers that know one another by a key: JSON, each with a code that only the two can make.

Nothing in them is secret, so they are not encrypted; what a third party writes, changes, repeats or leaves out ends the
channel. Whoever does not know the key gets no further than the challenge.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import threading
import time

from mega_rl.launcher.nodes.messages import Message
from mega_rl.storage.strict_json import parse_object

MAGIC = b"mega_rl launcher\n"  # what a launcher of node 0 says first
HANDSHAKE_S = 10.0
BEAT_S = 2.0
SILENT_S = 30.0  # without a beat: the other launcher, its host or the network between is gone
SEND_S = 10.0
MAX_BYTES = 1 << 20  # of a message: a few for each rank of a node
BEAT = "beat"
_NONCE, _CODE, _LENGTH = 32, 32, 4


class ChannelLost(Exception):
    """The other launcher is gone; the text says how that was noticed."""


class Channel:
    """An open channel; beats are sent from a thread of its own, whatever this process waits for."""

    def __init__(self, connection: socket.socket, session: bytes, *, is_server: bool, silent_s: float) -> None:
        self._socket, self._session, self._silent_s = connection, session, silent_s
        self._own, self._other = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = self._received = 0
        self._buffer = b""
        self._incoming = select.poll()  # select(2) knows no descriptor beyond 1023, which large runs have
        self._incoming.register(connection, select.POLLIN)
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(SEND_S)
        threading.Thread(target=self._beat, name="beats of this launcher", daemon=True).start()

    @property
    def local_address(self) -> str:
        """Return the address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message. Raises ChannelLost."""
        payload = json.dumps(message).encode()
        assert len(payload) <= MAX_BYTES, "a message of a launcher is small"
        with self._lock:
            code = self._code(self._own, self._sent, payload)
            self._sent += 1
            try:
                self._socket.sendall(len(payload).to_bytes(_LENGTH, "big") + code + payload)
            except OSError as error:
                raise ChannelLost(f"its connection is closed ({error.strerror or error})") from None

    def receive(self) -> list[Message]:
        """Return the messages that have come, in their order, without waiting. Raises ChannelLost."""
        lost = ""
        try:
            while not lost and len(self._buffer) <= 2 * MAX_BYTES and self._incoming.poll(0):
                data = self._socket.recv(1 << 16)
                self._buffer += data
                self._heard = time.monotonic()
                lost = "" if data else "its connection is closed"
            if time.monotonic() - self._heard > self._silent_s:
                lost = f"nothing was heard of it for {self._silent_s:g} s"
        except OSError as error:
            lost = f"its connection is broken ({error.strerror or error})"
        messages = self._messages()
        if lost and not messages:
            raise ChannelLost(lost)
        return messages  # its last words first; the next call says that it is gone

    def close(self) -> None:
        """Close the channel."""
        self._closed.set()
        self._socket.close()

    def _messages(self) -> list[Message]:
        """Take whole messages from the buffer, without beats."""
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH:
            length = int.from_bytes(self._buffer[:_LENGTH], "big")
            if length > MAX_BYTES:
                raise ChannelLost("it sent a message that is too long")
            end = _LENGTH + _CODE + length
            if len(self._buffer) < end:
                break
            code, payload = self._buffer[_LENGTH : _LENGTH + _CODE], self._buffer[_LENGTH + _CODE : end]
            if not hmac.compare_digest(code, self._code(self._other, self._received, payload)):
                raise ChannelLost("a message in its name is not of it")
            self._buffer = self._buffer[end:]
            self._received += 1
            try:
                message = parse_object(payload)
            except ValueError as error:
                raise ChannelLost(f"it sent a message that is {error}") from None
            if message.get("type") != BEAT:
                messages.append(message)
        return messages

    def _code(self, sender: bytes, number: int, payload: bytes) -> bytes:
        return _mac(self._session, sender + number.to_bytes(8, "big") + payload)

    def _beat(self) -> None:
        while not self._closed.wait(min(BEAT_S, self._silent_s / 5)):
            try:
                self.send({"type": BEAT})
            except ChannelLost:
                return


class Greeting:
    """A caller of node 0, until it has shown that it knows the key and got its `channel`. No call waits for it."""

    def __init__(self, connection: socket.socket, address: str, key: bytes) -> None:
        """Send the challenge. Raises OSError for a caller that is gone."""
        self.connection, self.address, self._key = connection, address, key
        self.channel: Channel | None = None
        self.since = time.monotonic()
        self._own, self._answer = secrets.token_bytes(_NONCE), b""
        connection.setblocking(False)
        connection.sendall(MAGIC + self._own)

    def advance(self, *, silent_s: float) -> None:
        """Read what has come of the answer. Raises ChannelLost when the caller does not know the key, or is gone."""
        try:
            part = self.connection.recv(_NONCE + _CODE - len(self._answer))
            if not part:
                raise ChannelLost("it closed the connection")
            self._answer += part
            if len(self._answer) < _NONCE + _CODE:
                return
            nonces = self._own + self._answer[:_NONCE]
            if not hmac.compare_digest(self._answer[_NONCE:], _mac(self._key, b"client" + nonces)):
                raise ChannelLost("it does not know the key")
            self.connection.sendall(_mac(self._key, b"server" + nonces))
        except OSError as error:
            raise ChannelLost(f"its connection is broken ({error.strerror or error})") from None
        session = _mac(self._key, b"session" + nonces)
        self.channel = Channel(self.connection, session, is_server=True, silent_s=silent_s)

    def close(self) -> None:
        """Close the connection."""
        (self.connection if self.channel is None else self.channel).close()


def connect(address: str, port: int, key: bytes, *, silent_s: float = SILENT_S) -> Channel:
    """Return a channel to the launcher of node 0; see `Greeting`.

    Raises:
        OSError: nobody answers there yet.
        ChannelLost: another program does, or a launcher with another key.
    """
    connection = socket.create_connection((address, port), timeout=HANDSHAKE_S)
    deadline = time.monotonic() + HANDSHAKE_S
    try:
        greeting = _read(connection, len(MAGIC) + _NONCE, deadline)
        if not greeting.startswith(MAGIC):
            raise ChannelLost("another program answers there")
        own = secrets.token_bytes(_NONCE)
        nonces = greeting[len(MAGIC) :] + own
        connection.sendall(own + _mac(key, b"client" + nonces))
        if not hmac.compare_digest(_read(connection, _CODE, deadline), _mac(key, b"server" + nonces)):
            raise ChannelLost("it does not know the key")
    except (OSError, ChannelLost):
        connection.close()
        raise
    return Channel(connection, _mac(key, b"session" + nonces), is_server=False, silent_s=silent_s)


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly so many bytes. Raises ChannelLost at the end of the stream, TimeoutError at the deadline."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise ChannelLost("it closed the connection: perhaps it has another key")
        data += part
    return data


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).digest()
