"""The rollout role: shares the step's prompts over all ranks and hands each replica its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.protocols import Ranks, RolloutEngine
from mega_rl.types import Prompt, Rollout


def share(count: int, ranks: Ranks) -> range:
    """The contiguous part of `count` items that belongs to this rank; parts differ by one item at most."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


@dataclass
class RolloutWorker:
    """Generates with an engine on every rank.

    Data-parallel rank d owns a contiguous part of the prompts; the ranks of its replica share that part and then
    exchange what they generated, so every rank generates and every rank of a replica holds the same rows.
    """

    engine: RolloutEngine
    data_parallel: Ranks
    replica: Ranks
    n: int
    seed: int

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False) -> Rollout:
        """This replica's rows of the step: n samples of each prompt (one when greedy), by prompt, then sample."""
        owned = share(len(prompts), self.data_parallel)
        mine = owned[share(len(owned), self.replica).start : share(len(owned), self.replica).stop]
        rows = self.engine.generate(
            [prompts[i] for i in mine],
            list(mine),
            n=1 if greedy else self.n,
            seed=(self.seed, step),
            greedy=greedy,
        )
        return self.replica.gather_rows(rows)
