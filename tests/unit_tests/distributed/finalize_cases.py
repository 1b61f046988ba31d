"""What each rank does in the tests of gradient finalisation: known numbers as gradients, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.helpers.engines import make_config, replaced, running_engine

# name -> (checkpoint, layout, head, frozen patterns)
CASES: dict[str, tuple[str, str, str, list[str]]] = {
    "tp2-sp": ("untied", "tp2-sp", "lm", []),
    "tp2": ("untied", "tp2", "lm", []),
    "tp2-sp value": ("untied", "tp2-sp", "value", []),
    "tp2 value": ("untied", "tp2", "value", []),
    "tp2-sp frozen norms": ("untied", "tp2-sp", "lm", ["*layernorm.weight"]),
    "dp2": ("tied", "dp2", "lm", []),
    "pp2 tied": ("tied", "pp2", "lm", []),
    "pp2 untied": ("untied", "pp2", "lm", []),
    "pp2 tied, two chunks": ("tied", "pp2-vpp2", "lm", []),
    "pp2 tied, embedding frozen": ("tied", "pp2", "lm", ["embedding.*"]),
    "pp2 tied, all frozen": ("tied", "pp2", "lm", ["*"]),
    "pp2 value": ("tied", "pp2", "value", []),
}
PARALLEL: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2, "overlap_p2p": True},
    "pp4-vpp2": {"pp": 4, "vpp": 2},
}
ROUTERS = ("dp2", "tp2-sp", "pp2")
BIAS_RATE = 0.25


@contextmanager
def wrapped_engine(
    checkpoint: Path,
    layout: str,
    *,
    head: str = "lm",
    frozen: list[str] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """An engine whose chunks are in DDP, without an optimizer: a model that is frozen as a whole has none."""
    config = replaced(make_config(checkpoint), "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "engine.megatron", **PARALLEL[layout])
    with running_engine(config, head=head, trainable=False) as engine:
        from mega_rl.ddp.frozen import freeze
        from mega_rl.ddp.wrap import wrap_chunks

        if prepare is not None:
            prepare(engine)
        if frozen == ["*"]:  # no run may freeze all of a model, but a reward model may be wrapped as it is
            for model in engine.models:
                model.requires_grad_(False)
        else:
            freeze(engine.chunks, frozen or [], everyone=engine.replica)
        engine.chunks = wrap_chunks(
            engine.chunks,
            config=engine.config,
            ddp=config.engine.megatron.ddp,
            distributed_optimizer=False,
            collection=engine.groups.collection,
        )
        yield engine


def fill_and_finalize(engine: Any, *, rank: int) -> dict[str, dict[str, Any]]:
    """By chunk and name: the sum of rank r's gradients (r + 1) * ones, and the marks of the parameter.

    The token count handed over must divide nothing.
    """
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.module.parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(rank + 1)
    tokens = torch.tensor(7, dtype=torch.int, device=engine.device)
    engine.config.finalize_model_grads_func(list(engine.chunks), tokens, pg_collection=engine.groups.collection)
    actual = {}
    for stage, chunk in enumerate(engine.chunks):
        for name, parameter in chunk.module.named_parameters():
            has_gradient = hasattr(parameter, "main_grad")
            assert has_gradient == parameter.requires_grad, name
            assert not has_gradient or parameter.main_grad.unique().numel() == 1, name
            actual[f"{stage}.{name}"] = {
                "gradient": float(parameter.main_grad.flatten()[0]) if has_gradient else None,
                "sequence_parallel": bool(getattr(parameter, "sequence_parallel", False)),
            }
    return actual


def finalize_all(rank: int, root: str) -> dict[str, Any]:
    """Every case on two ranks."""
    actual: dict[str, Any] = {}
    for name, (checkpoint, layout, head, frozen) in CASES.items():
        with wrapped_engine(Path(root) / checkpoint, layout, head=head, frozen=frozen) as engine:
            actual[name] = fill_and_finalize(engine, rank=rank)
    for layout in ROUTERS:
        for rate in (0.0, BIAS_RATE):
            with wrapped_engine(Path(root) / "routed", layout) as engine:
                actual[f"{layout} bias {rate}"] = update_biases(engine, rank=rank, rate=rate)
    return actual


def update_biases(engine: Any, *, rank: int, rate: float) -> dict[str, Any]:
    """The routers' biases before and after, with this rank's counts of tokens per expert, one list for each router."""
    engine.config.moe_router_bias_update_rate = rate
    routers = [m for chunk in engine.models for m in chunk.modules() if hasattr(m, "expert_bias")]
    before = [router.expert_bias.tolist() for router in routers]
    counts = []
    for number, router in enumerate(routers):
        generator = torch.Generator().manual_seed(10 * rank + number)
        counted = torch.randint(0, 9, router.local_tokens_per_expert.shape, generator=generator).float()
        router.local_tokens_per_expert.copy_(counted)
        counts.append(counted.tolist())
    fill_and_finalize(engine, rank=rank)
    return {
        "before": before,
        "counts": counts,
        "after": [router.expert_bias.tolist() for router in routers],
        "left": [float(router.local_tokens_per_expert.abs().sum()) for router in routers],
    }


def embedders(rank: int, checkpoint: str, *, declared: bool) -> list[dict[str, float | None]]:
    """Gradients of each chunk's parameters after finalisation on PP4 x VPP2, with embedders in every chunk.

    `declared`: whether the config says that there are such embedders. Chunk c of rank r fills its gradients with
    10 ** c * (r + 1).
    """

    def add(engine: Any) -> None:
        engine.config.has_cond_embedder = declared
        for chunk in engine.models:
            chunk.shared_embedder = torch.nn.Linear(3, 2, device=engine.device)
            chunk.own_embedder = torch.nn.Linear(3, 2, device=engine.device)
            chunk.frozen_embedder = torch.nn.Linear(3, 2, device=engine.device).requires_grad_(False)
            for module in (chunk.shared_embedder, chunk.frozen_embedder):
                for parameter in module.parameters():
                    parameter.pipeline_parallel = True

    with wrapped_engine(Path(checkpoint), "pp4-vpp2", prepare=add) as engine:
        for stage, chunk in enumerate(engine.chunks):
            chunk.zero_grad_buffer()
            for parameter in chunk.module.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(10**stage * (rank + 1))
        engine.config.finalize_model_grads_func(list(engine.chunks), None, pg_collection=engine.groups.collection)
        return [
            {name: _one_value(parameter) for name, parameter in chunk.module.named_parameters()}
            for chunk in engine.chunks
        ]


def _one_value(parameter: torch.nn.Parameter) -> float | None:
    """The number that all elements of the gradient are; None without a gradient."""
    if not parameter.requires_grad:
        return None
    (value,) = parameter.main_grad.unique().tolist()
    return float(value)


def embed_all(rank: int, checkpoint: str) -> dict[str, Any]:
    """With and without embedders declared."""
    return {str(declared): embedders(rank, checkpoint, declared=declared) for declared in (True, False)}
