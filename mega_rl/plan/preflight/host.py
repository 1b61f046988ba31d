"""Checks of this machine: launcher, GPUs and their memory, packages, servers, folders, disk space."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from mega_rl.config.choices import needs_critic
from mega_rl.config.rules.rollout import KEY, is_registry
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.disk import free_bytes
from mega_rl.errors import RunError, UserError, no_such
from mega_rl.plan.memory import judge
from mega_rl.plan.search import advice, cheapest
from mega_rl.plan.setup import Machine, RunSetup
from mega_rl.processes import DEVNULL, PIPE, Child, ChildDeadlineError, ChildStartError
from mega_rl.rollout.sglang.control import Keys
from mega_rl.rollout.sglang.server.installation import argument_names, missing_tools, require_sglang

Checkpoints = Mapping[str, HFConfig]  # config key, as "model.path" -> architecture


def is_missing(package: str) -> bool:
    """Return whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def launched_world_size() -> int:
    """Return the ranks that the launcher started, by its WORLD_SIZE; 1 without a launcher. Raises UserError."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"environment variable WORLD_SIZE={text!r}: needs a whole number of at least 1; unset it")
    return int(text)


def refuse_tasks_of_srun(*, launchers: int = 1) -> None:
    """Raise UserError in Slurm tasks that are not ranks of one run; launchers may be tasks."""
    variables = os.environ
    if "RANK" in variables or "SLURM_STEP_ID" not in variables:
        return  # a batch script has the variables of task 0, but no step
    tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if int(tasks) not in (1, launchers):
        raise UserError(
            f"srun started {tasks} tasks, which would be {tasks} separate runs; leave out --nproc-per-node to train "
            "with each task as a rank, start one task, or a launcher on each node ('mega-rl launch slurm', or --nnodes)"
        )


def smallest_gpu() -> int | None:
    """Return the bytes of this machine's smallest GPU, by NVIDIA's driver; None without one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        with Child("nvidia-smi", command, streams=(DEVNULL, PIPE, DEVNULL)) as child:
            sizes = [int(line) << 20 for line in child.lines(within_s=60.0) if line.isdigit()]
    except (ChildStartError, ChildDeadlineError):
        return None
    return min(sizes, default=None)


def check_memory(config: Config, checkpoints: Checkpoints, world_size: int) -> Iterator[str]:
    """Yield why stages do not hold a run's layers, or the change that lets it fit.

    Without GPUs every run fits.
    """
    if "model.path" not in checkpoints:
        return
    untabled = any(checkpoint.own is not None for checkpoint in checkpoints.values())  # its memory is not modelled
    memory = None if config.trainer.device == "cpu" or untabled else smallest_gpu()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, 8)))  # without a launcher hosts have eight GPUs
    machine = Machine(world_size, ranks, memory, not is_missing("transformer_engine"))
    setup = RunSetup(config, checkpoints, machine)
    try:
        for model in setup.models.values():
            setup.for_model(model).layout.layers_of(0, model.hf.num_layers)
    except ValueError as error:
        yield f"engine.megatron.pipeline: {error}"
        return
    verdict = judge(setup) if memory is not None else None
    if verdict is not None and verdict.fits is False:
        yield (
            f"{config.model.path} on {world_size} GPU{'s' * (world_size > 1)}: {verdict.sentence}; "
            f"{advice(setup, cheapest(setup))} (mega-rl plan shows all of it)"
        )


def check_packages(config: Config) -> Iterator[str]:
    """Yield packages that the settings need and lack, and settings that a CPU cannot run."""
    par, on_cpu = config.engine.megatron, config.trainer.device == "cpu"
    for tracker in filter(is_missing, config.metrics.trackers):
        yield (
            f"metrics.trackers: the client of {tracker} is not installed; pip install 'mega_rl[{tracker}]', or leave "
            f"{tracker} out"
        )
    te, deepep = par.transformer_impl == "transformer_engine", par.moe.dispatcher == "deepep"
    for setting, chosen, package, fix in (
        ("optimizer.precision_aware=true", par.optimizer.precision_aware, "transformer_engine", "set false"),
        ("moe.dispatcher=deepep", deepep, "deep_ep", "set alltoall"),
        ("transformer_impl=transformer_engine", te, "transformer_engine", "set auto or local"),
    ):
        if chosen and is_missing(package):
            yield f"engine.megatron.{setting}: the package {package} is not installed; install it, or {fix}"
        if chosen and on_cpu and "precision" not in setting:
            yield f"engine.megatron.{setting} cannot run with trainer.device=cpu; {fix}"


