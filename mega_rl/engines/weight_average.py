"""Frozen weights that follow trained weights: by a copy at intervals, or a moving average.

    reference <- rate * policy + (1 - rate) * reference

Source: Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656: hard updates (rate 1) and soft ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.base import squared_norm
from mega_rl.parallel.boxes import Box, EngineState, Piece, intersection, within
from mega_rl.protocols import Ranks, StatefulModel

WEIGHTS, AVERAGE = "weights/", "average/"  # prefixes of pieces
SLAB = 1 << 24  # elements whose difference is in memory at a time


@dataclass
class WeightAverage:
    """A frozen model whose weights follow a trained one's, with its state for checkpoints.

    Both models have one architecture and one layout, so every rank mixes the parts that it holds and sends nothing.
    The trained model gives the weights that it computes with, not its FP32 main parameters: those are the policy that
    samples, and with the distributed optimizer a rank has main parameters only of its share. A rate below 1 moves
    bf16 weights by less than their rounding, so their average is kept in FP32, in host memory.
    """

    model: StatefulModel
    trained: StatefulModel
    rate: float
    ranks: Ranks  # all of the run
    _averages: dict[tuple[str, Box], Tensor] = field(default_factory=dict, init=False)  # FP32, on the host

    def state(self) -> EngineState:
        state = self.model.state()
        kept = [piece for piece in state.pieces if self._is_kept(piece)]
        averages = [replace(p, name=AVERAGE + p.name.removeprefix(WEIGHTS), data=self._average(p)) for p in kept]
        return EngineState([*state.pieces, *averages], state.numbers)

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.model.resume_from(numbers)

    @torch.no_grad()
    def update(self) -> float:
        """Mix the trained model's weights in; return |trained - model| / |model| of before; collective.

        The norms are over all weights of the run, each once.

        Raises UserError for models of different architectures.
        """
        trained = _by_name(self.trained.state().pieces)
        state = self.model.state()
        squares = torch.zeros(2, dtype=torch.float64)
        for piece in state.pieces:
            mixed = self._average(piece) if self._is_kept(piece) else piece.data
            for own, theirs in _overlaps(piece, mixed, trained.get(piece.name, {})):
                squares += _mix(own, theirs, self.rate) * piece.owned
            if mixed is not piece.data:
                piece.data.copy_(mixed)
        self.model.resume_from(state.numbers)
        difference, own_size = self.ranks.sum(squares).sqrt().tolist()
        return difference / max(own_size, 1e-30)

    def _is_kept(self, piece: Piece) -> bool:
        """Return whether a piece has an FP32 average."""
        return self.rate < 1.0 and piece.data.is_floating_point() and piece.data.dtype != torch.float32

    def _average(self, piece: Piece) -> Tensor:
        """Return the FP32 average of a piece, which begins as the piece itself."""
        key = (piece.name, piece.box)
        if key not in self._averages:
            self._averages[key] = piece.data.to(device="cpu", dtype=torch.float32, copy=True)
        return self._averages[key]


def _by_name(pieces: Sequence[Piece]) -> dict[str, dict[Box, Tensor]]:
    """Return the weights among the pieces by name and box."""
    tensors: dict[str, dict[Box, Tensor]] = {}
    for piece in pieces:
        if piece.name.startswith(WEIGHTS):
            tensors.setdefault(piece.name, {})[piece.box] = piece.data
    return tensors


def _overlaps(piece: Piece, own: Tensor, theirs: Mapping[Box, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (part of `own`, the trained model's part) pairs; raises UserError unless they cover the piece."""
    covered = 0
    for box, data in theirs.items():
        common = intersection(piece.box, box) if len(box.shape) == len(piece.box.shape) else None
        if common is not None:
            covered += data[_slices(box, common)].numel()
            yield own[_slices(piece.box, common)], data[_slices(box, common)]
    if covered != own.numel():
        raise UserError(
            f"algorithm.kl.reference_interval: {piece.name} {list(piece.global_shape)} of the reference has no equal "
            "part in the actor on this rank; the reference can follow an actor of its own architecture and layout"
        )


def _slices(outer: Box, inner: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(*within(outer, inner), strict=True))


def _mix(own: Tensor, theirs: Tensor, rate: float) -> Tensor:
    """Move `own` towards `theirs`; return squared norms [2] float64 of the earlier difference and `own`."""
    squares = torch.zeros(2, dtype=torch.float64)
    rows = max(1, SLAB * len(own) // max(own.numel(), 1)) if own.dim() else 1
    slabs = zip(own.split(rows), theirs.split(rows), strict=True) if own.dim() else [(own, theirs)]
    for mine, other in slabs:
        other = other.to(mine.device)
        before = mine.float()
        difference = other.float() - before
        squares += torch.stack([squared_norm([x]) for x in (difference, before)]).cpu()
        if rate == 1.0 or not mine.is_floating_point():
            mine.copy_(other)
        else:
            mine.add_(difference, alpha=rate)
    return squares
