"""Ranks from tasks: `srun --ntasks-per-node=8 mega-rl train ...` makes each task a rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from mega_rl.errors import UserError

FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports of outgoing connections, which begin at 32768 on Linux
STEP_STRIDE = 97  # ports between steps of one job, which may run at the same time


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a step, without a launcher for ranks."""
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task, which becomes the rank of its number."""
    names = ("STEP_NUM_TASKS", "STEP_NUM_NODES", "PROCID", "NODEID", "LOCALID", "JOB_ID", "STEP_ID", "STEP_NODELIST")
    values = [environment.get(f"SLURM_{name}", "") for name in names]
    if not all(re.fullmatch(r"[0-9]{1,10}", value, re.ASCII) for value in values[:-1]):
        given = ", ".join(f"SLURM_{name}={value[:40]!r}" for name, value in zip(names, values, strict=True))
        raise UserError(
            f"{given}: are not as srun sets them; start mega-rl by srun itself, and unset what a script sets"
        )
    tasks, nodes, task, node, local_task, job, step = map(int, values[:-1])
    per_node, rest = divmod(tasks, max(1, nodes))
    if rest or task != node * per_node + local_task or local_task >= per_node:
        raise UserError(
            f"SLURM_PROCID={task}: is task {local_task} of node {node}, and each of {nodes} nodes needs as many of "
            f"the {tasks} tasks, numbered node by node; start srun with --ntasks-per-node and --distribution=block"
        )
    return {
        "RANK": str(task),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_task),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": first_host(values[-1]),
        "MASTER_PORT": str(FIRST_PORT + (job + STEP_STRIDE * step) % NUM_PORTS),
    }


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: `gpu001-ib` of `gpu[001-004,007]-ib,login1`."""
    first = re.match(r"(?:[A-Za-z0-9._-]+|\[[0-9,-]+\])+(?=,|$)", hosts[:1000])
    name = "" if first is None else re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", first[0])
    if not name or "[" in name:
        raise UserError(f"SLURM_STEP_NODELIST={hosts[:80]}: is not a list of hosts of Slurm; unset it")
    return name


def become_rank(environment: MutableMapping[str, str] | None = None) -> None:
    """Set torchrun's variables in a task of a step of several; otherwise change nothing.

    MASTER_ADDR and MASTER_PORT that a script has set stay: the network of the ranks may have other names.
    """
    given = os.environ if environment is None else environment
    if is_one_of_several(given):
        own = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if given.get(name)}
        given.update({**rank_variables(given), **own})
