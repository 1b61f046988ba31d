"""Faults of SGLang servers: one that lies, and one that is killed or stopped beside the run that has started it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from mega_rl.rollout.sglang.server import launcher
from tests.fault_campaign.control_groups import kill
from tests.fault_campaign.faults import Fault
from tests.fault_campaign.inputs import REWARD
from tests.fault_campaign.orders import HIT, ORDER, give_order
from tests.fault_campaign.runs import Run
from tests.fault_campaign.servers import SETTINGS, SglangServer, start_proxy


@dataclass
class LyingServer(Fault):
    """A server answers wrongly, late or not at all, for a number of requests or for ever."""

    how: str = "500"
    times: int = 2  # of requests; 0: all from now on
    deadline_s: float = 600.0
    server: SglangServer | None = None  # that the proxy hands on to, once a worker has one
    _proxy = 0  # its process

    def prepare(self, run: Run) -> None:
        assert self.server is not None
        keys = run.folder / "keys.json"
        self.server.keys.write(keys)
        self._proxy, port = start_proxy(run.folder, self.server)
        joined = (f"rollout.sglang.urls=[http://127.0.0.1:{port}]", f"rollout.sglang.keys_file={keys}")
        self.reward = (*REWARD, *SETTINGS, *joined)

    def fire(self, run: Run) -> str:
        give_order(run.folder, self.how, self.times)
        hit = run.wait_for((run.folder / HIT).exists, deadline_s=60.0)
        return f"the SGLang server: {self.how}, {self.times or 'all'} times" if hit else ""

    def heal(self, run: Run) -> None:
        (run.folder / ORDER).unlink(missing_ok=True)

    def close(self, run: Run) -> None:
        if self._proxy:
            kill(self._proxy)
            os.waitpid(self._proxy, 0)
        self._proxy = 0


@dataclass
class LostServer(Fault):
    """A process of the server that a run has started is killed or stopped."""

    number: signal.Signals = signal.SIGKILL
    reward: tuple[str, ...] = (*REWARD, *SETTINGS, "rollout.sglang.server.args.max_total_tokens=20000")
    deadline_s: float = 800.0  # it is started again

    def prepare(self, run: Run) -> None:
        scratch = run.folder / "tmp"
        scratch.mkdir()
        run.environment["TMPDIR"] = str(scratch)

    def fire(self, run: Run) -> str:
        processes = sorted(pid for pid in run.members() if is_server(pid))
        if not processes or not kill(pid := run.random.choice(processes), self.number):
            return ""
        return f"{self.number.name} to process {processes.index(pid)} of {len(processes)} of the SGLang server"


def is_server(pid: int) -> bool:
    """Return whether a process is of an SGLang server: its main process or one of those below it."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"sglang::" in line or launcher.__name__.encode() in line
