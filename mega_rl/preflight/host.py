"""Checks of the machine: packages, servers, folders, disk space."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path

from mega_rl.config.plugins.choices import needs_critic
from mega_rl.config.rules.servers import KEY
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.errors import RunError, UserError
from mega_rl.preflight.memory import smallest_gpu
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server.installation import Installation, argument_names, missing_tools, require_sglang
from mega_rl.storage.disk import free_bytes


def check_packages(config: Config) -> Iterator[str]:
    """Yield the packages that the settings need and that are not installed."""
    if importlib.util.find_spec("psutil") is None:
        yield "package psutil is missing: Megatron-Core hangs at a checkpoint without it; run 'pip install psutil'"
    if config.engine.megatron.optimizer.precision_aware and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "engine.megatron.optimizer.precision_aware=true: needs Transformer Engine's FusedAdam, which is not "
            "installed; pip install mega_rl[gpu] or set engine.megatron.optimizer.precision_aware=false"
        )
    if config.engine.megatron.moe.dispatcher == "deepep":
        yield from _deepep(config.trainer.device)
    for tracker in config.metrics.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield (
                f"metrics.trackers: the client of {tracker} is not installed; pip install 'mega_rl[{tracker}]', or "
                f"leave {tracker} out"
            )
    if config.engine.megatron.transformer_impl != "transformer_engine":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        yield "engine.megatron.transformer_impl=transformer_engine: the package is not installed; set auto or local"
    if config.trainer.device == "cpu":
        yield (
            "engine.megatron.transformer_impl=transformer_engine cannot run with trainer.device=cpu; set auto or local"
        )


def _deepep(device: str) -> Iterator[str]:
    """Yield why DeepEP's kernels cannot send tokens here."""
    setting = "engine.megatron.moe.dispatcher=deepep"
    if importlib.util.find_spec("deep_ep") is None:
        yield f"{setting}: the package deep_ep is not installed (github.com/deepseek-ai/DeepEP); set alltoall"
    if device == "cpu":
        yield f"{setting} cannot run with trainer.device=cpu; set alltoall"


def check_servers(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
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
    try:
        if not sglang.urls:
            installation = require_sglang(device="" if config.trainer.device == "auto" else config.trainer.device)
            yield from _unknown_arguments(sglang.server.args, installation)
            if config.trainer.device != "cpu" and smallest_gpu() is not None:
                lacks = "rollout.backend=sglang: SGLang compiles kernels when it starts: "
                yield from (lacks + tool for tool in missing_tools())
        elif sglang.keys_file:
            Keys.read(Path(sglang.keys_file))
    except UserError as error:
        yield f"rollout.sglang.keys_file: {error}" if sglang.urls else str(error)


def _unknown_arguments(args: Mapping[str, object], installation: Installation) -> Iterator[str]:
    names = argument_names(installation) if args else None
    for name in args.keys() - names if names else ():
        close = get_close_matches(name, names or (), n=1)
        yield (
            f"{KEY}.{name}: SGLang {installation.version} has no such argument"
            + (f"; did you mean {close[0]}?" if close else "; its ServerArgs lists them")
        )


def check_folders(config: Config) -> Iterator[str]:
    """Yield the folders that cannot be resumed from or written to."""
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield f"checkpoint.resume={resume!r}: no such directory; legal: auto, never or a checkpoint directory"
    run_dir = Path(config.trainer.run_dir).absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir():
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is a file; name a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is not writable; name another folder"


def check_disk(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield a problem if the disk of the run folder is too small for what the run will save."""
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


def _bytes_of_a_save(config: Config, checkpoints: Mapping[str, HFConfig]) -> int:
    """Return the bytes of one checkpoint, or of the weights alone where only those are saved; 0 without saves.

    A lower bound where weights are frozen, for they have no optimizer state.
    """
    settings = config.checkpoint
    weight = 2 if config.model.dtype == "bf16" else 4
    trained = ["model.path"]
    saves_state = settings.save_final or settings.save_interval > 0
    if saves_state:
        if not config.model.frozen:
            # Weights, FP32 main parameters where they are not FP32 themselves, and two moments.
            weight = 12 if weight == 4 or config.engine.backend == "fsdp" else 14
        if needs_critic(config):
            trained.append("model.critic_path" if config.model.critic_path else "model.path")
    elif not (settings.hf_final or settings.hf_interval):
        return 0
    total = sum(weight * _num_parameters(checkpoints[key]) for key in trained if key in checkpoints)
    kl = config.algorithm.kl
    if saves_state and kl.reference_interval and "model.path" in checkpoints:  # the reference is of its architecture
        in_fp32 = config.model.dtype == "fp32" or config.engine.backend == "fsdp"
        averaged = 0 if in_fp32 or kl.reference_rate == 1.0 else 4
        total += ((4 if in_fp32 else 2) + averaged) * _num_parameters(checkpoints["model.path"])
    return total


def _num_parameters(hf: HFConfig) -> int:
    return sum(prod(tensor.shape) for tensor in hf_tensors(hf, head="lm").values())
