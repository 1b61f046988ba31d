"""Launcher of a node other than 0: it joins, waits for orders and carries them out."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from mega_rl.errors import RunError, UserError
from mega_rl.launcher.health import RankHealth
from mega_rl.launcher.nodes import messages
from mega_rl.launcher.nodes.channel import Channel, ChannelLost, connect
from mega_rl.launcher.nodes.messages import Joining, Message
from mega_rl.launcher.outcome import Conclusion
from mega_rl.launcher.ranks import NodeRanks
from mega_rl.launcher.signals import StopSignals
from mega_rl.launcher.warden import SAVE_S

log = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0


class Member:
    """A launcher that follows that of node 0."""

    def __init__(
        self, channel: Channel, make_ranks: Callable[[str], NodeRanks], health: RankHealth, stop: StopSignals
    ) -> None:
        """make_ranks: gets this node's address on the network by which it reaches node 0."""
        self._channel, self._health, self._stop = channel, health, stop
        self._ranks = make_ranks(channel.local_address)
        self._generation = -1
        self._conclusion: Conclusion | None = None

    def follow(self) -> Conclusion:
        """Carry orders out until the run has ended, or the launcher of node 0 is lost."""
        try:
            while self._conclusion is None:
                self._hand_on_signals()
                self._report_ends()
                for message in self._channel.receive():
                    self._obey(message)
                time.sleep(POLL_S)
            return self._conclusion
        except (ChannelLost, KeyError, ValueError) as error:
            return self._without_node_0(str(error))
        finally:
            self._ranks.close()
            self._channel.close()

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == messages.START:
            assignment = messages.assignment(message)
            self._generation = assignment.generation
            self._ranks.start(assignment)
        elif kind == messages.SIGNAL:
            self._ranks.signal(messages.number(message, "number"))
        elif kind == messages.END:
            if message.get("collect") and self._ranks.processes:
                self._health.collect(self._ranks.processes)
            self._ranks.end()
        elif kind == messages.KILL:
            self._ranks.kill()
        elif kind == messages.FINISH:
            self._conclusion = Conclusion(messages.number(message, "code"), str(message.get("reason", "")))

    def _report_ends(self) -> None:
        if ends := self._ranks.poll():
            content = [messages.of(messages.ENDED, end) for end in ends]
            self._channel.send(messages.of(messages.ENDED, generation=self._generation, ends=content))

    def _hand_on_signals(self) -> None:
        """Hand signals on to the ranks of this node, which agree with all others; a spare just leaves."""
        for number in self._stop.take():
            self._ranks.signal(number)
            self._channel.send(messages.of(messages.STOPPED_BY, number=number))
            if self._generation < 0:
                self._conclusion = Conclusion(128 + number)

    def _without_node_0(self, reason: str) -> Conclusion:
        """Let the ranks save and end, as those of node 0 do without their launcher, and kill what is left."""
        line = f"the launcher of node 0 is lost: {reason}"
        if self._ranks.processes:
            log.warning("%s; the ranks of this node end their step and save", line)
        self._ranks.signal(signal.SIGTERM)
        deadline = time.monotonic() + SAVE_S
        while self._ranks.processes and time.monotonic() < deadline:
            for number in self._stop.take():  # a second Ctrl-C ends at once
                self._ranks.signal(number)
            self._ranks.poll()
            time.sleep(POLL_S)
        return Conclusion(128 + self._stop.first if self._stop.first else RunError.exit_code, line)


def join(
    address: str,
    port: int,
    key: bytes,
    joining: Joining,
    *,
    join_s: float,
    silent_s: float,
    stopped: Callable[[], bool],
) -> Channel | None:
    """Call the launcher of node 0 until it answers; None when a signal came first.

    Raises:
        RunError: it did not answer within `join_s` seconds.
        UserError: another program answers there, or a launcher with another key.
    """
    deadline = time.monotonic() + join_s
    reason = ""
    tries_of_key = 3  # a port may change hands while a run is started again
    while not stopped():
        try:
            channel = connect(address, port, key, silent_s=silent_s)
            channel.send(messages.of(messages.JOIN, joining))
            return channel
        except ChannelLost as error:
            tries_of_key -= 1
            if not tries_of_key:
                raise UserError(
                    f"--master-addr={address} --master-port={port}: this node is not let in ({error}); give every node "
                    "the same MEGA_RL_LAUNCH_KEY, and the address of the launcher of node 0"
                ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise RunError(
                f"the launcher of node 0 did not answer at {address}, port {port}, within {join_s:g} s ({reason})"
            )
        time.sleep(RETRY_S)
    return None
