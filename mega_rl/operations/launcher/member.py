"""Launcher of a node other than 0: it waits for orders of node 0 and carries them out."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import asdict

from mega_rl.errors import RunError
from mega_rl.operations.launcher.channel import Channel, ChannelLost
from mega_rl.operations.launcher.nodes import ENDED, FINISH, POLL_S, START, STOPPED_BY, LocalNode
from mega_rl.operations.launcher.outcome import Conclusion
from mega_rl.operations.launcher.reaper import SAVE_S
from mega_rl.operations.launcher.signals import StopSignals
from mega_rl.untrusted import read_record

log = logging.getLogger(__name__)


def follow(channel: Channel, node: LocalNode, stop: StopSignals) -> Conclusion:
    """Carry out orders until the run has ended or the launcher of node 0 is lost."""
    try:
        return _carry_out_orders(channel, node, stop)
    except (ChannelLost, ValueError) as error:
        return _without_node_0(node, stop, str(error))
    finally:
        node.ranks.close()
        channel.close()


def _carry_out_orders(channel: Channel, node: LocalNode, stop: StopSignals) -> Conclusion:
    generation: object = -1
    while True:
        for number in stop.take():  # to the ranks of this node, which agree with all others
            node.ranks.signal(number)
            channel.send({"type": STOPPED_BY, "number": number})
            if generation == -1:  # a spare only leaves
                return Conclusion(128 + number)
        if ends := node.ranks.poll():
            channel.send({"type": ENDED, "generation": generation, "ends": [asdict(end) for end in ends]})
        for message in channel.receive():
            kind, values = str(message.get("type")), {name: one for name, one in message.items() if name != "type"}
            if kind == FINISH:
                return read_record(Conclusion, values)
            node.order(kind, **values)
            generation = values["generation"] if kind == START else generation
        time.sleep(POLL_S)


def _without_node_0(node: LocalNode, stop: StopSignals, reason: str) -> Conclusion:
    """Let the ranks save and end, as those of node 0 do without their launcher, and kill the rest."""
    line = f"the launcher of node 0 is lost: {reason}"
    if node.ranks.processes:
        log.warning("%s; the ranks of this node end their step and save", line)
    node.ranks.signal(signal.SIGTERM)
    deadline = time.monotonic() + SAVE_S
    while node.ranks.processes and time.monotonic() < deadline:
        for number in stop.take():  # a second Ctrl-C ends at once
            node.ranks.signal(number)
        node.ranks.poll()
        time.sleep(POLL_S)
    return Conclusion(128 + stop.first if stop.first else RunError.exit_code, line)
