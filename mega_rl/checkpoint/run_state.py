"""State of a run in checkpoints: engines, random states, the manifest's record."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_rl import __version__
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import Piece, whole
from mega_rl.parallel.groups import random_tracker
from mega_rl.protocols import Ranks, RankState, StatefulModel
from mega_rl.types import JsonObject, Metrics

TRACKED = "tracked/"  # prefix of the names of Megatron-Core's states


def seed_python(seed: int, rank: int) -> None:
    """Seed Python's `random` and NumPy's, which a user's code may draw from, differently on each rank."""
    random.seed(f"{seed}/{rank}")
    np.random.seed([seed, rank])


class RandomState:
    """`protocols.RankState` of the generators of torch, Megatron-Core, Python's `random` and NumPy."""

    def state(self) -> dict[str, Tensor]:
        """Return the random states by name, each [bytes] uint8."""
        tensors = {
            "torch": torch.get_rng_state(),
            "python": _encoded(random.getstate()),
            "numpy": _encoded(np.random.get_state(legacy=False)),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        for name, state in random_tracker().get_states().items():
            tensor = state.get_state() if isinstance(state, torch.Generator) else state
            tensors[TRACKED + name] = tensor.cpu().clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Set the random states; None keeps those that the run's seed has set.

        Raises UserError: the states are of other generators than this run has.
        """
        if tensors is None:
            return
        expected, stored = self.state().keys(), tensors.keys()
        if expected != stored:
            raise UserError(
                f"random states of the checkpoint: {', '.join(sorted(expected ^ stored))} on one side only; resume on "
                "the same kind of device, or on another layout, where random numbers start afresh"
            )
        torch.set_rng_state(tensors["torch"])
        version, words, gauss = _decoded(tensors["python"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(_decoded(tensors["numpy"]))
        if "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"])
        tracked = dict(random_tracker().get_states())
        for name, now in tracked.items():
            state = tensors[TRACKED + name].clone()
            tracked[name] = now.set_state(state) if isinstance(now, torch.Generator) else state
        random_tracker().set_states(tracked)


def _encoded(value: Any) -> Tensor:
    """Return the value's JSON as [bytes] uint8; floats round-trip to the bit."""
    return torch.frombuffer(bytearray(json.dumps(value, default=_plain).encode()), dtype=torch.uint8)


def _decoded(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray | np.generic), type(value)
    return value.tolist()


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
        """Return the engines that a checkpoint with these numbers fills, maybe without an order."""
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