def check_servers(config: Config, checkpoints: Checkpoints) -> Iterator[str]:
    """Yield why SGLang cannot start or serve the model, or servers' keys cannot be read."""
    sglang = config.rollout.sglang
    if config.rollout.backend != "sglang":
        return
    actor = checkpoints.get("model.path")
    if actor is not None and actor.own is None:
        family, named = FAMILIES[actor.family], f"model.path: model_type={actor.family}"
        if family.absent_in_sglang:
            yield f"{named}: SGLang 0.5.21 has no such model; set rollout.backend=hf"
        if actor.tied and family.untied_in_sglang:
            yield (
                f"{named} with tie_word_embeddings=true: SGLang 0.5.21 gives its output layer separate weights, which "
                "the checkpoint lacks; use an untied checkpoint or rollout.backend=hf"
            )
        if lacking := [key for key in family.needed_by_sglang if actor.raw.get(key) is None]:
            yield (
                f"{named}: without {', '.join(lacking)} in config.json SGLang 0.5.21 computes another model; add them "
                "as in the published file, or use rollout.backend=hf"
            )
    if sglang.urls:
        files = [Path(one) for one in sglang.urls if is_registry(one) and ":" not in one]
        how = "list one server a line, as http://host:port"
        yield from (f"rollout.sglang.urls={one}: {no_such('file', one)}; {how}" for one in files if not one.is_file())
        try:
            if sglang.keys_file:
                Keys.read(Path(sglang.keys_file))
        except UserError as error:
            yield f"rollout.sglang.keys_file: {error}"
        return
    try:
        installation = require_sglang(device="" if config.trainer.device == "auto" else config.trainer.device)
        names = argument_names(installation) if sglang.server.args else None
        for name in sglang.server.args.keys() - names if names else ():
            yield f"{KEY}.{name}: SGLang {installation.version} has no such argument; its ServerArgs lists them"
        if config.trainer.device != "cpu" and smallest_gpu() is not None:
            lacks = "rollout.backend=sglang: SGLang compiles kernels when it starts: "
            yield from (lacks + tool for tool in missing_tools())
    except UserError as error:
        yield str(error)


def check_folders(config: Config) -> Iterator[str]:
    """Yield the folders that the run cannot resume from or write to."""
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield f"checkpoint.resume={resume!r}: no such directory; legal: auto, never or a checkpoint directory"
    run_dir = Path(config.trainer.run_dir).absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir():
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is a file; name a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is not writable; name another folder"


def check_disk(config: Config, checkpoints: Checkpoints) -> Iterator[str]:
    """Yield a problem if the run folder's disk is too small for the run's saves."""
    needed = _bytes_of_a_save(config, checkpoints)
    try:
        free = free_bytes(Path(config.trainer.run_dir).absolute())
    except RunError:  # `check_folders` reports the folder
        return
    if free < needed:
        yield (
            f"trainer.run_dir={config.trainer.run_dir!r}: what the run saves takes about {needed / 1e9:.3g} GB and its "
            f"disk has {free / 1e9:.3g} GB free; make room, choose another folder, or save less: "
            "checkpoint.save_final, save_interval, hf_interval, hf_final"
        )


def _bytes_of_a_save(config: Config, checkpoints: Checkpoints) -> int:
    """Return the bytes of a checkpoint, or of the weights if only these are saved."""
    settings, weight = config.checkpoint, 2 if config.model.dtype == "bf16" else 4
    keys = ["model.path"]
    if not (settings.save_final or settings.save_interval):
        weight *= settings.hf_final or settings.hf_interval > 0
    else:
        if needs_critic(config):
            keys.append("model.critic_path" if config.model.critic_path else "model.path")
        if not config.model.frozen:  # weights, FP32 main parameters unless weights are FP32, and two moments
            weight = 12 if weight == 4 or config.engine.backend == "fsdp" else 14
    read = [hf_tensors(checkpoints[key], head="lm").values() for key in keys if key in checkpoints]
    return weight * sum(prod(tensor.shape) for tensors in read for tensor in tensors)
