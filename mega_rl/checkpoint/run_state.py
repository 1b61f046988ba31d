"""State of a run that its checkpoints hold, as one rank collects it, and its record in the manifest."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mega_rl import __version__
from mega_rl.parallel.boxes import whole
from mega_rl.protocols import Ranks, RankState, StatefulModel
from mega_rl.types import JsonObject, Metrics, Piece

Numbers = dict[str, dict[str, int | float]]
ORDER = "order"  # state of the order of prompts, next to the engines; optional in run and checkpoint


@dataclass(frozen=True)
class RunState:
    """Engines, states of ranks and identity of a run."""

    engines: dict[str, StatefulModel]  # "actor", "critic", ORDER
    rank_states: dict[str, RankState]
    ranks: Ranks  # all ranks of the run
    identity: JsonObject  # must agree for a resume to make sense: seed, data fingerprint, model
    layout: str  # rank states are restored only under the same layout
    config: JsonObject  # resolved config

    def restorable(self, numbers: Mapping[str, object]) -> dict[str, StatefulModel]:
        """Return the engines that a checkpoint with these numbers fills: all except an order that it does not have."""
        return {name: engine for name, engine in self.engines.items() if name != ORDER or name in numbers}

    def mismatched(self, numbers: Mapping[str, object]) -> tuple[list[str], list[str]]:
        """Return (engines that a checkpoint with these numbers lacks, those that this run lacks)."""
        missing = [name for name in self.engines if name not in numbers and name != ORDER]
        return missing, [name for name in numbers if name not in self.engines and name != ORDER]

    def collect(self) -> tuple[list[Piece], Numbers]:
        """Return the pieces that this rank writes, and the engines' numbers; collective."""
        pieces: list[Piece] = []
        numbers: Numbers = {}
        for name, engine in self.engines.items():
            state = engine.state()
            numbers[name] = dict(state.numbers)
            pieces += [replace(piece, name=f"{name}/{piece.name}") for piece in state.pieces if piece.owned]
        for name, rank_state in self.rank_states.items():
            for key, tensor in rank_state.state().items():
                shape = tuple(tensor.shape)
                full_name = f"{rank_prefix(self.ranks.rank, name)}{key}"
                pieces.append(Piece(full_name, shape, whole(shape), tensor, owned=True))
        return pieces, numbers

    def record(self, step: int, state: JsonObject, metrics: Metrics, numbers: Numbers) -> dict[str, Any]:
        """Return the fields of the manifest except date, tensors and shards."""
        return {
            "step": step,
            "identity": dict(self.identity),
            "state": dict(state),
            "numbers": numbers,
            "world_size": self.ranks.size,
            "layout": self.layout,
            "config": dict(self.config),
            "versions": dict(_versions()),
            "metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        }


def rank_prefix(rank: int, name: str) -> str:
    """Return the prefix of the names of a rank state's tensors."""
    return f"rank{rank:05d}/{name}/"


@cache
def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    return {"mega_rl": __version__, **packages, "python": platform.python_version()}
