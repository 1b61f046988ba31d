"""What each rank does in the tests of the FSDP engine's checkpoints: one launch saves, later ones load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mega_rl.config.schema import OptimConfig
from mega_rl.config.schema.engine import FsdpConfig
from tests.helpers.engines import exported, load_state, make_config, own_rows, running_engine, save_state
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses

MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A model of the FSDP engine on the ranks of a launch, and whose checkpoint it loads, if any."""

    model: str
    source: str = ""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    dtype: str = "fp32"
    frozen: tuple[str, ...] = ()

    @contextmanager
    def engine(self, root: Path) -> Iterator[Any]:
        """A fresh engine of this case."""
        # A large eps keeps Adam from making a step of a whole learning rate of a gradient that is rounding.
        optim = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
        config = make_config(root / self.model, dtype=self.dtype, optim=optim, engine="fsdp", fsdp=self.fsdp)
        config = replace(config, model=replace(config.model, frozen=list(self.frozen)))
        with running_engine(config, head=self.head) as engine:
            yield engine

    @property
    def head(self) -> str:
        """Of the model."""
        return "value" if self.model == "critic" else "lm"


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Weights and moments, whole, by transformers' names, as torch gathers them; collective."""
    actual = dict(engine.model.named_parameters())
    tensors = {f"weights {name}": parameter for name, parameter in actual.items()}
    for name, parameter in actual.items():
        state = engine.optimizer.state.get(parameter, {})
        tensors |= {f"{moment} {name}": state[moment] for moment in MOMENTS if state}
    return {name: _gathered(tensor) for name, tensor in tensors.items()}


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor().cpu().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def counters(engine: Any) -> list[float]:
    """Adam's numbers of steps, each once."""
    return sorted({float(state["step"]) for state in engine.optimizer.state.values()})


def train(engine: Any, *, steps: int = 1) -> float:
    """Optimizer steps; the gradient norm of the last."""
    rows = own_rows(random_experience(), engine)
    norms = [engine.train_minibatch(rows, losses(engine.sharding.head), lr=1e-2)["grad_norm"] for _ in range(steps)]
    return norms[-1]


def save_all(rank: int, root: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Every case trains and is saved; what it held, and what the next step makes of it."""
    actual = {}
    for name, case in cases.items():
        with case.engine(Path(root)) as engine:
            train(engine, steps=STEPS)
            held = whole_state(engine)
            save_state(engine, Path(root) / "saved" / name)
            actual[name] = {"held": held, "exported": exported(engine), **next_step(engine)}
    return actual


def load_all(rank: int, root: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Every case loads over other numbers and goes on."""
    actual = {}
    for name, case in cases.items():
        with case.engine(Path(root)) as engine:
            spoil(engine)
            load_state(engine, Path(root) / "saved" / case.source)
            held = whole_state(engine)
            steps = counters(engine)
            actual[name] = {"held": held, "exported": exported(engine), "steps": steps, **next_step(engine)}
    return actual


def next_step(engine: Any) -> dict[str, Any]:
    """Norm, counters and state after one step more."""
    return {"norm": train(engine), "next steps": counters(engine), "after": whole_state(engine)}


def spoil(engine: Any) -> None:
    """Sevens everywhere, so that whatever is not loaded shows."""
    tensors = list(engine.model.parameters())
    tensors += [tensor for state in engine.optimizer.state.values() for tensor in state.values()]
    with torch.no_grad():
        for tensor in tensors:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7.0)
