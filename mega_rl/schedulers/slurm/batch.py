"""A batch script for Slurm: one task with a launcher on each node; saved and requeued where that is of use.

Options: https://slurm.schedmd.com/sbatch.html, https://github.com/NVIDIA/pyxis for images.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mega_rl.checkpoint.folders import CHECKPOINTS
from mega_rl.checkpoint.lock import LOCK_FILE
from mega_rl.environment import python_module
from mega_rl.errors import UserError
from mega_rl.launcher.ranks import KEY
from mega_rl.schedulers.slurm import script

MAX_WARNING_S = 65_535  # of --signal
MIN_WORK_S = 60  # between the start of a job and its warning; Slurm sends it up to a minute early
_VALUE = re.compile(r"[!$-&(-\[\]-~]+")  # printable, without blanks, quotes, # and backslashes: no quoting to go wrong
_PATH = re.compile(r"/[!$-&(-+\--9;-\[\]-~]*")  # of _VALUE, without the commas and colons of pyxis
_OPTION = re.compile(r"[a-z]+(-[a-z]+)*")
# Options of sbatch that are written by others of `mega-rl launch slurm`.
RESERVED = {
    **{name: f"--{name}" for name in ("nodes", "partition", "account", "qos", "time", "gres", "mem", "output")},
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node"), "--nproc-per-node"),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), "--nproc-per-node or --gres"),
    **dict.fromkeys(("exclusive", "oversubscribe"), "--exclusive or --no-exclusive"),
    **dict.fromkeys(("requeue", "no-requeue"), "--requeue or --no-requeue"),
    **{"job-name": "--name", "cpus-per-task": "--cpus-per-node", "signal": "--warning-s", "export": "--env"},
}
# Those that make something else than one job of one run, or let the submission say more than the job's number; and one
# that keeps a job without its first node, and so without its script, until the time limit.
REFUSED = ("array", "wrap", "wait", "parsable", "test-only", "open-mode", "chdir", "no-kill")


@dataclass(frozen=True)
class ContainerMount:
    """Folder of the nodes in a container: pyxis' `SOURCE:TARGET`."""

    source: str
    target: str

    @classmethod
    def parse(cls, text: str) -> ContainerMount:
        """Return the mount of `/SOURCE:/TARGET`, or `/PATH` for the same path in both. Raises UserError."""
        source, sign, target = text.partition(":")
        target = target if sign else source
        if not all(_PATH.fullmatch(path) for path in (source, target)):
            raise UserError(f"--mount={text}: is neither /PATH nor /PATH/OF/THE/NODES:/PATH/IN/THE/CONTAINER")
        return cls(source.rstrip("/") or "/", target.rstrip("/") or "/")


@dataclass(frozen=True)
class SbatchRun:
    """A run to be rendered.

    recipe: path or name, of a packaged one. overrides: KEY=VALUE. run_dir: trainer.run_dir. folder: in which the job
    works. python: of the nodes' environment, without an image. gpus: of each node. time, mem, gres: as sbatch reads
    them. environment: written into the script; inherited: names whose values come from the submission's environment.
    options: further ones of sbatch. max_restarts: of `mega-rl train`. warning_s: between the warning and the
    end of the time limit.
    """

    recipe: str
    overrides: Sequence[str]
    run_dir: str
    folder: str
    nodes: int
    nproc_per_node: int
    python: str = ""
    image: str = ""
    mounts: Sequence[ContainerMount] = ()
    name: str = "mega-rl"
    output: str = "%x-%j.out"
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    gpus: int = 0
    gres: str = ""
    cpus: int = 0
    mem: str = ""
    exclusive: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    requeue: bool = True
    max_restarts: int = 0
    warning_s: int = 600

    def inside(self, path: str) -> str:
        """Return the path at which a job's processes see a path of the nodes, empty where they do not."""
        if not self.image:
            return path
        return next(
            (_moved(path, mount.source, mount.target) for mount in self.mounts if _is_below(path, mount.source)), ""
        )

    def outside(self, path: str) -> str:
        """Return the path of the nodes that a job's processes see as `path`, empty if it is lost with the container."""
        if not self.image:
            return path
        return next(
            (_moved(path, mount.target, mount.source) for mount in self.mounts if _is_below(path, mount.target)), ""
        )


