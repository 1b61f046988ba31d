"""Faults of runs on a real Slurm or Ray."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.fault_campaign.clusters import ClusterRun
from tests.fault_campaign.control_groups import kill
from tests.fault_campaign.faults import Fault
from tests.fault_campaign.runs import Run

HOW = ("kill a rank", "stop a rank", "kill a node", "signal")


@dataclass
class ClusterFault(Fault):
    """A rank is killed or stopped, a node is lost with its daemons and ranks, or the run is asked to save and end."""

    launcher: str = "slurm"
    how: str = "kill a rank"
    deadline_s: float = 600.0  # a lost node is noticed late, and runs are placed anew

    def __post_init__(self) -> None:
        self.names_cause = self.how != "signal"

    def fire(self, run: Run) -> str:
        assert isinstance(run, ClusterRun)
        if self.how == "kill a node":
            self.causes = ("node", "rank")
            return run.cluster.lose_node(run)
        if self.how == "signal":
            return run.cluster.signal(run)
        number = signal.SIGKILL if self.how == "kill a rank" else signal.SIGSTOP
        target = run.pick_rank()
        if target is None or not kill(target[1], number):
            return ""
        self.causes = (f"rank {target[0]}",)
        return f"{number.name} to rank {target[0]}"

    def heal(self, run: Run) -> None:
        assert isinstance(run, ClusterRun)
        run.cluster.restore()

    def close(self, run: Run) -> None:
        self.heal(run)
