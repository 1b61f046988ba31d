"""Tenants of one engine: runs with own adapters and optimizer state, at work in turn.

A tenant's weights are those that it gets when it trains alone, bit for bit: a step on a model with adapters reads the
frozen base, and reads and writes the state that is exchanged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from mega_rl.checkpoint.run_state import RandomState
from mega_rl.converters.plan.adapters import PART
from mega_rl.engines.base import EngineSettings, ModelEngine
from mega_rl.engines.build import adopt
from mega_rl.parallel.boxes import EngineState, Piece
from mega_rl.protocols import WeightSync
from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine
from mega_rl.workers.stream import RolloutStream


@dataclass(frozen=True)
class _Kept:
    """State of a tenant that is not at work: copies of its pieces, in their order."""

    tensors: list[Tensor]
    numbers: dict[str, int | float]
    random: dict[str, Tensor]

    @classmethod
    def of(cls, state: EngineState) -> _Kept:
        return cls([piece.data.clone() for piece in _own(state)], dict(state.numbers), RandomState().state())


@dataclass
class Tenants:
    """Tenants of an engine with adapters, by name; a new one begins as it began."""

    engine: ModelEngine
    at_work: str = field(default="", init=False)  # the tenant whose state the engine has; "" before the first
    _first: _Kept = field(init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._first = _Kept.of(self.engine.state())

    def select(self, name: str) -> bool:
        """Put a tenant to work, as its last turn left it; return whether another was; collective."""
        if name == self.at_work:
            return False
        state = self.engine.state()
        if self.at_work:
            self._kept[self.at_work] = _Kept.of(state)
        coming = self._kept.pop(name, self._first)
        for piece, tensor in zip(_own(state), coming.tensors, strict=True):
            piece.data.copy_(tensor)
        self.engine.resume_from(coming.numbers)
        RandomState().restore(coming.random)
        self.at_work = name
        return True


def _own(state: EngineState) -> Iterator[Piece]:
    """Yield the pieces of adapters: their weights, main parameters and moments."""
    return (piece for piece in state.pieces if PART in piece.name)


@dataclass
class Base:
    """The models that runs have in common: the policy's engine, and the embedded one that samples."""

    tenants: Tenants | None = None  # None before the first run has built the engine
    sampler: HFRolloutEngine | None = None
    sampling: WeightSync | None = None  # the sync whose weights the sampler has

    def actor(self, build: Callable[[], ModelEngine], name: str) -> ModelEngine:
        """Return the engine with a run at work, which the first run builds; collective."""
        self.tenants = self.tenants or Tenants(build())
        self.tenants.select(name)
        return self.tenants.engine

    def take_turn(self, name: str, settings: EngineSettings, sync: WeightSync) -> None:
        """Put a run to work, with its settings and its weights in the sampler; collective."""
        if self.tenants is not None and self.tenants.select(name):
            adopt(self.tenants.engine, settings)
        sync = sync.sync if isinstance(sync, RolloutStream) else sync
        if isinstance(sync, EmbeddedWeightSync) and self.sampling is not sync:
            sync.resend()
            self.sampling = sync
