"""Bytes that autograd keeps in the forward of a live engine, with stand-ins for the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.converters.hf.config import release_problems
from tests.helpers.engines import make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience

LENGTH = 32  # tokens of every sequence: a power of two, so that length classes have no padding
SP = {"tp": 2, "sequence_parallel": True}
# name -> (world size, family, case)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "qwen3": (1, "qwen3", {}),
    "qwen3, fp32": (1, "qwen3", {"dtype": "fp32"}),
    "llama": (1, "llama", {}),
    "gemma3": (1, "gemma3_text", {}),
    "qwen3, full": (1, "qwen3", {"recompute": "full"}),
    "qwen3, core_attn": (1, "qwen3", {"recompute": "selective"}),
    "qwen3, mlp": (1, "qwen3", {"recompute": "selective", "recompute_modules": ["mlp"]}),
    "qwen3_moe": (1, "qwen3_moe", {}),
    "deepseek_v3": (1, "deepseek_v3", {}),
    "deepseek_v3, moe": (1, "deepseek_v3", {"recompute": "selective", "recompute_modules": ["moe"]}),
    "deepseek_v3, core_attn": (1, "deepseek_v3", {"recompute": "selective"}),
    "qwen3, tp2": (2, "qwen3", {"layout": {"tp": 2}}),
    "qwen3, tp2-sp": (2, "qwen3", {"layout": SP}),
    "qwen3, tp2-sp, full": (2, "qwen3", {"layout": SP, "recompute": "full"}),
    "deepseek_v3, tp2-sp": (2, "deepseek_v3", {"layout": SP}),
    "qwen3, cp2": (2, "qwen3", {"layout": {"cp": 2}}),
}
if not any(release_problems("qwen3_5_text")):
    CASES["qwen3_5"] = (1, "qwen3_5_text", {})
    CASES["qwen3_5, tp2-sp"] = (2, "qwen3_5_text", {"layout": SP})


def run_cases(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return (bytes per token of all layers, of all layers and the ends) of every case on this rank."""
    with _kernels_of_a_gpu():
        return {name: _measured(Path(checkpoint), case) for name, (checkpoint, case) in cases.items()}


def _measured(checkpoint: Path, case: dict[str, Any]) -> dict[str, float]:
    config = replaced(
        make_config(checkpoint, dtype=case.get("dtype", "bf16")), "engine.megatron", **case.get("layout", {})
    )
    config = replaced(config, "trainer.microbatch", max_tokens=4096)
    model = {name: case[name] for name in ("recompute", "recompute_modules") if name in case}
    config = replaced(config, "model", **model)
    with running_engine(config) as engine:
        for module in engine.models[0].modules():
            if hasattr(module, "config"):
                module.config.bias_activation_fusion = engine.sharding.hf.activation != "gelu_tanh"
            if hasattr(module, "softmax_scale") and hasattr(module, "kernel"):
                module.kernel = _attention
        rows = own_rows(random_experience(num_prompts=8, longest=LENGTH), engine)
        rows.lengths[:] = LENGTH
        return _kept(engine, rows)


def _kept(engine: Any, rows: Any) -> dict[str, float]:
    """Return the bytes of all memory that is saved until the loss is computed, but for parameters."""
    from tests.unit_tests.distributed.engine_cases import losses

    parameters = {parameter.untyped_storage().data_ptr() for model in engine.models for parameter in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice
    recording = [True]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if recording[0] and storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    def loss(outputs: Any, fields: Any, sequences: Any) -> Any:
        recording[0] = False  # its own tensors are [T], and what follows is the backward
        return losses("lm")(outputs, fields, sequences)

    loss.needs_entropy = losses("lm").needs_entropy  # type: ignore[attr-defined]
    tokens = sum(micro.tokens.numel() for micro in engine.batching.split(rows, data_parallel=engine.data_parallel))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_minibatch(rows, loss, lr=1e-3)
    return {"tokens": tokens, "bytes": sum(seen.values())}


class _Norm(torch.autograd.Function):
    """RMSNorm as CUDA's one kernel: it keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.clone(), torch.zeros_like(ctx.saved_tensors[1])


class _DeltaRule(torch.autograd.Function):
    """The rule of flash-linear-attention: its inputs, sums of decays, and products of 64 tokens with each other."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, g.clone(), beta, torch.empty(*g.shape, 64, dtype=q.dtype))
        return v.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:5])


class _Unit(torch.autograd.Function):
    """Its L2 norm: the result, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        ctx.save_for_backward(out, torch.empty(*x.shape[:-1], 1))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class _Flash(torch.autograd.Function):
    """FlashAttention: it keeps its inputs, its result and a float32 for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros(*query.shape[:-1], value.size(-1), dtype=query.dtype)
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[:-1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return _Flash.apply(query, key, value)


@contextmanager
def _kernels_of_a_gpu() -> Iterator[None]:
    """Replace torch's RMSNorm, which a CPU computes in several operations, and keep compilers out."""
    import mega_rl.engines.models.layer as norm

    forward, function = torch.nn.RMSNorm.forward, norm.rms_norm
    torch.nn.RMSNorm.forward = lambda self, x: _Norm.apply(x, self.weight)  # type: ignore[method-assign]
    norm.rms_norm = lambda x, shape, weight, eps: _Norm.apply(x, weight)  # of norms that multiply by 1 + weight
    if "qwen3_5" in CASES:
        from megatron.core.ssm.gated_delta_net import common, gdn

        common.l2norm = _Unit.apply
        gdn.causal_conv1d = lambda x, weight, **_: (_Norm.apply(x, weight), None)
        gdn.chunk_gated_delta_rule = lambda q, k, v, *, g, beta, **_: (_DeltaRule.apply(q, k, v, g, beta), None)
    disabled, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    try:
        yield
    finally:
        torch.nn.RMSNorm.forward, norm.rms_norm = forward, function
        torch._dynamo.config.disable = disabled
