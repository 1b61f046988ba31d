"""Seeded cases of the campaign: which fault, at which point of which run."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from errno import EIO, ENOSPC, EROFS
from signal import SIGABRT, SIGBUS, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, SIGUSR1
from typing import Any

from tests.fault_campaign.cluster_faults import HOW, ClusterFault
from tests.fault_campaign.faults import (
    BadReward,
    ClockJump,
    EarlyExit,
    Fault,
    KillLauncher,
    KillRank,
    OutOfMemory,
    SlowRank,
    StopRank,
)
from tests.fault_campaign.inputs import LAYOUTS, STEPS
from tests.fault_campaign.network_faults import BadService, LossyLink, Partition, SlowLink
from tests.fault_campaign.server_faults import LostServer, LyingServer
from tests.fault_campaign.servers import HOW as SERVER_HOW
from tests.fault_campaign.storage_faults import FOR_EVER_S, DamagedFile, FailingWrites, FullDisk, LostFolder

LINK = ("node", "rank", "host")  # causes of a run whose hosts do not reach one another
DAMAGE = ["flip", "cut", "empty", "noise"]
MOMENTS = [0.3, 1.0, FOR_EVER_S]
TIMES = [1, 2, 0]
SERVICE_HOW = ["500", "503", "404", "close", "hang", "garbage", "short", "nan", "text", "long", "cut"]
# Each kind: its share of the cases, its class, words of its cause, and its fields: a list to choose from, or a range.
KINDS: dict[str, tuple[float, type[Fault], tuple[str, ...], dict[str, list[Any] | tuple[float, float]]]] = {
    "kill a rank": (22, KillRank, (), {"number": [SIGKILL, SIGKILL, SIGSEGV, SIGABRT, SIGBUS]}),
    "stop a rank": (8, StopRank, (), {}),
    "stop a rank for a moment": (5, StopRank, (), {"seconds": (0.2, 2.5)}),
    "slow rank": (4, SlowRank, (), {"share": [0.05, 0.2], "seconds": (0.5, 2.0)}),
    "kill the launcher": (6, KillLauncher, (), {}),
    "signal to the launcher": (6, KillLauncher, (), {"number": [SIGTERM, SIGINT, SIGUSR1]}),
    # The kernel kills the rank, or the rank stands still at its limit: then the line that takes the memory is named.
    "out of memory": (3, OutOfMemory, ("SIGKILL", "memory", "hung in reward function"), {}),
    "reward function": (
        6, BadReward, ("reward",), {"how": ["raise", "exit", "system exit", "hang", "spin", "output"]},
    ),
    "early exit": (
        4, EarlyExit, (),
        {"code": [0, 0, 0, 1, 2, 7, 75, 143], "everywhere": [False, True], "may_start_late": [False]},
    ),
    "clock jump": (3, ClockJump, (), {"offset": [90, -3600, 86_400, -86_400, 400 * 86_400]}),
    "full disk": (4, FullDisk, ("space", "disk", "free"), {"seconds": [0.0, 0.5]}),
    "failing writes": (3, FailingWrites, (os.strerror(EIO), "checkpoint"), {"error": [EIO], "seconds": MOMENTS}),
    "writes without space": (
        2, FailingWrites, (os.strerror(ENOSPC), "checkpoint"), {"error": [ENOSPC], "seconds": MOMENTS},
    ),
    "read-only disk": (2, FailingWrites, (os.strerror(EROFS), "checkpoint"), {"error": [EROFS], "seconds": MOMENTS}),
    "lost folder": (3, LostFolder, (), {"part": ["checkpoints", "rollouts", ""]}),
    "damaged checkpoint": (
        6, DamagedFile, ("checkpoint", "step_"),
        {"pattern": [f"run/checkpoints/step_*/{file}" for file in ("*.safetensors", "*.json", "*")], "how": DAMAGE},
    ),
    "damaged run folder": (
        3, DamagedFile, ("metrics", "config", "run"),
        {"pattern": ["run/metrics.jsonl", "run/*.yaml", "run/health/*", "run/*"], "how": DAMAGE},
    ),
    "partition": (4, Partition, LINK, {"seconds": [0.0, 0.0, 1.0]}),
    "packet loss": (3, LossyLink, LINK, {"percent": [2, 10, 30], "seconds": (0.5, 3.0)}),
    "slow link": (2, SlowLink, LINK, {"kbit": [100, 500, 2000], "seconds": (0.5, 3.0)}),
    "Slurm": (2, ClusterFault, (), {"launcher": ["slurm"], "how": [*HOW]}),
    "Ray": (2, ClusterFault, (), {"launcher": ["ray"], "how": [*HOW]}),
    "lying server": (3, LyingServer, ("SGLang", "server", "sample"), {"how": [*SERVER_HOW], "times": TIMES}),
    "lost server": (0.5, LostServer, ("SGLang", "server"), {"number": [SIGKILL, SIGKILL, SIGSTOP]}),
    "reward service": (6, BadService, ("reward",), {"how": SERVICE_HOW, "times": TIMES}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault in one run.

    step: logged steps before it; -1: while the ranks start. delay_s: after that step. restarts: `--max-restarts`.
    memory: in-memory checkpoints are on.
    """

    number: int
    fault: Fault
    layout: str
    launcher: str
    step: int
    delay_s: float
    restarts: int
    memory: bool

    @property
    def cluster(self) -> str:
        """Return the cluster or server that the run needs, which one worker starts once; empty for none."""
        if isinstance(self.fault, LyingServer | LostServer):
            return "sglang"
        return self.launcher if self.launcher in ("slurm", "ray") else ""

    @property
    def title(self) -> str:
        """Return the case in words."""
        where = "at the start" if self.step < 0 else f"after step {self.step}"
        memory = ", memory" if self.memory else ""
        return (
            f"{self.number} {self.fault.kind} {where}, {self.layout}, {self.launcher}, {self.restarts} restarts{memory}"
        )


