"""What ranks of the verification tests run: the production rank function, as it is or with one thing planted wrong."""

from __future__ import annotations

import gc
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from mega_rl.untrusted import read_record
from mega_rl.verify.layouts import Plan
from tests.helpers import distributed

TIED_DENSE, ROUTED = "qwen3", "qwen3_moe"


def measure_all(rank: int, plans: list[Plan]) -> list[int]:
    """Every plan, one after the other; returns this process's threads after each."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.measure import measure

    threads = []
    for plan in plans:
        measure(plan, accelerator)
        gc.collect()  # the last engine of the plan, a cycle, still knew its groups when they were taken down
        threads.append(psutil.Process().num_threads())
    return threads


def forked_ranks(fault: str = "") -> Any:
    """`launcher.run_ranks` with ranks that need not import everything anew, measuring with a planted fault."""

    def run_ranks(
        command: list[str], *, ranks: int, logs: Path, timeout_s: float, use_gpus: bool, watch: object
    ) -> None:
        plan = read_record(Plan, json.loads(Path(command[-1]).read_text())["measure"])
        function, given = (measure_broken, {fault: plan}) if fault else (measure_all, [plan])
        distributed.run_ranks(ranks, function, given, timeout_s=timeout_s, device="cuda" if use_gpus else "cpu")

    return run_ranks


def measure_broken(rank: int, plans: dict[str, Plan]) -> None:
    """The plan of each fault of `faults()` and `engine_faults()`, measured with that fault."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.measure import measure

    for fault, plan in plans.items():
        with (faults(rank) | engine_faults())[fault]:
            measure(plan, accelerator)


def faults(rank: int) -> dict[str, Any]:
    """Reductions left out, and one gradient wrong on one rank only, by name."""
    # The package's attribute of this name is the function, not the module.
    upstream = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    start, finish = Group.start_grad_sync, Group.finish_grad_sync

    def unless_experts(sync: Any) -> Any:
        def skipping(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(not getattr(p, "allreduce", True) for bucket in self.buckets for p in bucket.params):
                return None
            return sync(self, *args, **kwargs)

        return skipping

    original = upstream._allreduce_non_tensor_model_parallel_grads

    def wrong_on_one(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        for chunk in model if rank == 1 else []:
            for name, parameter in chunk.named_parameters():
                if name.endswith("decoder.final_layernorm.weight"):
                    parameter.main_grad.mul_(1.5)
        return result

    reduce = "_allreduce_non_tensor_model_parallel_grads"
    return {
        "sp: norms": patch.object(upstream, reduce, nothing),
        "pp: tied embedding": patch.object(upstream, "_allreduce_word_embedding_grads", nothing),
        "dp: experts": patch.multiple(
            Group, start_grad_sync=unless_experts(start), finish_grad_sync=unless_experts(finish)
        ),
        "one copy": patch.object(upstream, reduce, wrong_on_one),
    }


def engine_faults() -> dict[str, Any]:
    """Things that the FSDP engine could get wrong, by name."""
    import torch

    from mega_rl.ddp.access import local
    from mega_rl.engines import build
    from mega_rl.engines.fsdp import FSDPEngine
    from mega_rl.engines.fsdp_model import fsdp_modules, sharded_parameters
    from mega_rl.verify import measure
    from mega_rl.verify.twin import as_saved

    load, skeleton, set_optim = build.load_rows, build.skeleton, build.set_optim
    apply_gradients, token_outputs = FSDPEngine._apply_gradients, FSDPEngine._token_outputs

    def one_weight(model: Any, *args: Any, **kwargs: Any) -> int:
        read = load(model, *args, **kwargs)
        with torch.no_grad():
            local(sharded_parameters(model)["model.layers.1.mlp.down_proj.weight"]).mul_(1.01)
        return read

    def one_gradient(self: Any, lr: float, metrics: Any) -> float:
        for name, parameter in sharded_parameters(self.model).items():
            if name == "model.layers.0.self_attn.k_norm.weight" and parameter.grad is not None:
                local(parameter.grad).mul_(1.5)
        return apply_gradients(self, lr, metrics)

    def averaged(model: Any, *args: Any, **kwargs: Any) -> int:
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(2.0)
        return load(model, *args, **kwargs)

    def padding_row(*args: Any, **kwargs: Any) -> Any:
        whole, model = skeleton(*args, **kwargs)
        model.get_input_embeddings().padding_idx = 3
        return whole, model

    def other_moment(optimizer: Any, optim: Any) -> None:
        set_optim(optimizer, replace(optim, beta1=0.8))

    def wide_positions(self: Any, micro: Any, there: Any, **more: Any) -> Any:
        return token_outputs(self, micro, replace(there, position_ids=2 * there.position_ids), **more)

    def exchanged(model: Any, tensors: Any) -> dict[str, Any]:
        saved = as_saved(model, tensors)
        gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
        return saved | {gate: saved[up], up: saved[gate]}

    return {
        "names": patch.object(measure, "as_saved", exchanged),
        "one weight": patch.object(build, "load_rows", one_weight),
        "one gradient": patch.object(FSDPEngine, "_apply_gradients", one_gradient),
        "averaged gradients": patch.object(build, "load_rows", averaged),
        "padding row": patch.object(build, "skeleton", padding_row),
        "optimizer": patch.object(build, "set_optim", other_moment),
        "positions": patch.object(FSDPEngine, "_token_outputs", wide_positions),
    }


def bare_config(folder: Path, raw: dict[str, Any]) -> Path:
    """A folder with nothing but a config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder
