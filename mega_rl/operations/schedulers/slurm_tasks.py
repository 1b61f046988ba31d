"""Ranks from tasks: `srun --ntasks-per-node=8 mega-rl train ...` makes each task a rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from mega_rl.errors import UserError

FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports of outgoing connections, which begin at 32768 on Linux
STEP_STRIDE = 97  # ports between steps of one job, which may run at the same time
MAX_TASKS = 2**31
MAX_NODES = 65_533  # limit of Slurm
_DERIVED = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # a value set by a script is wrong in all tasks but one
_ADVICE = "unset what a script has set of Slurm's variables"


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks, without a launcher for ranks.

    A batch script has the variables of task 0 too, but no step.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task, which becomes the rank of its number.

    Raises UserError for variables that are missing or contradict one another, and for tasks that cannot be ranks:
    ranks are numbered node by node, with the same number on each.
    """
    tasks, nodes = (
        _number(environment, "SLURM_STEP_NUM_TASKS", 1, MAX_TASKS),
        _number(environment, "SLURM_STEP_NUM_NODES", 1, MAX_NODES),
    )
    task, node = _number(environment, "SLURM_PROCID", 0, tasks - 1), _number(environment, "SLURM_NODEID", 0, nodes - 1)
    counts = _text(environment, "SLURM_STEP_TASKS_PER_NODE")
    uniform = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,4})\))?", counts, re.ASCII)  # 8(x4)
    if uniform is None:
        raise UserError(
            f"srun started {tasks} tasks as {counts[:80]} on its nodes, and every node needs the same number of ranks; "
            "start them with --ntasks-per-node"
        )
    per_node, counted = int(uniform[1]), int(uniform[2] or 1)
    local_task = _number(environment, "SLURM_LOCALID", 0, per_node - 1)
    if per_node * nodes != tasks or counted != nodes or task != node * per_node + local_task:
        raise UserError(
            f"SLURM_PROCID={task}: is not task {local_task} of node {node} with {counts[:80]} tasks on each; "
            f"start srun with --distribution=block, and {_ADVICE}"
        )
    job, step = _number(environment, "SLURM_JOB_ID", 1, 2**32), _number(environment, "SLURM_STEP_ID", 0, 2**32)
    return {
        "RANK": str(task),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_task),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": first_host(_text(environment, "SLURM_STEP_NODELIST")),
        "MASTER_PORT": str(FIRST_PORT + (job + STEP_STRIDE * step) % NUM_PORTS),
    }


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: `gpu001-ib` of `gpu[001-004,007]-ib,login1`.

    Raises UserError for anything that Slurm would not have written.
    """
    first = re.match(r"(?:[A-Za-z0-9._-]+|\[[0-9,-]+\])+(?=,|$)", hosts[:1000])
    name = "" if first is None else re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", first[0])
    if not name or "[" in name:
        raise UserError(f"SLURM_STEP_NODELIST={hosts[:80]}: is not a list of hosts of Slurm; {_ADVICE}")
    return name


def become_rank(environment: MutableMapping[str, str] | None = None) -> None:
    """Set torchrun's variables in a task of a step of several; otherwise change nothing.

    MASTER_ADDR and MASTER_PORT that a script has set stay: the network of the ranks may have other names.

    environment: default: that of the process. Raises UserError, see `rank_variables`.
    """
    given = os.environ if environment is None else environment
    if not is_one_of_several(given):
        return
    variables = rank_variables(given)
    for name in _DERIVED:
        if given.get(name) not in (None, "", variables[name]):
            raise UserError(
                f"environment variable {name}={given[name]}: this task of srun is rank {variables['RANK']} of "
                f"{variables['WORLD_SIZE']} with {name}={variables[name]}; unset it"
            )
    port = given.get("MASTER_PORT") or variables["MASTER_PORT"]
    if re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) is None or not 0 < int(port) < 65_536:
        raise UserError(f"environment variable MASTER_PORT={port!r}: needs a port, 1 to 65535; unset it")
    given.update({name: given.get(name) or value for name, value in variables.items()})


def _text(environment: Mapping[str, str], name: str) -> str:
    """Return a variable's value. Raises UserError without one."""
    if not environment.get(name):
        raise UserError(f"srun has started this task without {name}; start mega-rl by srun itself")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`. Raises UserError for anything else."""
    text = _text(environment, name)
    if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) is None or not least <= int(text) <= most:
        raise UserError(f"{name}={text[:80]!r}: needs a whole number from {least} to {most} here; {_ADVICE}")
    return int(text)
