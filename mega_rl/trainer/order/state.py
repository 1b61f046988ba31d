"""State of the order of prompts in a checkpoint: its numbers and success rates, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mega_rl.data.sampling.epochs import StepOrder
from mega_rl.data.sampling.success import SuccessRates
from mega_rl.parallel.boxes import whole
from mega_rl.protocols import Ranks
from mega_rl.types import EngineState, Piece


@dataclass(frozen=True)
class OrderState:
    """`protocols.StatefulModel` of an order: rank 0 writes its success rates, and every rank reads them."""

    steps: StepOrder
    rates: SuccessRates | None
    ranks: Ranks  # all

    def state(self) -> EngineState:
        columns = {} if self.rates is None else {"right": self.rates.right, "samples": self.rates.samples}
        pieces = [
            Piece(name, column.shape, whole(column.shape), torch.from_numpy(column), owned=self.ranks.rank == 0)
            for name, column in columns.items()
        ]
        return EngineState(pieces, dict(self.steps.numbers()))

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.steps.restore({name: int(number) for name, number in numbers.items()})
