"""Device memory of colocated servers: their share, and their turns with the trainer.

SGLang's `--mem-fraction-static` is a share of the memory that is free when the server starts; the rest is for its
activations, its CUDA graphs and here for the trainer. Both sides are on the device when weights are sent: the server
has weights and KV cache, the trainer the policy's parameters and a residue, which is an estimate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import closing

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import merge_failures, raise_together
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, each
from mega_rl.rollout.sglang.server.pool import ServerPool, StartedServers

log = logging.getLogger(__name__)

TAGS = ("weights", "kv_cache")  # kinds of a server's memory, in the order in which it takes them
GIB = 1 << 30
TRAINER_RESIDUE = 3 * GIB  # context, NCCL's buffers, workspaces of libraries, memory that the allocator cannot return
LEAST_CACHE = GIB  # below it a server takes requests one after the other
_SETTING = "rollout.sglang.server.args.mem_fraction_static"
# Tokens of one prefill that SGLang 0.5.21 chooses, by the size of the device (srt/arg_groups/memory_hook.py).
_PREFILL_TOKENS = ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192))
_MOST_PREFILL_TOKENS = 16384


def memory_fraction(setting: float, *, total: int, policy: int, weights: int, tp: int) -> float:
    """Return a colocated server's share of a device: the setting, or for 0 the rest.

    total: bytes of the smallest device. policy: of the largest part of the policy on a rank, with
    `reshard.sending_bytes`. weights: of one of the server's `tp` tensor-parallel ranks.

    Raises UserError where weights and a KV cache do not fit, or where a setting leaves the policy no room.
    """
    kept, reserve = policy + TRAINER_RESIDUE, server_reserve(total, tp)
    if not setting:
        room = total - kept - reserve
        if room < weights + LEAST_CACHE:
            raise UserError(
                f"{_SETTING}=0: colocated servers do not fit: of a device's {_gib(total)}, {_gib(policy)} are for the "
                f"policy's parameters while they are sent, {_gib(TRAINER_RESIDUE)} for what the trainer keeps and "
                f"{_gib(reserve)} for the server's activations, which leaves {_gib(room)}, and the server needs "
                f"{_gib(weights)} for weights and at least {_gib(LEAST_CACHE)} for its KV cache; raise "
                f"rollout.sglang.server.tp (now {tp}), cut the policy over more ranks (engine.megatron.tp, pp), or set "
                "rollout.sglang.placement=separate"
            )
        return math.floor(1000 * room / total) / 1000
    if not weights <= setting * total <= total - kept:
        raise UserError(
            f"{_SETTING}={setting:g}: of a device's {_gib(total)} a colocated server needs at least {_gib(weights)} "
            f"for weights and leaves {_gib(kept)} to the trainer, for the policy that it sends and what it keeps; "
            "leave it out to have the fraction computed"
        )
    return setting


def server_reserve(total: int, tp: int) -> int:
    """Return the bytes for a server's activations and CUDA graphs, by SGLang's rule."""
    tokens = next((count for size, count in _PREFILL_TOKENS if total < size), _MOST_PREFILL_TOKENS)
    needed = GIB // 2 + int(1.5 * tokens * (1 << 20)) + tp * GIB // 8 + GIB
    return max(needed, 10 * GIB) if total > 60 * GIB else needed


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


class ServersMemory:
    """Device memory of all servers on the trainer's devices, by `TAGS`.

    It stops a server that fails: only then its memory is known to be free. It starts again as any lost server does.
    """

    def __init__(
        self, ranks: Ranks, controls: Mapping[int, Control], pool: ServerPool, *, released: Sequence[str] = ()
    ) -> None:
        """
        controls: of the servers that this rank steers; every server has one rank that does.
        released: tags that every server has released already.
        """
        self._ranks, self._controls, self._pool = ranks, controls, pool
        self._released = {index: set(released) for index in controls}
        self._stopped: set[int] = set()  # the same on all ranks

    def started_anew(self, servers: Sequence[int]) -> None:
        """Note that these servers have just started, and so hold everything."""
        self._stopped -= set(servers)
        for index in self._released.keys() & set(servers):
            self._released[index] = set()

    def release(self, tags: Sequence[str]) -> None:
        """Release memory of all servers; collective. Raises RunError when no server is left."""
        self._all("release", tags)

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate this memory of all servers again, its content undefined; collective; errors as in `release`."""
        self._all("resume", tags)

    def _all(self, verb: str, tags: Sequence[str]) -> None:
        def ask(index: int) -> None:
            # SGLang fails if it releases memory twice, or resumes memory that it holds.
            released = self._released[index]
            due = [tag for tag in tags if (tag in released) == (verb == "resume")]
            if due and verb == "release":
                release_memory(self._controls[index], due)
                released.update(due)
            elif due:
                self._controls[index].call("POST", "/resume_memory_occupation", {"tags": due})
                released.difference_update(due)

        _, own = each([index for index in self._controls if index not in self._stopped], ask)
        failed = merge_failures(own, self._ranks)
        if not failed:
            return
        failure: RunError | None = None
        try:
            self._pool.stop(list(failed))
        except RunError as error:  # a process that SIGKILL does not end keeps its memory
            failure = error
        raise_together(failure, self._ranks, error=RunError)
        self._stopped |= failed.keys()
        reasons = "; ".join(failed.values())
        if len(self._stopped) == len(self._pool.endpoints):
            raise RunError(
                f"no SGLang server is left: servers did not {verb} the memory of {', '.join(tags)}: {reasons}"
            )
        if self._ranks.rank == 0:
            names = ", ".join(map(str, failed))
            log.warning("SGLang servers %s did not %s their memory and were stopped: %s", names, verb, reasons)


def release_memory(control: Control, tags: Sequence[str]) -> None:
    """Let one server release this memory. Raises ServerError.

    SGLang's scheduler dies of a release while a batch ends, and the last answer may arrive before it does: a flush
    succeeds when the scheduler is idle. Without a KV cache nothing can have been generated.
    """
    if "kv_cache" in tags:
        control.flush()
    control.call("POST", "/release_memory_occupation", {"tags": list(tags)})


def release_at_start(pool: StartedServers, ranks: Ranks, *, timeout_s: float) -> None:
    """Let every server that has just started release its memory; collective. Raises RunError on all ranks."""

    def release(index: int) -> None:
        with closing(Control(pool.endpoints[index], timeout_s=timeout_s)) as control:
            release_memory(control, tuple(reversed(TAGS)))

    _, own = each([index for index in range(len(pool.endpoints)) if pool.owner(index) == ranks.rank], release)
    failed = merge_failures(own, ranks)
    if failed:
        raise RunError(f"servers did not release their memory after their start: {'; '.join(failed.values())}")
