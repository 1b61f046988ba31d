"""A launch: what a launcher is started with, and the launcher of a node as one call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_rl import progress
from mega_rl.launcher.health import health_of
from mega_rl.launcher.nodes import LocalNode
from mega_rl.launcher.ranks import NodeRanks
from mega_rl.launcher.restarts import RestartPolicy
from mega_rl.launcher.signals import StopSignals
from mega_rl.launcher.store import LOOPBACK
from mega_rl.launcher.supervisor import Conclusion, SavedRuns, Supervisor
from mega_rl.progress.terminal import ERASE_LINE
from mega_rl.rollout.sglang.server.kept import keeping_servers


@dataclass(frozen=True)
class Launch:
    """Ranks of one node, in JSON the argument of `python -m mega_rl.launcher`.

    program: a module and its arguments. run_dir: folder of the ranks' checkpoints and records; empty: they have none,
    and are not started again.
    """

    program: tuple[str, ...]
    nproc_per_node: int
    max_restarts: int = 0
    run_dir: str = ""

    @classmethod
    def parse(cls, text: str) -> Launch:
        """Return the launch that `arguments` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "program": tuple(fields["program"])})

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the interpreter that start this launch as a process."""
        return ["-m", "mega_rl.launcher", json.dumps(asdict(self), ensure_ascii=False)]


def launch(settings: Launch, *, variables: Mapping[str, str] | None = None) -> int:
    """Run ranks on this node until they have ended for good; returns the exit code of the first that failed.

    variables: of the ranks, besides this process's. 0 when all have ended well; 128 + signal when a signal, to a rank
    or to this process, which hands it on, ended them.
    """
    with StopSignals() as stop, keeping_servers(possible=settings.max_restarts > 0) as kept:
        with progress.phase(f"starting {settings.nproc_per_node} ranks", announce=True):
            ranks = NodeRanks(settings.program, variables={**os.environ, **kept, **(variables or {})})
        try:
            conclusion = _run(settings, ranks, stop)
        finally:
            ranks.close()
    if conclusion.line:
        start = ERASE_LINE if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}error: {conclusion.line}\n")
    return conclusion.code


def _run(settings: Launch, ranks: NodeRanks, stop: StopSignals) -> Conclusion:
    run_dir = Path(settings.run_dir) if settings.run_dir else None
    health = health_of(run_dir)
    local = LocalNode(ranks, health)
    try:
        return Supervisor(
            local,
            nproc=settings.nproc_per_node,
            master_addr=LOOPBACK,
            health=health,
            saved=SavedRuns(run_dir),
            restarts=RestartPolicy(settings.max_restarts),
            stop=stop,
        ).run()
    finally:
        local.close_store()