def directives(run: SbatchRun) -> dict[str, str]:
    """Return the options of sbatch with their values, empty for a flag."""
    given = {
        "job-name": run.name,
        "nodes": str(run.nodes),
        "ntasks-per-node": "1",
        "partition": run.partition,
        "account": run.account,
        "qos": run.qos,
        "time": run.time,
        "gres": run.gres,
        "gpus-per-node": "" if run.gres or not run.gpus else str(run.gpus),
        "cpus-per-task": str(run.cpus) if run.cpus else "",
        "mem": run.mem or ("0" if run.exclusive else ""),  # 0: all that the node has
        "chdir": run.folder,
        "output": run.output,
        "signal": f"B:USR1@{run.warning_s}",
    }
    flags = {"exclusive": run.exclusive, "requeue": run.requeue, "no-requeue": not run.requeue}
    return {
        **{name: value for name, value in given.items() if value},
        **{name: "" for name, is_set in flags.items() if is_set},
        "open-mode": "append",  # of a requeued job
        **run.options,
    }


def check(run: SbatchRun, *, resume: str) -> list[str]:
    """Return what is wrong with a run, one line each; resume: the recipe's checkpoint.resume."""
    problems = []
    for name, value in directives(run).items():
        if value and not _VALUE.fullmatch(value):
            problems.append(f"--{name}={value!r}: has a blank, quote, backslash or #, which a batch script cannot hold")
    for name in run.options:
        if not _OPTION.fullmatch(name):
            problems.append(f"--sbatch={name}: is no option of sbatch; write --sbatch NAME=VALUE or --sbatch NAME")
        elif name in RESERVED:
            problems.append(f"--sbatch={name}: is an option of mega-rl launch slurm; use {RESERVED[name]}")
        elif name in REFUSED:
            problems.append(f"--sbatch={name}: has no use for a run, or would break its script; leave it out")
    if run.requeue and resume == "never":
        problems.append(
            "checkpoint.resume=never: a job that is requeued would begin anew; set checkpoint.resume=auto, or "
            "--no-requeue"
        )
    if run.cpus and run.exclusive:
        problems.append(f"--cpus-per-node={run.cpus}: has no effect on nodes of one's own; add --no-exclusive")
    return [*problems, *_of_time(run), *_of_paths(run)]


