"""What the one rank of the launch in conftest.py computes; the tests look at its numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mega_rl.config.schema import MegatronOptimizerConfig, ModelConfig
from tests.helpers.engines import exported_gradients, make_config, replaced, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses
from tests.unit_tests.engines.models.attention_cases import attention_cases

FP32 = ModelConfig(dtype="fp32")
RECOMPUTE = ("none", "selective", "full")


def run_all(rank: int, folder: str) -> dict[str, Any]:
    """Every case."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    return {
        "attention": attention_cases(),
        "norm": norm_cases(),
        "head": head_cases(),
        "recompute": {how: recompute_case(Path(folder) / "qwen3", how) for how in RECOMPUTE},
        "marks": marks_case(Path(folder) / "qwen2"),
        "family norms": family_norm_cases(),
        "te layers": te_layer_cases(Path(folder)),
    }


def small_config(**changes: Any) -> Any:
    """A TransformerConfig of 24 hidden units."""
    from megatron.core.transformer import TransformerConfig

    shape = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4}
    return TransformerConfig(**shape, use_cpu_initialization=True, **changes)


def norm_cases() -> dict[str, Any]:
    """Largest differences to fp64 and to transformers, forward and backward; the mark."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from mega_rl.engines.models.layer import RMSNorm

    generator = torch.Generator().manual_seed(0)
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        norm = RMSNorm(small_config(params_dtype=dtype, bf16=dtype is torch.bfloat16), 24, eps=1e-6)
        theirs = Qwen3RMSNorm(24, eps=1e-6).to(dtype)
        weight = torch.randn(24, generator=generator).to(dtype)
        norm.weight.data.copy_(weight)
        theirs.weight.data.copy_(weight)
        x = (3 * torch.randn(5, 7, 24, generator=generator)).to(dtype)
        x[0, 0] = 0  # only eps is left to divide by
        grad = torch.randn(5, 7, 24, generator=generator).to(dtype)
        exact = x.double().requires_grad_()
        exact_weight = weight.double().requires_grad_()
        reference = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * exact_weight
        expected = (reference, *torch.autograd.grad(reference, [exact, exact_weight], grad.double()))
        result[str(dtype)] = {
            name: [relative(a, b) for a, b in zip(through(module, x, grad), expected, strict=True)]
            for name, module in (("ours", norm), ("theirs", theirs))
        }
        result[str(dtype)]["dtype"] = str(norm(x).dtype)
    sharded = small_config(sequence_parallel=True, tensor_model_parallel_size=2)
    result["marks"] = [RMSNorm(config, 24).weight.sequence_parallel for config in (small_config(), sharded)]
    return result


def family_norm_cases() -> dict[str, Any]:
    """Norms of single families against the class of transformers: differences of output and gradients, by name."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

    from mega_rl.engines.models.layer import JointRMSNorm, LatentRMSNorm, RMSNorm

    generator = torch.Generator().manual_seed(1)
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = {"params_dtype": dtype, "bf16": dtype is torch.bfloat16}
        zero = RMSNorm(small_config(layernorm_zero_centered_gamma=True, **plain), 24, eps=1e-6)
        result[f"fresh {dtype}"] = float(zero.weight.abs().max())
        alone: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
        pairs = {
            "zero-centred": (zero, Gemma3RMSNorm(24, eps=1e-6)),
            "latent": (LatentRMSNorm(small_config(**plain), 24, eps=0.5, latent_eps=1e-6), DeepseekV3RMSNorm(24, 1e-6)),
            "joint": (
                JointRMSNorm(small_config(**plain), 6, 1e-5, heads=4, pg_collection=alone),
                OlmoeRMSNorm(24, eps=1e-5),
            ),
        }
        for name, (ours, theirs) in pairs.items():
            theirs = theirs.to(dtype)
            weight = torch.randn(24, generator=generator).to(dtype)
            ours.weight.data.copy_(weight)
            theirs.weight.data.copy_(weight)
            x = (3 * torch.randn(5, 7, 24, generator=generator)).to(dtype)
            grad = torch.randn(5, 7, 24, generator=generator).to(dtype)
            heads = (5, 7, 4, 6) if name == "joint" else (5, 7, 24)
            actual = through(ours, x.view(heads), grad.view(heads))
            expected = through(theirs, x, grad)
            result[f"{name} {dtype}"] = [
                relative(a.reshape(b.shape), b.double()) for a, b in zip(actual, expected, strict=True)
            ]
    return result


