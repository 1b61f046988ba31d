"""What each of two ranks does for test_megatron.py: one launch for all."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mega_rl.config.schema import MegatronOptimizerConfig
from mega_rl.config.schema.engine import DdpConfig
from tests.helpers.engines import exported, make_config, own_rows, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses

OFFLOADS: dict[str, dict[str, Any]] = {
    "fp32": {"layout": "dp2"},
    "bf16": {"layout": "dp2", "dtype": "bf16"},
    "not sharded": {"layout": "dp2", "distributed": False},
    "frozen": {"layout": "pp2", "trainable": False},
}
FUSED: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": "bf16"}}
INSPECTED = ("dp2", "pp2", "tp2")
SPOILED = {"dp2": "nan", "pp2": "inf", "dp2 bf16": "inf", "dp2 overlap": "nan"}


def run_all(rank: int, checkpoint: str) -> dict[str, Any]:
    """Every case, on both ranks."""
    path = Path(checkpoint)
    return {
        "offload": {name: offload_case(path, **case) for name, case in OFFLOADS.items()},
        "spoiled": {name: spoiled_case(path, name, float(value)) for name, value in SPOILED.items()},
        "fused": {name: fused_case(path, **case) for name, case in FUSED.items()},
        "inspected": {layout: inspected_case(path, layout) for layout in INSPECTED},
    }


@contextmanager
def engine_of(
    checkpoint: Path,
    layout: str,
    *,
    dtype: str = "fp32",
    trainable: bool = True,
    overlap: bool = False,
    **optimizer: Any,
) -> Iterator[Any]:
    """An engine that has done one optimizer step, if it does any. overlap: of gradients and parameters on their way."""
    config = make_config(
        checkpoint,
        layout=layout,
        dtype=dtype,
        optimizer=MegatronOptimizerConfig(**optimizer),
        ddp=DdpConfig(overlap_grad_reduce=overlap, overlap_param_gather=overlap),
    )
    with running_engine(config, trainable=trainable) as engine:
        if trainable:
            train(engine)
        yield engine


def train(engine: Any, *, seed: int = 0) -> dict[str, float]:
    """One optimizer step."""
    metrics: dict[str, float] = engine.train_minibatch(
        own_rows(random_experience(seed=seed), engine), losses("lm"), lr=1e-2
    )
    return metrics


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Exported weights, main parameters and moments of this rank, as copies."""
    actual = exported(engine)
    if engine.optimizer is None:
        return actual
    from mega_rl.ddp.optimizer import torch_optimizers

    for optimizer in torch_optimizers(engine.optimizer):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            actual[f"main {number}"] = parameter.detach().clone()
            actual |= {f"{key} {number}": value.clone() for key, value in optimizer.state[parameter].items()}
    return actual


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether every bit is equal."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def storage_bytes() -> int:
    """Bytes in the storages of all tensors of this process."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.layout == torch.strided]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def drop_messages(engine: Any) -> None:
    """Free the message buffers, which are no state: `offload` does too, and the next step makes them again."""
    from mega_rl.ddp.bucket_groups import scratches

    for scratch in scratches(engine.chunks):
        scratch.release()


def offload_case(checkpoint: Path, layout: str, *, trainable: bool = True, **more: Any) -> dict[str, Any]:
    """An engine taken off and back on between steps, beside one that never was."""
    with engine_of(checkpoint, layout, trainable=trainable, **more) as engine:
        if trainable:
            train(engine, seed=1)
        expected = state(engine)
        logprobs = engine.forward(own_rows(random_experience(), engine)).logprobs
    nothing = storage_bytes()
    with engine_of(checkpoint, layout, trainable=trainable, **more) as engine:
        drop_messages(engine)
        before = storage_bytes()
        given_back = engine.offload()
        left = storage_bytes()
        result = {"given back": given_back, "fell by": before - left, "left": left - nothing}
        result["parameters"] = sum(p.untyped_storage().nbytes() for m in engine.models for p in m.parameters())
        try:
            engine.offload()
        except RuntimeError as error:
            result["twice"] = str(error)
        engine.onload()
        engine.onload()  # nothing is off: nothing happens
        result["back"] = storage_bytes() - before
        if trainable:
            train(engine, seed=1)
        result["same state"] = same(state(engine), expected)
        result["same outputs"] = torch.equal(engine.forward(own_rows(random_experience(), engine)).logprobs, logprobs)
        drop_messages(engine)
        result["again"] = engine.offload() == given_back
        engine.onload()
    return result


def spoiled_case(checkpoint: Path, name: str, value: float) -> dict[str, Any]:
    """Mini-batches with one bad advantage, then a good one; beside an engine that only saw the good one."""
    layout, _, how = name.partition(" ")
    more: dict[str, Any] = {"dtype": "bf16"} if how == "bf16" else {"overlap": how == "overlap"}
    with engine_of(checkpoint, layout, **more) as engine:
        train(engine, seed=1)
        expected = state(engine)
    with engine_of(checkpoint, layout, **more) as engine:
        return skip_updates(engine, state, value, expected=expected)


def skip_updates(
    engine: Any, state: Callable[[Any], dict[str, torch.Tensor]], value: float, *, expected: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """An update without a token that trains, two with an advantage of `value` on one rank, of which one may be skipped
    in a row, then a good one.

    expected: the state after the good one alone.
    """
    from mega_rl.errors import NonFiniteGradientError
    from mega_rl.workers.models import LearningWorker

    worker = LearningWorker("actor", engine, losses("lm"), learning_rate=lambda step: 1e-2, max_skipped_steps=1)
    before = state(engine)
    batch = random_experience()
    row, column = batch.loss_mask.nonzero()[0].tolist()  # of the first data-parallel rank
    batch.advantages[row, column] = value
    empty = random_experience()
    for field in (empty.loss_mask, empty.loss_weights, empty.token_weights):
        field.zero_()
    result: dict[str, Any] = {"of nothing": worker.update(own_rows(empty, engine), step=7)}
    result["still"] = same(state(engine), before)
    result["metrics"] = worker.update(own_rows(batch, engine), step=7)
    result["skipped"] = same(state(engine), before)
    try:
        worker.update(own_rows(batch, engine), step=8)
    except NonFiniteGradientError as error:
        result |= {"message": str(error), "of the engine": str(error.__cause__)}
    result["unchanged"] = same(state(engine), before)
    metrics = worker.update(own_rows(random_experience(seed=1), engine), step=9)
    result["usable"] = math.isfinite(metrics["actor/grad_norm"]) and same(state(engine), expected)
    return result


def fused_case(checkpoint: Path, **more: Any) -> dict[str, Any]:
    """Gradient norm and weights of a step in which some layers add into `main_grad` themselves, and of a plain one."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert self.fuse_wgrad_accumulation
        return LinearIntoMainGrad.apply(x, self.weight), None

    steps = {}
    for kind, changes in {"plain": {}, "fused": {"forward": forward, "fuse_wgrad_accumulation": False}}.items():
        with ExitStack() as stack:
            for name, value in changes.items():
                stack.enter_context(patch.object(RowParallelLinear, name, value, create=True))
            with engine_of(checkpoint, "dp2", **more) as engine:
                steps[kind] = {"norm": train(engine, seed=1)["grad_norm"], "weights": exported(engine)}
    return steps


