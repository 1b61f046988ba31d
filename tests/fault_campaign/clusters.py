"""Real Slurm and Ray of this machine, each started once by the worker that has its cases, and runs on them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters.slurm.cluster import NODES, SlurmCluster, missing
from tests.fault_campaign.control_groups import ControlGroup, is_zombie, kill
from tests.fault_campaign.runs import ROOT, Launcher, Run

RAY = ROOT / ".venv" / "ray"
SUBMIT_S = 240.0  # of a command that takes a second or two
START_S = 300.0
JOB_POLL_S = 0.5
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
RECIPE = "trainer:\n  device: cpu\n"
TOKEN = "0" * 64  # of a Ray that listens for the campaign alone


@dataclass
class ClusterRun(Run):
    """A run on a cluster, whose ranks are children of its daemons and know their run by the folder they work in."""

    cluster: Slurm | Ray = field(kw_only=True)

    def start(self, commands: Sequence[Sequence[str]]) -> None:
        (command,) = commands
        (self.folder / "r.yaml").write_text(RECIPE)
        attempt = len(list(self.folder.glob("output-*-0.txt")))
        output = self.folder / f"output-{attempt}-0.txt"
        output.touch()
        self.launchers = [self.cluster.start_run(self, command, output)]

    def members(self) -> list[int]:
        below = [pid for pid in self.cluster.group.members() if works_in(pid, self.folder)]
        return [*self.group.members(), *below]


@dataclass
class Job(Launcher):
    """A job of Slurm in the place of a launcher."""

    cluster: SlurmCluster = field(kw_only=True)
    number: int = 0
    _asked: float = 0.0
    _hurried: int = 0  # the restart that was last asked to come at once

    def poll(self) -> int | None:
        """Return the job's exit code, below 0 a signal; None while it waits or runs. A requeued one starts soon."""
        if self.exit_code is None and time.monotonic() - self._asked > JOB_POLL_S:
            state = self.cluster.job(self.number)
            self._asked = time.monotonic()
            self.restarts = int(state.get("Restarts", "0"))
            if state["JobState"] in ENDED:
                code, _, number = state["ExitCode"].partition(":")
                cancelled = state["JobState"] == "CANCELLED" and code == "0"
                self.exit_code = 128 + signal.SIGTERM if cancelled else int(code) or -int(number)
            elif state["JobState"] == "PENDING" and self.restarts > self._hurried:
                # In the second of its end Slurm would take the new start for a part of it, and refuse it.
                self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now+2", check=False)
                self._hurried = self.restarts
        return self.exit_code

    def end(self) -> None:
        """Cancel the job."""
        if self.exit_code is None:
            self.cluster.call("scancel", "--signal=KILL", "--full", str(self.number), check=False)
            self.cluster.call("scancel", str(self.number), check=False)
            self.exit_code = -signal.SIGKILL


