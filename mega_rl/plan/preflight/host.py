"""Checks of this machine: launcher, GPUs and their memory, packages, servers, folders, disk space."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path

from mega_rl.config.choices import needs_critic
from mega_rl.config.rules.rollout import KEY
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.disk import free_bytes
from mega_rl.errors import RunError, UserError
from mega_rl.plan.memory import judge
from mega_rl.plan.search import advice, cheapest
from mega_rl.plan.setup import Machine, RunSetup
from mega_rl.rollout.sglang.http.keys import Keys
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


def ranks_of_this_host(world_size: int) -> int:
    """Return the ranks on this host, by the launcher's LOCAL_WORLD_SIZE; without a launcher all, at most eight."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else min(world_size, 8)


def refuse_tasks_of_srun(*, launchers: int = 1) -> None:
    """Raise UserError in one of several tasks of a Slurm step that are not ranks.

    srun starts the same program in each task: N tasks that each start ranks would be N runs, all in one run folder.
    A batch script has the variables of a task too, those of task 0, but no step. launchers: number of launchers of the
    run; each may be a task.
    """
    variables = os.environ
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


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t` of NVIDIA's management library."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def smallest_gpu() -> int | None:
    """Return the bytes of the smallest GPU of this machine, by NVIDIA's driver; None without a visible GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    count, sizes = ctypes.c_uint(), []
    try:
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))  # leaves 0 when it fails
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _NvmlMemory()
            failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            if not failed and not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                sizes.append(int(memory.total))
    finally:
        library.nvmlShutdown()
    return min(sizes, default=None)


def check_memory(config: Config, checkpoints: Checkpoints, world_size: int) -> Iterator[str]:
    """Yield the change of (legal) settings that lets a run fit the GPUs of this machine.

    Without GPUs or with trainer.device=cpu nothing is checked: only `mega-rl plan` reports host memory.
    """
    memory = None if config.trainer.device == "cpu" else smallest_gpu()
    if memory is None or "model.path" not in checkpoints:
        return
    machine = Machine(world_size, ranks_of_this_host(world_size), memory, not is_missing("transformer_engine"))
    setup = RunSetup(config, checkpoints, machine)
    verdict = judge(setup)
    if verdict.fits is False:
        yield (
            f"{config.model.path} on {world_size} GPU{'s' * (world_size > 1)}: {verdict.sentence}; "
            f"{advice(setup, cheapest(setup))} (mega-rl plan shows all of it)"
        )


def check_packages(config: Config) -> Iterator[str]:
    """Yield the packages that the settings need and that are not installed, and settings that a CPU cannot run."""
    par, on_cpu = config.engine.megatron, config.trainer.device == "cpu"
    te, deepep = par.transformer_impl == "transformer_engine", par.moe.dispatcher == "deepep"
    te_set, deepep_set = "engine.megatron.transformer_impl=transformer_engine", "engine.megatron.moe.dispatcher=deepep"
    problems = {
        "package psutil is missing: Megatron-Core hangs at a checkpoint without it; run 'pip install psutil'": (
            is_missing("psutil")
        ),
        "engine.megatron.optimizer.precision_aware=true: needs Transformer Engine's FusedAdam, which is not "
        "installed; pip install mega_rl[gpu] or set engine.megatron.optimizer.precision_aware=false": (
            par.optimizer.precision_aware and is_missing("transformer_engine")
        ),
        f"{deepep_set}: the package deep_ep is not installed (github.com/deepseek-ai/DeepEP); set alltoall": (
            deepep and is_missing("deep_ep")
        ),
        f"{deepep_set} cannot run with trainer.device=cpu; set alltoall": deepep and on_cpu,
        **{
            f"metrics.trackers: the client of {tracker} is not installed; pip install 'mega_rl[{tracker}]', or "
            f"leave {tracker} out": is_missing(tracker)
            for tracker in config.metrics.trackers
        },
        f"{te_set}: the package is not installed; set auto or local": te and is_missing("transformer_engine"),
        f"{te_set} cannot run with trainer.device=cpu; set auto or local": te and on_cpu,
    }
    yield from (message for message, holds in problems.items() if holds)


def check_servers(config: Config, checkpoints: Checkpoints) -> Iterator[str]:
    """Yield why SGLang cannot be started, the keys of servers cannot be read, or SGLang cannot serve the model."""
    sglang = config.rollout.sglang
    if config.rollout.backend != "sglang":
        return
    actor = checkpoints.get("model.path")
    if actor is not None and actor.tied and FAMILIES[actor.family].untied_in_sglang:
        yield (
            f"model.path: model_type={actor.family} with tie_word_embeddings=true: SGLang 0.5.20 gives its output "
            "layer separate weights, which the checkpoint lacks; use an untied checkpoint or rollout.backend=hf"
        )
    if sglang.urls:
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
            close = get_close_matches(name, names or (), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; its ServerArgs lists them"
            yield f"{KEY}.{name}: SGLang {installation.version} has no such argument{hint}"
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
    """Yield a problem if the disk of the run folder is too small for the run's saves."""
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
    """Return the bytes of one checkpoint, of the weights if the run saves only these, 0 without saves.

    A lower bound for frozen weights, which have no optimizer state.
    """
    settings, kl, weight = config.checkpoint, config.algorithm.kl, 2 if config.model.dtype == "bf16" else 4
    in_fp32 = weight == 4 or config.engine.backend == "fsdp"
    actor = _num_parameters(checkpoints, "model.path")
    if not (settings.save_final or settings.save_interval):
        return weight * actor * bool(settings.hf_final or settings.hf_interval)
    if not config.model.frozen:
        weight = 12 if in_fp32 else 14  # weights, FP32 main parameters unless weights are FP32, and two moments
    total = weight * actor
    if needs_critic(config):
        total += weight * (_num_parameters(checkpoints, "model.critic_path") if config.model.critic_path else actor)
    if kl.reference_interval:  # the reference has the actor's architecture
        total += ((4 if in_fp32 else 2) + (0 if in_fp32 or kl.reference_rate == 1.0 else 4)) * actor
    return total


def _num_parameters(checkpoints: Checkpoints, key: str) -> int:
    """Return the parameters of a checkpoint, 0 if it could not be read."""
    return sum(prod(t.shape) for t in hf_tensors(checkpoints[key], head="lm").values()) if key in checkpoints else 0
