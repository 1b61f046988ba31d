"""Faults of processes, memory and time; `FAULTS` of `plan` has all of them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fault_campaign.control_groups import ControlGroup, kill
from tests.fault_campaign.inputs import POOL, REWARD
from tests.fault_campaign.runs import Run, run_tool

JUMPING_CLOCK = Path(__file__).with_name("jumping_clock.c")


@dataclass
class Fault:
    """A fault: what it needs of a run, how it is injected, and what a run that it ends must say.

    causes: words, one of which stands in the last line of a run that stops. settings: of the run with the fault alone.
    """

    kind: str
    causes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reward: tuple[str, ...] = REWARD  # settings of the rewards
    deadline_s: float = 240.0  # of the run's end after the fault, some seconds on an idle machine
    may_start_late: bool = True  # may be injected before the first step
    nodes: int = 1
    names_cause: bool = True  # whether a run that it ends says why

    def prepare(self, run: Run) -> None:
        """Change the run's folder or environment before it starts."""

    def fire(self, run: Run) -> str:
        """Inject the fault; returns words for it, empty where nothing was left to hit."""
        raise NotImplementedError

    def heal(self, run: Run) -> None:
        """Take the fault away before the run is started again."""

    def close(self, run: Run) -> None:
        """End what `prepare` and `fire` have started, whatever became of the run."""


@dataclass
class KillRank(Fault):
    """A rank ends by a signal."""

    number: signal.Signals = signal.SIGKILL

    def fire(self, run: Run) -> str:
        target = run.pick_rank()
        if target is None or not kill(target[1], self.number):
            return ""
        self.causes = (f"rank {target[0]}",)
        return f"{self.number.name} to rank {target[0]}"


@dataclass
class StopRank(Fault):
    """A rank is stopped, for ever or for `seconds`."""

    seconds: float = 0.0

    def fire(self, run: Run) -> str:
        target = run.pick_rank()
        if target is None or not kill(target[1], signal.SIGSTOP):
            return ""
        self.causes = (f"rank {target[0]}",)
        if self.seconds:
            time.sleep(self.seconds)
            kill(target[1], signal.SIGCONT)
        return f"SIGSTOP to rank {target[0]}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass
class SlowRank(Fault):
    """A rank gets a small share of a core, for `seconds`."""

    share: float = 0.1
    seconds: float = 3.0

    def fire(self, run: Run) -> str:
        target = run.pick_rank()
        if target is None:
            return ""
        group = ControlGroup("cpu", run.name)
        group.limit_cpu(self.share)
        try:
            group.add(target[1])
        except ProcessLookupError:
            return ""
        run.wait_for(lambda: False, deadline_s=self.seconds)
        group.limit_cpu(4.0)
        return f"rank {target[0]} has {self.share:.0%} of a core for {self.seconds:g} s"

    def close(self, run: Run) -> None:
        ControlGroup("cpu", run.name).close()


@dataclass
class KillLauncher(Fault):
    """A launcher ends by a signal: SIGKILL, or one that asks the run to save and stop."""

    number: signal.Signals = signal.SIGKILL
    names_cause: bool = False

    def fire(self, run: Run) -> str:
        launcher = run.random.choice(run.launchers)
        if launcher.poll() is not None or not kill(launcher.pid, self.number):
            return ""
        return f"{self.number.name} to the launcher of node {launcher.node}"


@dataclass
class OutOfMemory(Fault):
    """A rank's reward takes memory without end, under a limit of the kernel's."""

    limit_mib: int = 256

    def fire(self, run: Run) -> str:
        ranks = run.ranks()
        if not ranks:
            return ""
        group = ControlGroup("memory", run.name)
        group.limit_memory(self.limit_mib << 20)
        for pid in ranks.values():
            try:
                group.add(pid)
            except ProcessLookupError:
                return ""
        order(run, "memory")
        run.wait_for(lambda: (run.folder / "taken").exists(), deadline_s=60.0)
        taken = (run.folder / "taken").exists()
        (run.folder / "order").unlink(missing_ok=True)  # of ranks that the limit has ended before they have a reward
        return "a reward takes memory without end" if taken else ""

    def heal(self, run: Run) -> None:
        ControlGroup("memory", run.name).close()

    def close(self, run: Run) -> None:
        self.heal(run)


@dataclass
class BadReward(Fault):
    """A reward function raises, ends its process, hangs or writes without end."""

    how: str = "raise"
    reward: tuple[str, ...] = POOL

    def fire(self, run: Run) -> str:
        order(run, self.how)
        run.wait_for(lambda: (run.folder / "taken").exists(), deadline_s=60.0)
        taken = (run.folder / "taken").exists()
        (run.folder / "order").unlink(missing_ok=True)
        return f"the reward function: {self.how}" if taken else ""


@dataclass
class EarlyExit(BadReward):
    """A rank, or every rank, ends by os._exit while it scores; exit code 0 is no success."""

    code: int = 0
    everywhere: bool = False
    reward: tuple[str, ...] = REWARD

    def fire(self, run: Run) -> str:
        self.how = f"end {self.code} {'everywhere' if self.everywhere else 'once'}"
        self.causes = (f"ended with exit code {self.code}",)
        witness = super().fire(run)
        run.wait_for(lambda: False, deadline_s=0.5)  # ranks that wait for one another have all scored by now
        self.heal(run)
        return witness

    def heal(self, run: Run) -> None:
        (run.folder / "last").unlink(missing_ok=True)


@dataclass
class ClockJump(Fault):
    """The wall clock of all processes jumps by so many seconds, by a preloaded library; the monotonic one goes on."""

    offset: int = 86_400

    def prepare(self, run: Run) -> None:
        (run.folder / "clock").write_text("0")
        run.environment["JUMPING_CLOCK"] = str(run.folder / "clock")

    def fire(self, run: Run) -> str:
        if not run.ranks():
            return ""
        replacement = run.folder / "clock.new"
        replacement.write_text(str(self.offset))
        replacement.rename(run.folder / "clock")
        return f"the clock jumps by {self.offset} s"

    def heal(self, run: Run) -> None:
        run.environment.pop("JUMPING_CLOCK", None)


def order(run: Run, fault: str) -> None:
    """Have the run's reward function commit a fault at its next call."""
    file = run.folder / "order.new"
    file.write_text(fault)
    os.rename(file, run.folder / "order")


def compiled(source: Path, folder: Path) -> Path:
    """Compile a library to preload, into a folder."""
    library = folder / f"{source.stem}.so"
    run_tool("gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    return library
