"""Tenants of one engine: adapters with their optimizer state, at work in turn.

A tenant's weights are those that it gets when it trains alone, bit for bit: a step on a model with adapters reads the
frozen base, and reads and writes the state that is exchanged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from mega_rl.converters.plan.adapters import PART
from mega_rl.parallel.boxes import EngineState, Piece
from mega_rl.protocols import Engine


@dataclass(frozen=True)
class _Kept:
    """State of a tenant that is not at work: copies of its pieces, in their order."""

    tensors: list[Tensor]
    numbers: dict[str, int | float]


@dataclass
class Tenants:
    """Tenants of an engine with adapters, by name; a new one begins as it began."""

    engine: Engine
    at_work: str = field(default="", init=False)  # the tenant whose state the engine has; "" before the first
    _first: _Kept = field(init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        state = self.engine.state()
        self._first = _Kept([piece.data.clone() for piece in _own(state)], dict(state.numbers))

    def select(self, name: str) -> None:
        """Put a tenant to work; its state is that of its last turn; collective."""
        if name == self.at_work:
            return
        state = self.engine.state()
        pieces = list(_own(state))
        if self.at_work:
            self._kept[self.at_work] = _Kept([piece.data.clone() for piece in pieces], dict(state.numbers))
        coming = self._kept.pop(name, self._first)
        for piece, tensor in zip(pieces, coming.tensors, strict=True):
            piece.data.copy_(tensor)
        self.engine.resume_from(coming.numbers)
        self.at_work = name

    def remove(self, name: str) -> None:
        """Forget the state of a tenant that is not at work."""
        assert name != self.at_work, f"{name} is at work"
        self._kept.pop(name, None)


def _own(state: EngineState) -> Iterator[Piece]:
    """Yield the pieces of adapters: their weights, main parameters and moments."""
    return (piece for piece in state.pieces if PART in piece.name)
