"""State of the order of prompts in a checkpoint: success rates, whole on every rank, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mega_rl.data.sampling.success import SuccessRates
from mega_rl.parallel.boxes import whole
from mega_rl.protocols import Ranks
from mega_rl.types import EngineState, Piece


@dataclass(frozen=True)
class RatesState:
    """`protocols.StatefulModel` of success rates: rank 0 writes them, and every rank reads them."""

    rates: SuccessRates
    ranks: Ranks  # all

    def state(self) -> EngineState:
        columns = {"right": self.rates.right, "samples": self.rates.samples}
        return EngineState(
            [
                Piece(name, column.shape, whole(column.shape), torch.from_numpy(column), owned=self.ranks.rank == 0)
                for name, column in columns.items()
            ],
            {},
        )

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        """Do nothing: the bytes of `state` are the rates themselves."""
