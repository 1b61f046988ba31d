"""Batch script for Slurm: a launcher on each node; a job that can continue is requeued.

Options: https://slurm.schedmd.com/sbatch.html, https://github.com/NVIDIA/pyxis for images.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from mega_rl.checkpoint.folders import CHECKPOINTS, LOCK_FILE
from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError
from mega_rl.operations.schedulers import ClusterRun, RecipeFacts, is_below, variables

MAX_WARNING_S = 65_535  # limit of sbatch --signal
SCRIPT = Path(__file__).with_name("job.sh")
SBATCH = ("sbatch", "--parsable")
SUBMIT_S = 120.0
_VALUE = re.compile(r"[!$-&(-\[\]-~]+")  # printable, without characters that would need quoting
_PATH = re.compile(r"/[!$-&(-+\--9;-\[\]-~]*")  # also without the commas and colons of pyxis
_NAME = re.compile(r"[a-z]+(-[a-z]+)*")
# Options of sbatch that the script sets, by the options of `mega-rl launch slurm`, or that would break it. --no-kill
# would keep a job without its first node, and so without this script, until the time limit.
RESERVED = frozenset((
    "nodes", "partition", "account", "time", "ntasks", "ntasks-per-node", "tasks-per-node", "exclusive",
    "oversubscribe", "job-name", "cpus-per-task", "signal", "export", "requeue", "no-requeue", "array", "wrap", "wait",
    "parsable", "test-only", "open-mode", "chdir", "no-kill",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmRun(ClusterRun):
    """A run on nodes of a Slurm cluster; every field is an option of the command."""

    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the script with sbatch and print the job's number.")
    ] = False
    name: Annotated[str, typer.Option(help="Name of the job.")] = "mega-rl"
    partition: Annotated[str, typer.Option(help="Partition, or several with commas.")] = ""
    account: Annotated[str, typer.Option(help="Account that the job is charged to.")] = ""
    time: Annotated[str, typer.Option(help="Time limit, as 4:00:00 or 2-00; default: the partition's.")] = ""
    warning_s: Annotated[
        int, typer.Option(help="Seconds before the time limit in which the run ends its step and saves.")
    ] = 600
    cpus_per_node: Annotated[
        int, typer.Option(min=0, help="Share nodes with other jobs and take this many CPUs of each.")
    ] = 0
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Further option of sbatch, as constraint=h100, mem=900G."),
    ] = None
    image: Annotated[str, typer.Option(help="Image with mega-rl, by pyxis; default: no container.")] = ""
    mount: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Folder of the nodes in the container; repeatable.")
    ] = None
    venv: Annotated[Path | None, typer.Option(help="Environment with mega-rl on every node; default: this one.")] = None
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Again after the time limit, preemption or a lost node.")
    ] = True


def directives(run: SlurmRun, facts: RecipeFacts, *, folder: str) -> dict[str, str]:
    """Return sbatch's options, with empty values for flags. folder: the job's working folder."""
    parts = (text.removeprefix("--").partition("=") for text in run.sbatch or ())
    further = {name: value for name, _, value in parts}
    by_name = "gres" in further or "gpus-per-node" in further or facts.device == "cpu"
    given = {
        "job-name": run.name,
        "nodes": str(run.nodes),
        "ntasks-per-node": "1",
        "partition": run.partition,
        "account": run.account,
        "time": run.time,
        "gpus-per-node": "" if by_name else str(run.nproc_per_node),
        "cpus-per-task": str(run.cpus_per_node) if run.cpus_per_node else "",
        "mem": "" if run.cpus_per_node else "0",  # 0: all that the node has
        "chdir": folder,
        "output": "%x-%j.out",
        "signal": f"B:USR1@{run.warning_s}",
    }
    flags = [*([] if run.cpus_per_node else ["exclusive"]), "requeue" if run.requeue else "no-requeue"]
    given = {name: value for name, value in given.items() if value}
    return {**given, **dict.fromkeys(flags, ""), "open-mode": "append", **further}  # append: after a requeue


def check(run: SlurmRun, facts: RecipeFacts, *, folder: str) -> list[str]:
    """Return the problems of a run, one line each."""
    problems = []
    for name, value in directives(run, facts, folder=folder).items():
        if value and not _VALUE.fullmatch(value):
            problems.append(f"--{name}={value!r}: has a blank, quote, backslash or #, which a batch script cannot hold")
    for text in run.sbatch or ():
        name = text.removeprefix("--").partition("=")[0]
        if name in RESERVED or not _NAME.fullmatch(name):
            problems.append(f"--sbatch={name}: is not an option of sbatch that a run can have")
    if run.requeue and facts.resume == "never":
        problems.append(
            "checkpoint.resume=never: a requeued job would begin anew; set checkpoint.resume=auto, or --no-requeue"
        )
    if not 1 <= run.warning_s <= MAX_WARNING_S:
        problems.append(f"--warning-s={run.warning_s}: needs 1 to {MAX_WARNING_S} seconds")
    return [*problems, *_check_paths(run, facts)]


def _check_paths(run: SlurmRun, facts: RecipeFacts) -> list[str]:
    """Return the problems of an image and of the paths that its container sees."""
    mounts = run.mount or []
    if not run.image:
        return ["--mount: has no effect without --image"] if mounts else []
    problems = [
        f"--mount={path}: is not an absolute path without blanks" for path in mounts if not _PATH.fullmatch(path)
    ]
    if run.venv is not None:
        problems.append(f"--venv={run.venv}: has no effect with --image, which brings its own; leave one out")
    shown = ", ".join(mounts) or "there is none"
    if not is_below(facts.run_dir, mounts):
        problems.append(
            f"trainer.run_dir={facts.run_dir}: is lost with its container; take a folder below a --mount ({shown})"
        )
    if facts.recipe.startswith("/") and not is_below(facts.recipe, mounts):
        problems.append(f"{facts.recipe}: is not seen in the container; put the recipe below a --mount ({shown})")
    return problems


def render(run: SlurmRun, facts: RecipeFacts, *, folder: str) -> str:
    """Return the batch script, `job.sh` with the values of this run."""
    named = variables(run.env)
    written = {text.partition("=")[0] for text in run.env or () if "=" in text}
    options = directives(run, facts, folder=folder)
    values = {
        "NODES": str(run.nodes),
        "RANKS": str(run.nproc_per_node),
        "DIRECTIVES": "\n".join(
            f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in options.items()
        ),
        "EXPORTS": "\n".join(f"export {name}={shlex.quote(named[name])}" for name in named if name in written),
        "NEEDED": " ".join(name for name in named if name not in written),
        "REQUEUE": "yes" if run.requeue else "no",
        "LOCK": shlex.quote(str(PurePosixPath(facts.run_dir, CHECKPOINTS, LOCK_FILE))),
        "TRAIN": _words(_train_command(run, facts)),
        "STEP": _words(_step_options(run, list(named), folder)),
    }
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], SCRIPT.read_text(encoding="utf-8"))


def _train_command(run: SlurmRun, facts: RecipeFacts) -> list[str]:
    """Return the launcher's command; each job and task adds address, port and node number."""
    python = sys.executable if run.venv is None else str(run.venv.absolute() / "bin" / "python")
    if not run.image and not Path(python).exists():
        raise UserError(f"--venv={run.venv}: has no bin/python; give the folder of a virtual environment")
    program = ["mega-rl"] if run.image else python_module("mega_rl.cli", python=python)
    return [*program, "train", *run.launcher_options, "--config", facts.recipe, *facts.overrides]


