"""Seeded cases of the campaign: which fault, at which point of which run."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, SIGUSR1

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


def failing(kind: str, error: int, draw: random.Random) -> Fault:
    """Return writes that fail with an error, for a moment or for ever."""
    seconds = draw.choice([0.3, 1.0, FOR_EVER_S])
    return FailingWrites(kind, (os.strerror(error), "checkpoint"), error=error, seconds=seconds)


# Each kind: its share of the cases, and how one is drawn.
KINDS: dict[str, tuple[float, Callable[[random.Random], Fault]]] = {
    "kill a rank": (
        22,
        lambda r: KillRank("kill a rank", number=r.choice([SIGKILL, SIGKILL, SIGSEGV, SIGABRT, SIGBUS])),
    ),
    "stop a rank": (8, lambda r: StopRank("stop a rank")),
    "stop a rank for a moment": (5, lambda r: StopRank("stop a rank for a moment", seconds=r.uniform(0.2, 2.5))),
    "slow rank": (4, lambda r: SlowRank("slow rank", share=r.choice([0.05, 0.2]), seconds=r.uniform(0.5, 2.0))),
    "kill the launcher": (6, lambda r: KillLauncher("kill the launcher")),
    "signal to the launcher": (
        6,
        lambda r: KillLauncher("signal to the launcher", number=r.choice([SIGTERM, SIGINT, SIGUSR1])),
    ),
    "out of memory": (3, lambda r: OutOfMemory("out of memory", ("SIGKILL", "memory"))),
    "reward function": (
        6,
        lambda r: BadReward(
            "reward function",
            ("reward",),
            how=r.choice(["raise", "exit", "system exit", "hang", "spin", "output"]),
        ),
    ),
    "early exit": (
        4,
        lambda r: EarlyExit(
            "early exit", code=r.choice([0, 0, 0, 1, 2, 7, 75, 143]), everywhere=r.random() < 0.5, may_start_late=False
        ),
    ),
    "clock jump": (3, lambda r: ClockJump("clock jump", offset=r.choice([90, -3600, 86_400, -86_400, 400 * 86_400]))),
    "full disk": (4, lambda r: FullDisk("full disk", ("space", "disk", "free"), seconds=r.choice([0.0, 0.5]))),
    "failing writes": (3, lambda r: failing("failing writes", errno.EIO, r)),
    "writes without space": (2, lambda r: failing("writes without space", errno.ENOSPC, r)),
    "read-only disk": (2, lambda r: failing("read-only disk", errno.EROFS, r)),
    "lost folder": (3, lambda r: LostFolder("lost folder", part=r.choice(["checkpoints", "rollouts", ""]))),
    "damaged checkpoint": (
        6,
        lambda r: DamagedFile(
            "damaged checkpoint",
            ("checkpoint", "step_"),
            pattern=r.choice(
                ["run/checkpoints/step_*/*.safetensors", "run/checkpoints/step_*/*.json", "run/checkpoints/step_*/*"]
            ),
            how=r.choice(["flip", "cut", "empty", "noise"]),
        ),
    ),
    "damaged run folder": (
        3,
        lambda r: DamagedFile(
            "damaged run folder",
            ("metrics", "config", "run"),
            pattern=r.choice(["run/metrics.jsonl", "run/*.yaml", "run/health/*", "run/*"]),
            how=r.choice(["flip", "cut", "empty", "noise"]),
        ),
    ),
    "partition": (4, lambda r: Partition("partition", ("node", "rank", "host"), seconds=r.choice([0.0, 0.0, 1.0]))),
    "packet loss": (
        3,
        lambda r: LossyLink(
            "packet loss", ("node", "rank", "host"), percent=r.choice([2, 10, 30]), seconds=r.uniform(0.5, 3.0)
        ),
    ),
    "slow link": (
        2,
        lambda r: SlowLink(
            "slow link", ("node", "rank", "host"), kbit=r.choice([100, 500, 2000]), seconds=r.uniform(0.5, 3.0)
        ),
    ),
    "Slurm": (2, lambda r: ClusterFault("Slurm", launcher="slurm", how=r.choice(HOW))),
    "Ray": (2, lambda r: ClusterFault("Ray", launcher="ray", how=r.choice(HOW))),
    "lying server": (
        3,
        lambda r: LyingServer(
            "lying server", ("SGLang", "server", "sample"), how=r.choice(SERVER_HOW), times=r.choice([1, 2, 0])
        ),
    ),
    "lost server": (
        0.5,
        lambda r: LostServer("lost server", ("SGLang", "server"), number=r.choice([SIGKILL, SIGKILL, SIGSTOP])),
    ),
    "reward service": (
        6,
        lambda r: BadService(
            "reward service",
            ("reward",),
            how=r.choice(["500", "503", "404", "close", "hang", "garbage", "short", "nan", "text", "long", "cut"]),
            times=r.choice([1, 2, 0]),
        ),
    ),
}


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
    names = draw.choices(list(chosen), weights=[weight for weight, _ in chosen.values()], k=count)
    return [_case(number, chosen[name][1], random.Random(f"{seed}/{number}")) for number, name in enumerate(names)]


def _case(number: int, make: Callable[[random.Random], Fault], draw: random.Random) -> Case:
    fault = make(draw)
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
