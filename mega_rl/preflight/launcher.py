"""The number of ranks that a launcher has started, and launchers that start none."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mega_rl.errors import UserError


def launched_world_size() -> int:
    """Return the ranks that the launcher started, by its WORLD_SIZE; 1 without a launcher. Raises UserError."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"environment variable WORLD_SIZE={text!r}: needs a whole number of at least 1; unset it")
    return int(text)


def ranks_of_this_host(world_size: int) -> int:
    """Return the ranks on this host, by the launcher's LOCAL_WORLD_SIZE; all of up to eight without one."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else min(world_size, 8)


def gpus_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows this process no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def refuse_tasks_of_srun(environment: Mapping[str, str] | None = None, *, launchers: int = 1) -> None:
    """Raise UserError in one of several tasks of a Slurm step that are no ranks.

    srun starts the same program in each task: N tasks that each start ranks would be N runs, all in one run folder.
    A batch script has the variables of a task too, those of task 0, but no step.

    environment: default: that of the process. launchers: of the run; each may be a task.
    """
    variables = os.environ if environment is None else environment
    if "RANK" in variables or "SLURM_PROCID" not in variables:
        return
    if "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables:
        return  # the batch script itself
    tasks = variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", "1"))
    if tasks.isascii() and tasks.isdigit() and int(tasks) not in (1, launchers):
        raise UserError(
            f"srun started {tasks} tasks, which would be {tasks} separate runs, not ranks of one; leave out "
            "--nproc-per-node to train with each task as a rank ('srun --ntasks-per-node=GPUS mega-rl train ...'), "
            "start one task ('srun --ntasks=1 mega-rl train --nproc-per-node GPUS ...'), or a launcher on each node "
            "('mega-rl launch slurm', or --nnodes)"
        )