class Slurm:
    """A controller and three nodes, of which a run takes two."""

    def __init__(self, folder: Path, group: ControlGroup) -> None:
        self.group = group
        folder.mkdir()
        self._cluster = SlurmCluster(folder)
        for name in ("LD_PRELOAD", "PYTHONPATH"):
            self._cluster.environment.pop(name, None)
        self._cluster.environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._lost: list[str] = []
        with self.group.around():
            self._cluster.start()

    def launch(self, ranks: int, restarts: int) -> list[str]:
        """Return the command after `mega-rl`, without settings, that starts ranks on two nodes."""
        options = ["--nodes=2", f"--nproc-per-node={ranks // 2}", "--time=60", f"--max-restarts={restarts}"]
        return ["launch", "slurm", "r.yaml", "--submit", *options]

    def start_run(self, run: ClusterRun, command: Sequence[str], output: Path) -> Launcher:
        words = [sys.executable, "-m", "mega_rl.cli", *command[:4], f"--sbatch=output={output}", *command[4:]]
        environment = {**self._cluster.environment, **run.environment}
        done = subprocess.run(
            words, env=environment, cwd=run.folder, capture_output=True, text=True, timeout=SUBMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Job(0, 0, output, cluster=self._cluster, number=int(done.stdout))

    def lose_node(self, run: ClusterRun) -> str:
        (job,) = run.launchers
        assert isinstance(job, Job)
        state = self._cluster.job(job.number)
        names = self._cluster.call("scontrol", "show", "hostnames", state.get("NodeList", ""), check=False).split()
        if job.poll() is not None or not (running := [name for name in names if name in NODES]):
            return ""
        node = run.random.choice(running)
        self._lost.append(node)
        self._cluster.kill_node(node)
        return f"node {node} of Slurm is killed"

    def signal(self, run: ClusterRun) -> str:
        (job,) = run.launchers
        assert isinstance(job, Job)
        if job.poll() is not None:
            return ""
        how = run.random.choice([["--signal=TERM"], []])
        self._cluster.call("scancel", *how, str(job.number), check=False)
        return " ".join(["scancel", *how])

    def restore(self) -> None:
        while self._lost:
            with self.group.around():
                self._cluster.start_node(self._lost.pop())

    def close(self) -> None:
        try:
            self._cluster.stop()
        finally:
            self.group.close()


class Ray:
    """A head without CPUs and two nodes, in a process that has Ray; see ray_cluster.py."""

    def __init__(self, folder: Path, group: ControlGroup) -> None:
        self.group = group
        folder.mkdir()
        self.environment = {
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"},
            **{"RAY_TMPDIR": str(folder), "PYTHONPATH": f"{RAY}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        }
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | self.environment
        with group.around(), (folder / "cluster.log").open("wb") as log:
            self._host = subprocess.Popen(
                [sys.executable, "-m", "tests.fault_campaign.ray_cluster"],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._address = str(self._ask("address"))
        self._lost = False

    def launch(self, ranks: int, restarts: int) -> list[str]:
        options = ["--nodes=2", f"--nproc-per-node={ranks // 2}", f"--address={self._address}", "--wait-s=240"]
        return ["launch", "ray", "r.yaml", *options, f"--max-restarts={restarts}", "--env=OMP_NUM_THREADS=1"]

    def start_run(self, run: ClusterRun, command: Sequence[str], output: Path) -> Launcher:
        run.environment |= {**self.environment, "LD_PRELOAD": ""}
        return Launcher(run.spawn(["-m", "mega_rl.cli", *command], output, None), 0, output)

    def lose_node(self, run: ClusterRun) -> str:
        if not run.ranks():
            return ""
        if run.random.random() < 0.5:
            actors = [pid for pid in self.group.members() if "NodeLauncher" in title(pid)]
            return "an actor of Ray is killed" if actors and kill(run.random.choice(actors)) else ""
        self._ask("lose")
        return "a node of Ray is killed"

    def signal(self, run: ClusterRun) -> str:
        number = run.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        (driver,) = run.launchers
        return f"{number.name} to Ray's driver" if driver.poll() is None and kill(driver.pid, number) else ""

    def restore(self) -> None:
        """Do nothing: another node has taken the place of the lost one at once."""

    def close(self) -> None:
        try:
            self._host.kill()
            self._host.wait(60.0)
        finally:
            self.group.close()

    def _ask(self, what: str) -> Any:
        """Return the answer of the cluster's process. Raises TimeoutError and RuntimeError."""
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._host.stdin.write(what.encode() + b"\n")
        self._host.stdin.flush()
        os.set_blocking(self._host.stdout.fileno(), False)
        answer, deadline = b"", time.monotonic() + START_S
        while not answer.endswith(b"\n"):
            answer += self._host.stdout.read() or b""
            if self._host.poll() is not None:
                raise RuntimeError(f"the process of Ray's cluster ended with {self._host.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray's cluster does not answer {what!r} within {START_S:g} s")
            time.sleep(0.05)
        return json.loads(answer)


def start(name: str, folder: Path, group: ControlGroup) -> Slurm | Ray:
    """Start the cluster of a name; what a start that fails leaves is ended."""
    if name == "ray" and not (RAY / "ray").is_dir():
        raise FileNotFoundError("Ray is not there: make ray")
    if name == "slurm" and (programs := missing()):
        raise FileNotFoundError(f"Slurm is not installed: {programs}")
    with ExitStack() as stack:
        stack.callback(group.close)
        made = Slurm(folder, group) if name == "slurm" else Ray(folder, group)
        stack.pop_all()
    return made


def works_in(pid: int, folder: Path) -> bool:
    """Return whether a process works in a folder or below it."""
    try:
        return not is_zombie(pid) and Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder)
    except OSError:
        return False


def title(pid: int) -> str:
    """Return the command line of a process, empty for one that is gone."""
    try:
        return re.sub(r"\0+", " ", Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
    except OSError:
        return ""