def seconds_of(time: str) -> int | None:
    """Return the seconds of a time limit as sbatch reads it, None for UNLIMITED. Raises UserError."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, sign, clock = time.rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(
        re.fullmatch(r"[0-9]{1,9}", part, re.ASCII) for part in (*parts, *([days] if sign else []))
    ):
        raise UserError(f"--time={time}: is no time limit of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    units = (3600, 60, 1) if sign or len(parts) == 3 else (60, 1)
    seconds = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return 86_400 * int(days or 0) + seconds


def render(run: SbatchRun) -> str:
    """Return the batch script."""
    lines = ["#!/bin/bash", *script.HEAD.format(nodes=run.nodes, ranks=run.nproc_per_node).splitlines()]
    lines += [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in directives(run).items()]
    lines += script.START.format(key=KEY).splitlines()
    lines += [f"export {name}={shlex.quote(value)}" for name, value in run.environment.items()]
    lines += [script.NEEDED.format(name=name) for name in run.inherited]
    if run.requeue:
        lock = PurePosixPath(run.outside(run.run_dir), CHECKPOINTS, LOCK_FILE)
        lines += script.LOCK.format(lock=shlex.quote(str(lock))).splitlines()
    lines += ["", _array("train", train_command(run)), _array("step", step_options(run))]
    lines += script.PROBE.splitlines() if run.requeue else []
    lines += ["", *script.RUN.splitlines()]
    lines += (script.REQUEUE if run.requeue else script.END).splitlines()
    return "\n".join(lines) + "\n"


def train_command(run: SbatchRun) -> list[str]:
    """Return the launcher's command but for what each job and task adds: address, port and the node's number."""
    program = ["mega-rl"] if run.image else python_module("mega_rl.cli", python=run.python)
    options = ["--nnodes", str(run.nodes), "--nproc-per-node", str(run.nproc_per_node)]
    options += ["--max-restarts", str(run.max_restarts)]
    recipe = (run.inside(run.recipe) or run.recipe) if run.recipe.startswith("/") else run.recipe
    return [*program, "train", *options, "--config", recipe, *run.overrides]


def step_options(run: SbatchRun) -> list[str]:
    """Return the options of the step that runs a launcher on each node.

    A launcher that ends first does not have the others killed, which may be saving: launchers end one another.
    """
    options = [f"--nodes={run.nodes}", f"--ntasks={run.nodes}", "--ntasks-per-node=1", "--export=ALL"]
    options += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={run.warning_s}"]
    options += [f"--cpus-per-task={run.cpus}"] if run.cpus else []
    if not run.image:
        return options
    options += [f"--container-image={run.image}", "--no-container-mount-home"]
    mounts = ",".join(f"{mount.source}:{mount.target}" for mount in run.mounts)
    options += [f"--container-mounts={mounts}"] if mounts else []
    options += [f"--container-workdir={run.inside(run.folder)}"] if run.inside(run.folder) else []
    names = [*run.environment, *run.inherited]
    return [*options, f"--container-env={','.join(names)}"] if names else options


def _of_time(run: SbatchRun) -> list[str]:
    if not 1 <= run.warning_s <= MAX_WARNING_S:
        return [f"--warning-s={run.warning_s}: needs 1 to {MAX_WARNING_S} seconds"]
    if not run.time:
        return []
    try:
        seconds = seconds_of(run.time)
    except UserError as error:
        return [str(error)]
    if seconds is None or seconds >= run.warning_s + MIN_WORK_S:
        return []
    return [
        f"--time={run.time}: is {seconds} s, of which --warning-s={run.warning_s} are for the last step and its "
        f"checkpoint; take at least {run.warning_s + MIN_WORK_S} s, or a shorter warning"
    ]


def _of_paths(run: SbatchRun) -> list[str]:
    """Return what is wrong with an image and the paths that its container sees."""
    if not run.image:
        return ["--mount: has no effect without --image"] if run.mounts else []
    problems = []
    if not re.fullmatch(r"[!-~]+", run.image):
        problems.append(f"--image={run.image!r}: is no name of an image; write REGISTRY#NAME:TAG or /PATH/FILE.sqsh")
    targets = [mount.target for mount in run.mounts]
    if doubled := sorted({path for path in targets if targets.count(path) > 1}):
        problems.append(f"--mount: {doubled[0]} is given twice; one source for each path")
    shown = ", ".join(targets) or "there is none"
    if not run.run_dir.startswith("/") or not run.outside(run.run_dir):
        problems.append(
            f"trainer.run_dir={run.run_dir}: is lost with its container; take a folder below a --mount ({shown}), "
            "from the root on"
        )
    if run.recipe.startswith("/") and not run.inside(run.recipe):
        sources = ", ".join(mount.source for mount in run.mounts) or "there is none"
        problems.append(f"{run.recipe}: is not seen in the container; put the recipe below a --mount ({sources})")
    return problems


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _moved(path: str, source: str, target: str) -> str:
    return str(PurePosixPath(target, PurePosixPath(path).relative_to(source)))


def _array(name: str, words: Sequence[str]) -> str:
    """Return an array of bash; commas are quoted, which separate no words there."""
    quoted = [f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words]
    return f"{name}=({' '.join(quoted)})"
