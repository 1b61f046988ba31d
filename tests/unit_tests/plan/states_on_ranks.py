"""Memory of live engines by part, on every rank of many layouts, for the comparison with the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema import AdapterConfig, Config
from tests.helpers.engines import make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience

PARTS = ("weights", "gradients", "optimizer")
SP = {"sequence_parallel": True}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}
# name -> (world size, family, case); what a case may have: `config_of`.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank, bf16": (1, "qwen3", {}),
    "one rank, fp32, not distributed": (1, "llama", {"dtype": "fp32", "optimizer": {"distributed": False}}),
    "one rank, critic": (1, "qwen2", {"head": "value"}),
    "one rank, reference": (1, "qwen3", {"trainable": False}),
    "tp2, vocabulary padded": (2, "qwen3 odd", {"megatron": {"tp": 2}}),
    "tp2-sp, critic": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "head": "value"}),
    "pp2, tied": (2, "qwen3", {"megatron": {"pp": 2}}),
    "pp2, tied, buckets": (2, "qwen3", {"megatron": {"pp": 2}, "ddp": BUCKETS}),
    "pp2-vpp2": (2, "llama", {"megatron": {"pp": 2, "vpp": 2}, "ddp": BUCKETS}),
    "pp2, uneven": (2, "qwen3", {"megatron": {"pp": 2, "pipeline": "Et|tttL"}}),
    "cp2": (2, "qwen3", {"megatron": {"cp": 2}}),
    "dp2, gradients in bf16": (2, "qwen3", {"ddp": {"grad_reduce_in_fp32": False}}),
    "dp2, not distributed": (2, "qwen3", {"optimizer": {"distributed": False}}),
    "dp2, frozen": (2, "qwen3", {"frozen": ["embedding.*", "decoder.layers.0.*"]}),
    "norms behind": (2, "gemma3_text", {"megatron": {"tp": 2}}),
    "joint norms": (2, "olmoe", {"megatron": {"ep": 2}}),
    "sinks and biases": (2, "gpt_oss", {"megatron": {"ep": 2}}),
    "shared gate": (2, "qwen2_moe", {"megatron": {"tp": 2, "etp": 1, **SP}}),
    "latent attention without query rank": (2, "deepseek_v2", {"megatron": {"tp": 2, **SP}}),
    "fsdp": (2, "qwen3", {"engine": "fsdp"}),
    "muon": (2, "qwen3", {"optim": "muon"}),
    "muon, fsdp": (2, "gpt_oss", {"optim": "muon", "engine": "fsdp"}),
    "fsdp, untied, frozen": (2, "llama", {"engine": "fsdp", "frozen": ["model.embed_tokens.*"]}),
    "fsdp, critic": (2, "qwen2", {"engine": "fsdp", "head": "value"}),
    "adapters, tp2-sp": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "adapter": 4}),
    "adapters, pp2, critic": (2, "qwen3", {"megatron": {"pp": 2}, "adapter": 4, "head": "value"}),
    "fsdp, adapters": (2, "llama", {"engine": "fsdp", "adapter": 4}),
    "fsdp, indexers": (2, "deepseek_v32", {"engine": "fsdp"}),
    "tp2-pp2, tied": (4, "qwen3 odd", {"megatron": {"tp": 2, "pp": 2}}),
    "dp4, buckets": (4, "qwen3", {"ddp": BUCKETS}),
    "dp4, instances": (4, "qwen3", {"ddp": {"optimizer_instances": 2}}),
    "muon, tp2-sp-ep2-dp2": (4, "deepseek_v3", {"optim": "muon", "megatron": {"tp": 2, "ep": 2, "etp": 1, **SP}}),
    "tp2-sp-ep2-dp2": (4, "deepseek_v3", {"megatron": {"tp": 2, "ep": 2, "etp": 1, **SP}}),
    "tp2-sp-ep2-etp2": (4, "deepseek_v3", {"megatron": {"tp": 2, "ep": 2, **SP}, "ddp": BUCKETS}),
    "ep2-pp2": (4, "glm4_moe", {"megatron": {"ep": 2, "pp": 2}}),
    "ep4, one tensor of experts on disk": (4, "gpt_oss", {"megatron": {"ep": 4}}),
    "torch_fsdp2": (4, "qwen3 odd", {"megatron": {"tp": 2}, "ddp": {"name": "torch_fsdp2"}}),
    "fsdp, shards of two": (4, "qwen3_moe", {"engine": "fsdp", "fsdp": {"shard_ranks": 2}}),
}


def config_of(checkpoint: Path, case: dict[str, Any]) -> Config:
    """Return the config of a case: sections by their names, and dtype and engine."""
    config = make_config(checkpoint, dtype=case.get("dtype", "bf16"), engine=case.get("engine", "megatron"))
    areas = {"megatron": "engine.megatron", "ddp": "engine.megatron.ddp", "optimizer": "engine.megatron.optimizer"}
    for name, area in {**areas, "fsdp": "engine.fsdp"}.items():
        config = replaced(config, area, **case.get(name, {}))
    config = replaced(config, "optim", name=case.get("optim", "adam"))
    adapter = AdapterConfig(rank=case.get("adapter", 0))
    return replace(config, model=replace(config.model, frozen=case.get("frozen", []), adapter=adapter))


def run_cases(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, int]]:
    """Return the bytes of every case on this rank; `cases` maps names to (checkpoint, case)."""
    return {name: _bytes_of(Path(checkpoint), case) for name, (checkpoint, case) in cases.items()}


def _bytes_of(checkpoint: Path, case: dict[str, Any]) -> dict[str, int]:
    config = config_of(checkpoint, case)
    head, trainable = case.get("head", "lm"), case.get("trainable", True)
    with running_engine(config, head=head, trainable=trainable) as engine:
        if config.engine.backend == "fsdp":
            return _sizes(_of_fsdp(engine, head))
        return _sizes(_of_megatron(engine))


def _of_megatron(engine: Any) -> list[Iterable[torch.Tensor]]:
    from mega_rl.ddp.access import gradient_tensors, optimizer_tensors, parameter_tensors
    from mega_rl.ddp.optimizer import create_state, torch_optimizers

    if engine.optimizer is None:
        return [parameter_tensors(engine.chunks), [], []]
    for chunk in engine.models:
        for parameter in chunk.parameters():
            if parameter.requires_grad and not hasattr(parameter, "main_grad"):  # torch_fsdp2
                parameter.grad = torch.zeros_like(parameter)
    create_state(engine.optimizer)
    inner = torch_optimizers(engine.optimizer)
    return [
        parameter_tensors(engine.chunks),
        gradient_tensors(engine.chunks),
        [tensor for each in inner for tensor in optimizer_tensors(each)],
    ]


def _of_fsdp(engine: Any, head: str) -> list[Iterable[torch.Tensor]]:
    """Return the tensors after a step: FSDP2's gradients are there from the first backward on."""
    from mega_rl.ddp.access import local
    from mega_rl.ddp.optimizer import MOMENTS
    from mega_rl.engines.fsdp_model import sharded_parameters
    from tests.unit_tests.distributed.engine_cases import losses

    engine.train_minibatch(own_rows(random_experience(), engine), losses(head), lr=1e-3)
    shards = sharded_parameters(engine.model).values()
    return [
        [local(shard) for shard in shards],
        [local(shard.grad) for shard in shards if shard.grad is not None],
        [local(each) for state in engine.optimizer.state.values() for name, each in state.items() if name in MOMENTS],
    ]


def _sizes(parts: list[Iterable[torch.Tensor]]) -> dict[str, int]:
    """Return the bytes of each part's storages; memory that parts share counts for the first of them."""
    from mega_rl.engines.offload import storages_of

    seen: set[int] = set()
    sizes = {}
    for name, tensors in zip(PARTS, parts, strict=True):
        storages = storages_of(list(tensors))
        sizes[name] = sum(storage.nbytes() for address, storage in storages.items() if address not in seen)
        seen |= set(storages)
    return sizes
