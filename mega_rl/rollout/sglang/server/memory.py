"""Device memory of a run's servers that take turns with the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import merge_failures, raise_together
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.http.ask_all import each
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.pool import ServerPool

log = logging.getLogger(__name__)


class ServersMemory:
    """`workers.residency.ServerMemory` of all servers.

    A server that fails to release or resume is stopped, for only then is its memory known to be free; it is started
    again before the next rollout needs it, as any server that was lost.
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
        """See `workers.residency.ServerMemory`. Raises RunError on all ranks when no server is left."""
        self._all("release", self._release, tags)

    def resume(self, tags: Sequence[str]) -> None:
        """See `workers.residency.ServerMemory`. Raises RunError on all ranks when no server is left."""
        self._all("resume", self._resume, tags)

    # SGLang fails when it is to release what it has released, or to resume what it holds.
    def _release(self, index: int, tags: Sequence[str]) -> None:
        held = [tag for tag in tags if tag not in self._released[index]]
        if held:
            release_memory(self._controls[index], held)
            self._released[index].update(held)

    def _resume(self, index: int, tags: Sequence[str]) -> None:
        gone = [tag for tag in tags if tag in self._released[index]]
        if gone:
            self._controls[index].memory.resume(gone)
            self._released[index].difference_update(gone)

    def _all(self, verb: str, ask: Callable[[int, Sequence[str]], None], tags: Sequence[str]) -> None:
        running = [index for index in self._controls if index not in self._stopped]
        _, own = each(running, lambda index: ask(index, tags))
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
        control.generation.flush()
    control.memory.release(tags)


def release_at_start(pool: ServerPool, ranks: Ranks, tags: Sequence[str], *, timeout_s: float) -> None:
    """Let every server that has just started release this memory; collective. Raises RunError on all ranks."""
    own = [index for index in range(len(pool.endpoints)) if pool.owner(index) == ranks.rank]

    def release(index: int) -> None:
        control = Control(pool.endpoints[index], timeout_s=timeout_s)
        try:
            release_memory(control, tags)
        finally:
            control.close()

    _, failed = each(own, release)
    failed = merge_failures(failed, ranks)
    if failed:
        raise RunError(f"servers did not release their memory after their start: {'; '.join(failed.values())}")