def cases(seed: int, count: int, *, kinds: tuple[str, ...] = ()) -> list[Case]:
    """Return `count` cases, the same for the same seed. kinds: only these."""
    chosen = {name: one for name, one in KINDS.items() if not kinds or any(kind in name for kind in kinds)}
    draw = random.Random(seed)
    names = draw.choices(list(chosen), weights=[weight for weight, *_ in chosen.values()], k=count)
    return [_case(number, name, random.Random(f"{seed}/{number}")) for number, name in enumerate(names)]


def _case(number: int, kind: str, draw: random.Random) -> Case:
    _, make, causes, fields = KINDS[kind]
    drawn = {
        name: draw.choice(values) if isinstance(values, list) else draw.uniform(*values)
        for name, values in fields.items()
    }
    fault = make(kind, causes, **drawn)
    layout = draw.choice(["tp2", "dp2", "pp2", "fsdp2", "tp2", "dp2", "tp2-dp2", "tp2-pp2"])
    assert layout in LAYOUTS
    launcher = fault.launcher if isinstance(fault, ClusterFault) else "train"
    killed = isinstance(fault, KillLauncher) and fault.number == SIGKILL  # torchrun's ranks outlive it
    believed = isinstance(fault, EarlyExit)  # by torchrun, where all ranks end with 0
    if launcher != "train":
        layout = draw.choice(["tp2", "dp2", "tp2-dp2"])
    elif isinstance(fault, LyingServer | LostServer):
        layout = draw.choice(["tp2", "dp2"])
    elif fault.nodes == 1 and not killed and not believed and draw.random() < 0.04:
        launcher = "torchrun"
    elif fault.nodes == 2 or draw.random() < 0.12:
        launcher = "nodes"
    early = fault.may_start_late and draw.random() < 0.08
    return Case(
        number=number,
        fault=fault,
        layout=layout,
        launcher=launcher,
        step=-1 if early else draw.randrange(1, STEPS - 2),
        delay_s=draw.uniform(0.0, 2.0 if early else 0.15),
        restarts=0 if launcher == "torchrun" else draw.choice([0, 2, 2]),
        memory=launcher == "train" and draw.random() < 0.3,
    )
