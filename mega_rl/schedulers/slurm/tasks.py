"""Ranks from tasks: `srun --ntasks-per-node=8 mega-rl train ...` makes each task of its step one rank of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from mega_rl.errors import UserError
from mega_rl.schedulers.slurm.hostlist import MAX_HOSTS, counts, expand

FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports that Linux gives to outgoing connections, from 32768 on
STEP_STRIDE = 97  # of ports between steps of one job, which may run side by side
MAX_TASKS = 2**31
_DERIVED = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # wrong in every task but one if a script has set them


@dataclass(frozen=True)
class SrunTask:
    """One of several tasks of a step, by the variables that srun has given it."""

    task: int
    tasks: int
    local_task: int
    node: int
    tasks_per_node: int
    hosts: tuple[str, ...]
    port: int

    def variables(self) -> dict[str, str]:
        """Return torchrun's variables of the rank that this task is."""
        return {
            "RANK": str(self.task),
            "WORLD_SIZE": str(self.tasks),
            "LOCAL_RANK": str(self.local_task),
            "LOCAL_WORLD_SIZE": str(self.tasks_per_node),
            "MASTER_ADDR": self.hosts[0],
            "MASTER_PORT": str(self.port),
        }


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a step of several, in which no launcher has made ranks.

    A batch script has the variables of a task too, those of task 0, but no step.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def read_task(environment: Mapping[str, str]) -> SrunTask:
    """Return the task of a step of several.

    Raises UserError for variables that are missing or contradict one another, and for tasks that could not be ranks:
    ranks are numbered by node, as many on each.
    """
    read = _Variables(environment)
    tasks, nodes = read.number("SLURM_STEP_NUM_TASKS", 1, MAX_TASKS), read.number("SLURM_STEP_NUM_NODES", 1, MAX_HOSTS)
    task, node = read.number("SLURM_PROCID", 0, tasks - 1), read.number("SLURM_NODEID", 0, nodes - 1)
    per_node = counts(read.text("SLURM_STEP_TASKS_PER_NODE"), what="SLURM_STEP_TASKS_PER_NODE")
    hosts = expand(read.text("SLURM_STEP_NODELIST"), what="SLURM_STEP_NODELIST")
    for name, count in (("SLURM_STEP_TASKS_PER_NODE", len(per_node)), ("SLURM_STEP_NODELIST", len(hosts))):
        if count != nodes:
            raise UserError(
                f"{name}={environment[name][:80]}: has {count} node(s), but SLURM_STEP_NUM_NODES={nodes}; unset what a "
                "script has set of Slurm's variables"
            )
    if sum(per_node) != tasks:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE'][:80]}: makes {sum(per_node)} tasks, "
            f"but SLURM_STEP_NUM_TASKS={tasks}; unset what a script has set of Slurm's variables"
        )
    if len(set(per_node)) > 1:
        raise UserError(
            f"srun started {tasks} tasks as {environment['SLURM_STEP_TASKS_PER_NODE'][:80]} on its nodes, and every "
            "node needs the same number of ranks; start them with --ntasks-per-node"
        )
    local_task = read.number("SLURM_LOCALID", 0, per_node[0] - 1)
    if task != node * per_node[0] + local_task:
        raise UserError(
            f"SLURM_PROCID={task}: is task {local_task} of node {node}, and ranks are numbered node by node, "
            f"{per_node[0]} on each; start srun with --distribution=block"
        )
    job, step = read.number("SLURM_JOB_ID", 1, 2**32), read.number("SLURM_STEP_ID", 0, 2**32)
    port = FIRST_PORT + (job + STEP_STRIDE * step) % NUM_PORTS
    return SrunTask(task, tasks, local_task, node, per_node[0], tuple(hosts), port)


def become_rank(environment: MutableMapping[str, str] | None = None) -> None:
    """Set torchrun's variables in a task of a step of several; otherwise change nothing.

    MASTER_ADDR and MASTER_PORT that a script has set stay: the network of the ranks may have names of its own.

    environment: default: that of the process. Raises UserError, see `read_task`.
    """
    given = os.environ if environment is None else environment
    if not is_one_of_several(given):
        return
    variables = read_task(given).variables()
    for name in _DERIVED:
        if given.get(name) not in (None, "", variables[name]):
            raise UserError(
                f"environment variable {name}={given[name]}: this task of srun is rank {variables['RANK']} of "
                f"{variables['WORLD_SIZE']} with {name}={variables[name]}; unset it"
            )
    if not _is_port(given.get("MASTER_PORT") or variables["MASTER_PORT"]):
        raise UserError(
            f"environment variable MASTER_PORT={given['MASTER_PORT']!r}: needs a port, 1 to 65535; unset it"
        )
    given.update({name: given.get(name) or value for name, value in variables.items()})


class _Variables:
    """Slurm's variables of one process, each checked as it is read."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        """Return a variable's value. Raises UserError without one."""
        if not self._environment.get(name):
            raise UserError(f"srun has started this task without {name}; start mega-rl by srun itself")
        return self._environment[name]

    def number(self, name: str, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`. Raises UserError for anything else."""
        text = self.text(name)
        if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) is None or not least <= int(text) <= most:
            raise UserError(
                f"{name}={text[:80]!r}: needs a whole number from {least} to {most} here; unset what a script has set "
                "of Slurm's variables"
            )
        return int(text)


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) is not None and 0 < int(text) < 65_536
