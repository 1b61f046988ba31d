"""What ranks do for test_transformer_engine.py, with Transformer Engine's layers or with local ones."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
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
    """Return what each case gives, by its name."""
    results = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        fault = FAULTS[case.fault]() if case.fault else contextlib.nullcontext()
        with fault, recorded() as calls, running_engine(case.config()) as engine:
            results[name] = {"marks": marks(engine), "classes": classes(engine)}
            if case.runs:
                results[name] |= steps(engine)
            results[name]["calls"] = calls
    return results


def steps(engine: Any) -> dict[str, Any]:
    """Return log-probs, gradients with their norm, and the weights after some steps, of micro-batches of 64 tokens."""
    rows = own_rows(random_experience(), engine)
    found: dict[str, Any] = {"logprobs": whole(engine.forward(rows).logprobs, engine)}
    metrics = engine.train_minibatch(rows, losses("lm"), lr=0.0)
    found |= {"norm": metrics["grad_norm"], "micros": metrics["num_microbatches"]}
    found["gradients"] = exported_gradients(engine)
    found["norms"] = [engine.train_minibatch(rows, losses("lm"), lr=LR)["grad_norm"] for _ in range(STEPS)]
    found["weights"] = exported(engine)
    return found


def marks(engine: Any) -> dict[str, tuple[bool, bool, bool]]:
    """(cut by tensor parallelism, summed under sequence parallelism, reduced apart) by the tensors of a weight.

    The names are Hugging Face's, of all tensors that a parameter is made of.
    """
    from mega_rl.converters.live.load import weights_of
    from mega_rl.converters.plan.ranks import build_plan

    weights = weights_of(engine.models[0])
    found = {}
    for planned in build_plan(engine.sharding, engine.groups.coordinates):
        weight = weights[planned.name]
        names = sorted({copy.hf_name for copy in planned.copies if copy.hf_name is not None})
        found[" ".join(names)] = (
            bool(getattr(weight, "tensor_model_parallel", False)),
            bool(getattr(weight, "sequence_parallel", False)),
            not getattr(weight, "allreduce", True),
        )
    return found


def classes(engine: Any) -> dict[str, Any]:
    """Return what the engine is made of: modules of Transformer Engine, fused weight gradients, Adam's class."""
    from mega_rl.ddp.optimizer import torch_optimizers

    modules = [module for module in engine.models[0].modules() if hasattr(module, "fuse_wgrad_accumulation")]
    adam = [type(each) for each in torch_optimizers(engine.optimizer)]
    return {
        "layers": sorted({type(module).__name__ for module in engine.models[0].modules()}),
        "fused": {module.fuse_wgrad_accumulation for module in modules},
        "adam": sorted({f"{each.__module__}.{each.__name__}" for each in adam}),
    }


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


def _change(target: str, replacement: Any) -> Any:
    return lambda: patch(target, replacement)


def _without_unmarking() -> Any:
    return patch("mega_rl.models.build.unmark_whole_weights", lambda _: None)


FAULTS: dict[str, Any] = {"whole weights marked": _without_unmarking}