def te_layer_cases(folder: Path) -> dict[str, Any]:
    """What Megatron-Core is asked for, layer by layer, and what Transformer Engine's layers are said to lack."""
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.engines.models import specs

    asked: list[dict[str, Any]] = []
    made: list[tuple[Any, Any]] = []
    original = specs.get_gpt_layer_with_transformer_engine_spec

    def asking(**kwargs: Any) -> Any:
        asked.append(kwargs)
        mixture = partial(SimpleNamespace, submodules=SimpleNamespace(router=None))  # as from 0.18; a spec in 0.16
        attention = SimpleNamespace(module=None)
        made.append((mixture.keywords["submodules"], attention))
        return SimpleNamespace(submodules=SimpleNamespace(mlp=mixture, self_attention=attention))

    specs.get_gpt_layer_with_transformer_engine_spec = asking
    actual = {}
    for family in ("qwen3", "deepseek_v3", "gemma3_text", "glm4", "olmoe"):
        hf = read_hf_config(folder / family)
        asked.clear()
        made.clear()
        for layer in range(hf.num_layers):
            specs._te_layer(hf, layer)
        ours = [
            (mixture.router is specs.Router, attention.module is specs.LatentAttention) for mixture, attention in made
        ]
        actual[family] = {"asked": list(asked), "ours": ours, "lacking": specs.needs_local_spec(hf)}
    specs.get_gpt_layer_with_transformer_engine_spec = original
    return actual


def through(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of input and weight."""
    x = x.clone().requires_grad_()
    output = module(x)
    return [output, *torch.autograd.grad(output, [x, module.weight], grad)]  # type: ignore[list-item]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of what is expected."""
    return float((actual.double() - expected).norm() / expected.norm())


def head_cases() -> dict[str, Any]:
    """A fresh value head of a bf16 model on bf16 hidden states."""
    from mega_rl.engines.models.heads import ValueHead

    groups: Any = SimpleNamespace(tp=None)
    result: dict[str, Any] = {}
    for sharded in (False, True):
        config = small_config(
            bf16=True, params_dtype=torch.bfloat16, sequence_parallel=sharded, tensor_model_parallel_size=1 + sharded
        )
        head = ValueHead(config, groups)
        result[f"mark {sharded}"] = head.weight.sequence_parallel
    head = ValueHead(small_config(bf16=True, params_dtype=torch.bfloat16), groups)
    hidden = torch.randn(6, 2, 24).bfloat16()
    values, bias = head(hidden)
    assert bias is None
    result |= {"dtype": str(head.weight.dtype), "values": values.detach(), "shape": list(head.weight.shape)}
    head.weight.data.fill_(1 / 3)
    result["third"] = float((head(hidden)[0].double() - (hidden.double() / 3).sum(-1, keepdim=True)).abs().max())
    return result


def recompute_case(checkpoint: Path, how: str) -> dict[str, Any]:
    """Gradients of one mini-batch, and how often core attention and MLP ran forward."""
    from megatron.core.transformer.mlp import MLP

    from mega_rl.engines.models.attention import CoreAttention

    config = replaced(
        make_config(checkpoint, optimizer=MegatronOptimizerConfig(distributed=False)), "model", recompute=how
    )
    counts = {"CoreAttention": 0, "MLP": 0}

    def count(module: torch.nn.Module, *_: Any) -> None:
        counts[type(module).__name__] += 1

    with running_engine(config) as engine:
        for model in engine.models:
            for module in model.modules():
                if isinstance(module, (CoreAttention, MLP)):
                    module.register_forward_pre_hook(count)
        metrics = engine.train_minibatch(random_experience(), losses("lm"), lr=0.0)
        return {"gradients": exported_gradients(engine), "counts": counts, "micros": metrics["num_microbatches"]}


def marks_case(checkpoint: Path) -> dict[str, Any]:
    """Whether, and along which dimension, each parameter says that it is sharded over tensor parallel."""
    with running_engine(make_config(checkpoint), trainable=False) as engine:
        (model,) = engine.models
        return {
            name: parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            for name, parameter in model.named_parameters()
        }
