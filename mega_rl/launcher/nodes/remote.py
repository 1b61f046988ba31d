"""Nodes of other launchers, as the launcher of node 0 sees them, and the door by which those come in."""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections import Counter

from mega_rl.launcher.nodes import messages
from mega_rl.launcher.nodes.channel import HANDSHAKE_S, SILENT_S, Channel, ChannelLost, Greeting
from mega_rl.launcher.nodes.messages import Joining
from mega_rl.launcher.nodes.node import NodeNews
from mega_rl.launcher.ranks import Assignment, RankEnd

log = logging.getLogger(__name__)

MAX_CALLERS = 512  # at the door, within the 1,024 files that a process may usually have open
CROWD, CROWDED_S = 64, 2.0  # so many callers have HANDSHAKE_S, more than that this
MAX_LINES = 100  # in the log, of callers that are not let in
LOOK_S = 0.2
RETRY_S = 0.05  # after a call that could not be taken


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
    """Listener of node 0: launchers that know the key come in. One thread greets all callers, and waits for none."""

    def __init__(self, listener: socket.socket, key: bytes, *, silent_s: float = SILENT_S) -> None:
        self._listener, self._key, self._silent_s = listener, key, silent_s
        self._arrived: queue.SimpleQueue[tuple[Channel, Joining]] = queue.SimpleQueue()
        self._lines = 0  # lines logged about refused calls
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._open, name="door of launchers", daemon=True)
        self._thread.start()

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
        self._thread.join(2 * LOOK_S)
        self._listener.close()

    def _open(self) -> None:
        while not self._is_closed:
            for ready, _ in self._selector.select(LOOK_S):
                if ready.data is None:
                    self._take()
                elif self._selector.get_map().get(ready.fd) == ready:  # not turned away for one that came with it
                    self._hear(ready.data)
            callers = self._callers()
            limit = HANDSHAKE_S if len(callers) <= CROWD else CROWDED_S
            for caller in [one for one in callers if time.monotonic() - one.since > limit]:
                self._turn_away(caller, "it did not answer (timed out)")
        for caller in self._callers():
            caller.close()
        self._selector.close()

    def _callers(self) -> list[Greeting]:
        """Return the callers that are not let in, the oldest first."""
        return [entry.data for entry in self._selector.get_map().values() if entry.data is not None]

    def _take(self) -> None:
        try:
            connection, address = self._listener.accept()
            caller = Greeting(connection, address[0], self._key)
        except OSError as error:  # a caller that is gone again, the network's trouble, or too many open files
            self._warn(f"a launcher's call could not be taken: {error.strerror or error}")
            self._make_room()
            time.sleep(RETRY_S)
            return
        self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._selector.get_map()) > MAX_CALLERS:
            self._make_room()

    def _make_room(self) -> None:
        """Turn away the oldest caller of the address that has most; a launcher answers at once, and is none of them."""
        strangers = [caller for caller in self._callers() if caller.channel is None]
        counts = Counter(caller.address for caller in strangers)
        if strangers:
            self._turn_away(max(strangers, key=lambda one: counts[one.address]), "too many callers wait")

    def _hear(self, caller: Greeting) -> None:
        try:
            if caller.channel is None:
                caller.advance(silent_s=self._silent_s)
            if caller.channel is not None and (received := caller.channel.receive()):
                self._arrived.put((caller.channel, messages.joining(received[0])))
                self._selector.unregister(caller.connection)
        except (ChannelLost, ValueError) as error:
            self._turn_away(caller, str(error))

    def _turn_away(self, caller: Greeting, reason: str) -> None:
        self._selector.unregister(caller.connection)
        caller.close()
        self._warn(f"a caller from {caller.address} is not let in as a launcher: {reason}")

    def _warn(self, text: str) -> None:
        self._lines += 1
        if self._lines <= MAX_LINES:
            log.warning("%s%s", text, "; nothing will be said of further calls" * (self._lines == MAX_LINES))
