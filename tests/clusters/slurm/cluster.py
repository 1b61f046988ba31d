"""A Slurm of this machine in a folder of its own: a controller, three nodes of two CPUs each, keys of munge."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
# Every name is a number that resolves to the node's own loopback address, so that a node's name is an address as well.
PREFIX = "0x7f00000"
NODES = tuple(f"{PREFIX}{n}" for n in (1, 2, 3))
NODE_TIMEOUT_S = 10  # without an answer until a node counts as lost
WAIT_S = 120.0  # for what happens within seconds on an idle machine
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=10
MessageTimeout=10
KillWait=30
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={prefix}[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs=2
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return the programs that are not installed."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)


class SlurmCluster:
    """A controller and its nodes, started by `start` and ended by `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._ports = _free_ports(4)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("state", "munge", *NODES):
            (self.folder / name).mkdir(mode=0o700)
        self._configure(NODE_TIMEOUT_S)
        munge = self.folder / "munge"
        self.call("mungekey", "--create", f"--keyfile={munge}/key")
        files = [f"--{name}-file={munge}/{name.partition('-')[0]}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self.wait_for(lambda: (munge / "socket").exists(), "munged")
        self._spawn("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start a node's daemon, or start it again, and wait until it may be given work."""
        self._spawn(node, "slurmd", "-D", "-N", node)
        self.wait_for(lambda: "State=IDLE" in self.call("scontrol", "show", "node", node, check=False), f"{node} is up")

    def notice_lost_nodes_after(self, seconds: int) -> None:
        """Set the time without an answer until a node counts as lost."""
        self._configure(seconds)
        self.call("scontrol", "reconfigure")

    def kill_node(self, node: str) -> None:
        """Kill everything of a node at once: its daemon, those of steps, and the programs below them."""
        log = str(self.folder / f"{node}.log")
        steps = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"]
        doomed = [process for process in steps if any(log == file.path for file in process.open_files())]
        doomed += [child for process in doomed for child in process.children(recursive=True)]
        self._daemons[node].kill()
        for process in doomed:
            process.kill()
        self._daemons.pop(node).wait(WAIT_S)

    def stop(self) -> None:
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        self.wait_for(lambda: self.call("squeue", "--noheader", check=False) == "", "no jobs are left")
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
            self._daemons[name].wait(WAIT_S)

    def call(
        self, *command: str, check: bool = True, environment: dict[str, str] | None = None, wait_s: float = WAIT_S
    ) -> str:
        """Return the output of one of Slurm's programs."""
        done = subprocess.run(
            command,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=wait_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """Return what the controller says of a job, by its names."""
        words = self.call("scontrol", "show", "job", "--oneliner", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition: Callable[[], bool], what: str, *, wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not after {wait_s:.0f} s\n{self._logs()}"
            time.sleep(0.2)

    def _configure(self, node_timeout_s: int) -> None:
        text = CONFIG.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            ports=self._ports,
            prefix=PREFIX,
            node_timeout_s=node_timeout_s,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


def _free_ports(count: int) -> Sequence[int]:
    """Return ports in a row at which nobody listens."""
    for first in range(17_800, 32_000, count):
        listeners: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                listeners.append(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
    raise AssertionError("no free ports")
