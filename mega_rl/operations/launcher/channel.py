"""Authenticated JSON messages between the launcher of node 0 and the others.

Both ends say a nonce first, and derive the session's key from both nonces and the shared key. Each message carries an
HMAC over its sender, number and text, so a third party cannot forge, change or repeat one. Messages are not secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.ranks import StopSignals
from mega_rl.untrusted import parse_object, read_record

log = logging.getLogger(__name__)

Message: TypeAlias = Mapping[str, object]

MAGIC = b"mega_rl launcher\n"  # first bytes of each end, before its nonce
HANDSHAKE_S = 10.0
RETRY_S = 1.0
JOIN_S = 600.0  # for all launchers to join: images are pulled, disks are mounted
BEAT_S = 2.0
SILENT_S = 30.0  # without a beat: the other launcher, its host or the network is lost
SEND_S = 10.0
MAX_BYTES = 1 << 20  # length of a message; a few are sent for each rank of a node
JOIN, WELCOME, BEAT = "join", "welcome", "beat"
_GREETING, _CODE, _LENGTH = len(MAGIC) + 32, 32, 4


class ChannelLost(Exception):
    """The other launcher is gone; the text says how that was noticed."""


@dataclass(frozen=True)
class Joining:
    """First message of a launcher: its number, its host, and a digest of its command."""

    number: int
    host: str
    command: str


class Channel:
    """A connection to another launcher, which proves with every message that it knows the key."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        """Send the greeting. Raises OSError if the other end is gone."""
        self._socket, self._key = connection, key
        self._own, self._other = (b"s", b"c") if is_server else (b"c", b"s")
        self._greeting = MAGIC + secrets.token_bytes(_GREETING - len(MAGIC))
        self._session = b""  # key of the session, once the other end's nonce is known
        self._sent = self._received = 0
        self._buffer = b""
        self._unread: list[Message] = []  # messages that came with the welcome
        self._incoming = select.poll()  # select(2) takes no descriptor above 1023, which large runs have
        self._incoming.register(connection, select.POLLIN)
        self.since = self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(SEND_S)
        connection.sendall(self._greeting)

    @property
    def local_address(self) -> str:
        """Return the address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def is_ready(self) -> bool:
        """Return whether the other end's nonce is known, so that messages can be sent."""
        return self._session != b""

    def keep_alive(self) -> None:
        """Send beats from a thread, whatever this process waits for."""

        def beat() -> None:
            while not self._closed.wait(BEAT_S):
                try:
                    self.send({"type": BEAT})
                except ChannelLost:
                    return

        threading.Thread(target=beat, name="beats of this launcher", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Raises ChannelLost."""
        payload = json.dumps(message).encode()
        assert self.is_ready, "messages follow the greetings"
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
            if time.monotonic() - self._heard > SILENT_S:
                lost = f"nothing was heard of it for {SILENT_S:g} s"
        except ConnectionResetError:  # it ended with bytes of ours unread
            lost = "its connection is closed"
        except OSError as error:
            lost = f"its connection is broken ({error.strerror or error})"
        messages, self._unread = self._unread, []
        while (message := self._take()) is not None:
            messages += [message] if message.get("type") != BEAT else []
        if lost and not messages:
            raise ChannelLost(lost)
        return messages  # its last words first; the next call reports the loss

    def close(self) -> None:
        """Close the channel."""
        self._closed.set()
        self._socket.close()

    def _take(self) -> Message | None:
        """Take the greeting and the next whole message from the buffer; None without one."""
        if not self.is_ready:
            if not self._buffer.startswith(MAGIC[: len(self._buffer)]):
                raise ChannelLost("another program answers there")
            if len(self._buffer) < _GREETING:
                return None
            greetings = sorted((self._own + self._greeting, self._other + self._buffer[:_GREETING]))
            self._session = hmac.digest(self._key, b"".join(greetings), hashlib.sha256)
            self._buffer = self._buffer[_GREETING:]
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > MAX_BYTES:
            raise ChannelLost("it sent a message that is too long")
        end = _LENGTH + _CODE + length
        if len(self._buffer) < end:
            return None
        code, payload = self._buffer[_LENGTH : _LENGTH + _CODE], self._buffer[_LENGTH + _CODE : end]
        if not hmac.compare_digest(code, self._code(self._other, self._received, payload)):
            raise ChannelLost("it does not know the key, or another program speaks in its name")
        self._buffer = self._buffer[end:]
        self._received += 1
        try:
            return parse_object(payload)
        except ValueError as error:
            raise ChannelLost(f"it sent a message that is {error}") from None

    def _code(self, sender: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._session, sender + number.to_bytes(8, "big") + payload, hashlib.sha256)


def connect(address: str, port: int, key: bytes, joining: Joining) -> Channel:
    """Join the launcher of node 0 and return the channel to it.

    Raises OSError if nothing answers there yet, ChannelLost if another program or a launcher with another key does.
    """
    connection = socket.create_connection((address, port), timeout=HANDSHAKE_S)
    try:
        channel = Channel(connection, key, is_server=False)
        asked = False
        while not (messages := channel.receive()):  # node 0 welcomes only callers that know the key
            if channel.is_ready and not asked:
                channel.send({"type": JOIN, **vars(joining)})
                asked = True
            if time.monotonic() - channel.since > HANDSHAKE_S:
                raise TimeoutError("timed out")
            time.sleep(0.01)
        channel._unread = messages[1:]
    except (OSError, ChannelLost):
        connection.close()
        raise
    channel.keep_alive()
    return channel


def join(address: str, port: int, key: bytes, joining: Joining, stop: StopSignals) -> Channel | None:
    """Call node 0's launcher until it answers, for `JOIN_S` seconds; return None after a signal."""
    deadline = time.monotonic() + JOIN_S
    while not stop.first:
        try:
            return connect(address, port, key, joining)
        except ChannelLost as error:
            raise UserError(
                f"--master-addr={address} --master-port={port}: this node is not let in ({error}); give every node "
                "the same MEGA_RL_LAUNCH_KEY, and the address of the launcher of node 0"
            ) from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"the launcher of node 0 did not answer at {address}, port {port}, within {JOIN_S:g} s "
                    f"({error.strerror or error})"
                ) from None
        time.sleep(RETRY_S)
    return None


class Door:
    """Listener of node 0, by which launchers that know the key join."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._callers: list[Channel] = []
        listener.setblocking(False)

    def arrivals(self) -> list[tuple[Channel, Joining]]:
        """Return the launchers that have joined since the last call, without waiting for any caller."""
        with contextlib.suppress(OSError):  # no further caller, or one that is gone again
            while True:
                connection, _ = self._listener.accept()
                self._callers.append(Channel(connection, self._key, is_server=True))
        arrived = []
        for caller in list(self._callers):
            try:
                if messages := caller.receive():
                    arrived.append((caller, read_record(Joining, messages[0])))
                    caller.send({"type": WELCOME})
                    caller.keep_alive()
                elif time.monotonic() - caller.since > HANDSHAKE_S:
                    raise ChannelLost("it did not answer (timed out)")
                else:
                    continue
            except (ChannelLost, ValueError) as error:
                caller.close()
                log.warning("a caller is not let in as a launcher: %s", error)
            self._callers.remove(caller)
        return arrived
