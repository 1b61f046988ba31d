"""Nodes of other launchers, as the launcher of node 0 sees them, and the door by which those come in."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time

from mega_rl.launcher.nodes import messages
from mega_rl.launcher.nodes.channel import SILENT_S, Channel, ChannelLost, accept
from mega_rl.launcher.nodes.messages import Joining
from mega_rl.launcher.nodes.node import NodeNews
from mega_rl.launcher.ranks import Assignment, RankEnd

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64  # at a time; further callers wait
JOIN_MESSAGE_S = 10.0
RETRY_S = 0.2  # after a call that could not be taken


class RemoteNode:
    """A node whose launcher has joined."""

    def __init__(self, channel: Channel, joined: Joining) -> None:
        self.number, self.host = joined.number, joined.host
        self._channel = channel
        self._generation = -1
        self._lost = ""

    def start(self, assignment: Assignment) -> None:
        """Start ranks."""
        self._generation = assignment.generation
        self._send(messages.of(messages.START, assignment))

    def poll(self) -> NodeNews:
        """Return what the launcher has reported, or that it is lost."""
        ended: list[RankEnd] = []
        stopped_by = 0
        try:
            if self._lost:
                raise ChannelLost(self._lost)
            for message in self._channel.receive():
                if message["type"] == messages.ENDED:
                    generation, ends = messages.ends(message)
                    ended += ends if generation == self._generation else []
                elif message["type"] == messages.STOPPED_BY:
                    stopped_by = messages.number(message, "number")
        except (ChannelLost, KeyError, ValueError) as error:
            self._lost = str(error)
            self._channel.close()
            return NodeNews(ended, stopped_by, lost=f"node {self.number} ({self.host}) is lost: {error}")
        return NodeNews(ended, stopped_by)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""
        self._send(messages.of(messages.SIGNAL, number=number))

    def end(self, *, collect: bool) -> None:
        """End the ranks."""
        self._send(messages.of(messages.END, collect=collect))

    def kill(self) -> None:
        """Kill the ranks."""
        self._send(messages.of(messages.KILL))

    def finish(self, code: int, reason: str) -> None:
        """Let the launcher end."""
        self._send(messages.of(messages.FINISH, code=code, reason=reason))

    def leave(self, within_s: float) -> bool:
        """Return whether the launcher has hung up, which it does when it has read that it may end."""
        deadline = time.monotonic() + within_s
        while not self.poll().lost:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _send(self, message: dict[str, object]) -> None:
        try:
            if not self._lost:
                self._channel.send(message)
        except ChannelLost as error:
            self._lost = str(error)


class Door:
    """Listener of node 0: launchers that know the key come in, each in a thread of its own until it has."""

    def __init__(self, listener: socket.socket, key: bytes, *, silent_s: float = SILENT_S) -> None:
        self._listener, self._key, self._silent_s = listener, key, silent_s
        self._arrived: queue.SimpleQueue[tuple[Channel, Joining]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._is_closed = False
        threading.Thread(target=self._open, name="door of launchers", daemon=True).start()

    def arrivals(self) -> list[tuple[Channel, Joining]]:
        """Return the launchers that have come in since the last call."""
        arrived = []
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _open(self) -> None:
        while True:
            self._handshakes.acquire()
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # a caller that is gone again, the network's trouble, or too many open files
                if self._is_closed or self._listener.fileno() < 0:
                    return
                self._handshakes.release()
                log.warning("a launcher's call could not be taken: %s", error.strerror or error)
                time.sleep(RETRY_S)
                continue
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            channel = accept(connection, self._key, silent_s=self._silent_s)
            self._arrived.put((channel, _first_message(channel)))
        except (ChannelLost, ValueError) as error:
            log.warning("a caller from %s is not let in as a launcher: %s", address, error)
            connection.close()
        finally:
            self._handshakes.release()


def _first_message(channel: Channel) -> Joining:
    deadline = time.monotonic() + JOIN_MESSAGE_S
    while time.monotonic() < deadline:
        if received := channel.receive():
            return messages.joining(received[0])
        time.sleep(0.02)
    raise ChannelLost("it did not say which node it is")