def _step_options(run: SlurmRun, names: Sequence[str], folder: str) -> list[str]:
    """Return srun's options for a launcher on each node. names: variables of a container."""
    options = [f"--nodes={run.nodes}", f"--ntasks={run.nodes}", "--ntasks-per-node=1", "--export=ALL"]
    options += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={run.warning_s}"]
    options += [f"--cpus-per-task={run.cpus_per_node}"] if run.cpus_per_node else []
    if not run.image:
        return options
    options += [f"--container-image={run.image}", "--no-container-mount-home"]
    options += [f"--container-mounts={','.join(f'{path}:{path}' for path in run.mount or ())}"] if run.mount else []
    options += [f"--container-workdir={folder}"] if is_below(folder, run.mount or ()) else []
    return [*options, f"--container-env={','.join(names)}"] if names else options


def _words(words: Sequence[str]) -> str:
    """Return the words of a bash array; shellcheck wants words with commas quoted."""
    return " ".join(f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words)


def submit(script: str, *, program: Sequence[str] = SBATCH, wait_s: float = SUBMIT_S) -> int:
    """Submit a batch script and return the job's number."""
    try:
        answer = subprocess.run(program, input=script, capture_output=True, text=True, timeout=wait_s, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{program[0]}: is not installed here; submit from a login node, or without --submit the script is printed"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{program[0]} has not answered in {wait_s:.0f} s; see with squeue --me whether the job was submitted"
        ) from None
    if answer.returncode:
        words = " ".join(line.removeprefix("sbatch: error: ") for line in answer.stderr.strip().splitlines())
        raise UserError(f"{program[0]} has refused the job: {words or f'exit code {answer.returncode}'}")
    number = re.match(r"[0-9]+", answer.stdout, re.ASCII)
    if number is None:
        raise RunError(f"{program[0]} has printed no number of a job but {answer.stdout.strip()[:80]!r}")
    return int(number[0])


FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports of outgoing connections, which begin at 32768 on Linux
STEP_STRIDE = 97  # ports between steps of one job, which may run at the same time


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
    if "RANK" not in given and "SLURM_STEP_ID" in given and given.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        own = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if given.get(name)}
        given.update({**rank_variables(given), **own})
