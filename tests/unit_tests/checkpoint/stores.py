"""A store of runs whose engines are a few small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mega_rl.checkpoint.run_state import RunState
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.config.schema import CheckpointConfig
from mega_rl.config.schema.training import MemoryCheckpointConfig
from mega_rl.parallel.boxes import Box, EngineState, Piece, whole
from mega_rl.parallel.comm import SingleRank


class SmallEngine:
    """One matrix cut by rows over the ranks, one replicated vector of bfloat16, one scalar, and a number."""

    def __init__(self, value: float, *, rank: int = 0, size: int = 1, rows: int = 4) -> None:
        value = float(value)  # else torch makes integers of it
        self.rank, self.size, self.rows = rank, size, rows
        self.matrix = torch.full((rows // size, 3), value) + rank
        self.vector = torch.full((5,), value, dtype=torch.bfloat16)
        self.scalar = torch.tensor(value)
        self.steps = int(value)

    def state(self) -> EngineState:
        count = self.rows // self.size
        box = Box((self.rank * count, 0), (count, 3))
        pieces = [
            Piece("weights/matrix", (self.rows, 3), box, self.matrix, owned=True),
            Piece("weights/vector", (5,), whole((5,)), self.vector, owned=self.rank == 0),
            Piece("exp_avg/scalar", (), whole(()), self.scalar, owned=self.rank == self.size - 1),
        ]
        return EngineState(pieces, {"optimizer_steps": self.steps})

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.steps = int(numbers["optimizer_steps"])

    @property
    def values(self) -> list[float]:
        """What of it a checkpoint holds."""
        return [float(self.matrix[0, 0]) - self.rank, float(self.vector[0]), float(self.scalar), float(self.steps)]


class Kept:
    """A rank state of one tensor; `restored` is what was taken back."""

    def __init__(self, value: int) -> None:
        self.tensors = {"x": torch.tensor([value, 7])}
        self.restored: Any = "nothing"

    def state(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def restore(self, tensors: Mapping[str, torch.Tensor] | None) -> None:
        self.restored = None if tensors is None else {name: tensor.tolist() for name, tensor in tensors.items()}


def settings(*, memory_interval: int = 0, **changes: Any) -> CheckpointConfig:
    memory = MemoryCheckpointConfig(memory_interval)
    return CheckpointConfig(**({"keep": 2, "on_error": "stop", "timeout_s": 30.0, "memory": memory} | changes))


def store(root: Path, *, actor: float = 0, critic: float = 0, **changes: Any) -> RunCheckpoints:
    """A store on one rank; changes are of its arguments, or of the settings."""
    parts: dict[str, Any] = {
        "engines": {"actor": SmallEngine(actor), "critic": SmallEngine(critic)},
        "ranks": SingleRank(),
        "identity": {"seed": 7, "data": "abc"},
        "layout": "tp1-dp1",
        "config": {"trainer": {"steps": 3}},
        "rank_states": {},
    }
    of_settings = {name: changes.pop(name) for name in list(changes) if name not in parts}
    return RunCheckpoints(root, RunState(**(parts | changes)), settings(**of_settings))


def values(actual: RunCheckpoints) -> list[float]:
    """One number of each engine, after a look that all of its state agrees."""
    each = [engine.values for engine in actual.run.engines.values()]  # type: ignore[attr-defined]
    assert all(len(set(of_one)) == 1 for of_one in each), each
    return [of_one[0] for of_one in each]


def names(root: Path) -> list[str]:
    """Of the checkpoints under `root` and whatever else is there, but for the lock and the name of the latest."""
    return sorted(path.name for path in root.iterdir() if path.name not in (".lock", "latest"))


def steps(root: Path) -> list[int]:
    """Of the complete checkpoints."""
    from mega_rl.checkpoint.folders import complete, step_of

    return [step_of(folder) for folder in complete(root)]
