"""What ranks do for test_transformer_engine.py, with Transformer Engine's layers or with local ones."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig, OptimConfig
from tests.helpers.engines import exported, exported_gradients, make_config, own_rows, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses, whole

STEPS, LR = 2, 1e-3


@dataclass(frozen=True)
class Case:
    """An engine of a tiny checkpoint on a layout."""

    checkpoint: str
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    runs: bool = True  # else it is built alone
    fault: str = ""  # of `FAULTS`

    def config(self) -> Any:
        """Return the run's config: whole gradients on every rank, no clipping."""
        return make_config(
            Path(self.checkpoint),
            dtype=self.dtype,
            megatron=MegatronConfig(**self.layout),
            optimizer=MegatronOptimizerConfig(distributed=False),
            optim=OptimConfig(lr=LR, clip_grad=0.0),
        )


def run(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Return what each case gives, by its name; of a case with a fault that ends it, the error."""
    results: dict[str, Any] = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        with FAULTS[case.fault]() if case.fault else contextlib.nullcontext():
            try:
                results[name] = report(case)
            except TypeError as error:
                if not case.fault:
                    raise
                results[name] = {"error": str(error)}
    return results


def report(case: Case) -> dict[str, Any]:
    """Return what an engine is made of, what it was called with, and what it computes."""
    with recorded() as calls, running_engine(case.config()) as engine:
        whole_report = {"marks": marks(engine), **classes(engine)}
        if case.runs:
            whole_report |= steps(engine)
        return {**whole_report, "calls": calls, "attention": attention()}


def steps(engine: Any) -> dict[str, Any]:
    """Return log-probs, gradients with their norm, and the weights after some steps, of micro-batches of 64 tokens."""
    rows = own_rows(random_experience(), engine)
    logprobs = whole(engine.forward(rows).logprobs, engine)
    metrics = engine.train_minibatch(rows, losses("lm"), lr=0.0)
    return {
        "logprobs": logprobs,
        "norm": metrics["grad_norm"],
        "micros": metrics["num_microbatches"],
        "gradients": exported_gradients(engine),
        "norms": [engine.train_minibatch(rows, losses("lm"), lr=LR)["grad_norm"] for _ in range(STEPS)],
        "weights": exported(engine),
    }


def marks(engine: Any) -> dict[str, tuple[bool, bool, bool]]:
    """(cut by tensor parallelism, summed under sequence parallelism, reduced apart) by the tensors of a weight.

    The names are Hugging Face's, of all tensors that a parameter is made of.
    """
    from mega_rl.converters.live.load import weights_of
    from mega_rl.converters.plan.ranks import build_plan

    weights = weights_of(engine.models[0])
    by_tensors = {}
    for planned in build_plan(engine.sharding, engine.groups.coordinates):
        weight = weights[planned.name]
        names = sorted({copy.hf_name for copy in planned.copies if copy.hf_name is not None})
        by_tensors[" ".join(names)] = (
            bool(getattr(weight, "tensor_model_parallel", False)),
            bool(getattr(weight, "sequence_parallel", False)),
            not getattr(weight, "allreduce", True),
        )
    return by_tensors


def classes(engine: Any) -> dict[str, set[Any]]:
    """Return the names of the model's layers and of Adam's class, and whether weight gradients are fused."""
    from mega_rl.ddp.optimizer import torch_optimizers

    modules = list(engine.models[0].modules())
    adam = [type(each) for each in torch_optimizers(engine.optimizer)]
    return {
        "layers": {type(module).__name__ for module in modules},
        "fused": {each.fuse_wgrad_accumulation for each in modules if hasattr(each, "fuse_wgrad_accumulation")},
        "adam": {f"{each.__module__}.{each.__name__}" for each in adam},
    }


def attention() -> str:
    """Return which of its ways to attend Transformer Engine took last."""
    if "transformer_engine.pytorch" not in sys.modules:
        return ""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    return " ".join(way for way in ("flash", "fused", "unfused") if chosen[f"use_{way}_attention"])


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Yield the arguments that Megatron-Core hands to Transformer Engine's layers, bound to their own signatures.

    Those of attention with their values where these are words or numbers.
    """
    try:
        import transformer_engine.pytorch as te
    except ImportError:
        yield {}
        return
    calls: dict[str, set[str]] = {}
    with contextlib.ExitStack() as stack:
        for name in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention"):
            for method in ("__init__", "forward"):
                key = f"{name}.{method}"
                watched = _watched(getattr(getattr(te, name), method), calls.setdefault(key, set()))
                stack.enter_context(patch.object(getattr(te, name), method, watched))
        yield calls


def _watched(function: Any, arguments: set[str]) -> Any:
    signature = inspect.signature(function)

    def watched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            arguments.add(f"{name}={value}" if isinstance(value, str | bool) else name)
        return function(*args, **kwargs)

    return watched


def _swapped_gate_and_up() -> Any:
    """Load the two halves of every MLP's first weight the wrong way round."""
    from mega_rl.engines import build

    load = build.load_hf

    def load_swapped(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        report = load(chunks, *args, **kwargs)
        for name, weight in chunks[0].named_parameters():
            if name.endswith("mlp.linear_fc1.weight"):
                weight.data.copy_(torch.cat(weight.data.chunk(2)[::-1]))
        return report

    return patch.object(build, "load_hf", load_swapped)


def _other_epsilon() -> Any:
    from mega_rl.engines.models import build

    settings = build.transformer_config_kwargs
    return patch.object(build, "transformer_config_kwargs", lambda hf: {**settings(hf), "layernorm_epsilon": 1e-4})


def _other_scale() -> Any:
    import transformer_engine.pytorch as te

    construct = te.DotProductAttention.__init__

    def scaled(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **{**kwargs, "softmax_scale": 0.1})

    return patch.object(te.DotProductAttention, "__init__", scaled)


def _one_sequence() -> Any:
    """Take a packed micro-batch for a single sequence."""
    from mega_rl.engines import schedule

    make = schedule.te_sequences

    def joined(cu_seqlens: torch.Tensor, max_seqlen: int, **more: Any) -> Any:
        params = make(cu_seqlens, max_seqlen, **more)
        params.cu_seqlens_q = params.cu_seqlens_kv = cu_seqlens[[0, -1]]
        params.max_seqlen_q = params.max_seqlen_kv = int(cu_seqlens[-1])
        return params

    return patch.object(schedule, "te_sequences", joined)


def _last_micro_batch_alone() -> Any:
    """Write each micro-batch's weight gradients over those of the one before."""
    import transformer_engine.pytorch as te

    forward = te.LayerNormLinear.forward

    def first(self: Any, inp: torch.Tensor, **_: Any) -> Any:
        return forward(self, inp, is_first_microbatch=True)

    return patch.object(te.LayerNormLinear, "forward", first)


def _other_signature() -> Any:
    """Attend without the argument that newer releases take."""
    import transformer_engine.pytorch as te

    forward = te.DotProductAttention.forward

    def without(self: Any, query_layer: Any, key_layer: Any, value_layer: Any, attention_mask: Any = None, *,
                qkv_format: Any = None, attn_mask_type: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                ) -> Any:  # fmt: skip
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
        kinds = {"qkv_format": qkv_format, "attn_mask_type": attn_mask_type}
        return forward(self, query_layer, key_layer, value_layer, attention_mask, **lengths, **kinds)

    return patch.object(te.DotProductAttention, "forward", without)


FAULTS: dict[str, Callable[[], Any]] = {
    "whole weights marked": lambda: patch("mega_rl.engines.models.build.unmark_whole_weights", lambda _: None),
    "gate and up swapped": _swapped_gate_and_up,
    "another epsilon": _other_epsilon,
    "another softmax scale": _other_scale,
    "sequences joined": _one_sequence,
    "last micro-batch alone": _last_micro_batch_alone,
    "another signature": _other_signature,
}