class LinearIntoMainGrad(torch.autograd.Function):
    """A linear layer that treats its weight's gradient as Transformer Engine's does with fused accumulation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        weight.main_grad.add_((gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)  # never read


def inspected_case(checkpoint: Path, layout: str) -> dict[str, Any]:
    """See `inspect_update`."""
    with engine_of(checkpoint, layout) as engine:
        return inspect_update(engine, state)


def inspect_update(engine: Any, state: Callable[[Any], dict[str, torch.Tensor]]) -> dict[str, Any]:
    """An `inspect` that compares what it sees with `forward`, and one that stops the update."""
    from mega_rl.errors import RunError

    rows = own_rows(random_experience(), engine)
    expected, before = engine.forward(rows, with_entropy=True), state(engine)
    assert engine.forward(rows).entropy is None, "nobody has asked for the entropy"
    seen: list[float] = []

    def stop(minibatch: Any, outputs: Any) -> dict[str, float]:
        seen.append(float((outputs.logprobs - expected.logprobs).abs().max()))
        seen.append(float((outputs.entropy - expected.entropy).abs().max()))
        raise RunError("stopped")

    message = ""
    try:
        engine.train_minibatch(rows, losses("lm"), lr=1e-2, inspect=stop)
    except RunError as error:
        message = str(error)
    result = {"message": message, "seen": seen, "unchanged": same(state(engine), before)}
    metrics = engine.train_minibatch(rows, losses("lm"), lr=1e-2, inspect=lambda *_: {"a/b": 3.0})
    return result | {"metric": metrics["a/b"], "moved": not same(state(engine), before)}
