"""The choice of a transport: by where servers run, and over a slow link by its measured rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from functools import partial
from urllib.parse import urlsplit

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, ServerError
from mega_rl.rollout.sglang.server.store import BUCKETS
from mega_rl.rollout.sglang.weights.cuda_ipc import CudaIpcTransport
from mega_rl.rollout.sglang.weights.delta import DeltaTransport
from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
from mega_rl.rollout.sglang.weights.reshard import changes_pay_off
from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights, Transport

log = logging.getLogger(__name__)

_NOT_FOUND = 404
_TEST_BYTES = 4 << 20  # of a message that measures a link
_TRIES = 3


def transport_for(
    weights: TrainerWeights,
    servers: Collection[Server],
    ranks: Ranks,
    *,
    delta: str,
    joined: bool,
    shared: Sequence[int] | None,
    bucket_bytes: int,
    timeout_s: float,
) -> Transport:
    """Return CUDA IPC to servers on the trainer's GPUs, else changes over a slow link, else process groups; collective.

    delta: rollout.sglang.sync.delta. shared: host of each rank where servers take turns on the ranks' devices.
    """
    controls = [one.receiver for one in servers]
    far = joined and not all(is_loopback(urlsplit(one.endpoint.url).hostname or "") for one in controls)
    measure = partial(sends_changes, delta, controls, takes_turns=shared is not None)
    if (delta == "on" or (delta == "auto" and far)) and run_on_one(measure, ranks):
        return DeltaTransport(weights, servers, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if shared is not None:
        return CudaIpcTransport(weights, servers, hosts=shared, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return DistributedTransport(weights, servers, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def sends_changes(setting: str, controls: Sequence[Control], *, takes_turns: bool) -> bool:
    """Measure the links to all servers, and return whether they get changes instead of all weights.

    setting: "on" or "auto". takes_turns: servers give back their weights' memory between generations.
    Raises UserError where changes are set and cannot be; ServerError where a server does not answer.
    """
    rates = [None if takes_turns else _link_rate(control) for control in controls]
    for control, rate in zip(controls, rates, strict=True):
        if rate is None and setting == "on":
            raise UserError(
                f"rollout.sglang.sync.delta=on: server {control.endpoint.index} at {control.endpoint.url} takes no "
                "changes; start it on one host, with its own devices, by mega_rl.rollout.sglang.server.launcher"
            )
    slowest = min((rate for rate in rates if rate is not None), default=0.0)
    chosen = None not in rates and (setting == "on" or changes_pay_off(slowest))
    log.info("weights go %s: the slowest link moves %.3g MB/s", "as changes" if chosen else "whole", slowest / 1e6)
    return chosen


def _link_rate(control: Control) -> float | None:
    """Return the bytes per second to a server; None if it takes no changes."""
    try:
        control.call("GET", BUCKETS)
    except ServerError as error:
        if error.status != _NOT_FOUND:
            raise
        return None
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        control.call("POST", BUCKETS, content=b"{}\n" + bytes(_TEST_BYTES))
        seconds.append(time.perf_counter() - start)
    return _TEST_BYTES / min(seconds)
