"""The rollout role: shares the step's prompts over all ranks and hands each replica its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from mega_rl.protocols import BackgroundEngine, Ranks, RolloutEngine, Samples
from mega_rl.types import Metrics, Prompt, Rollout


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
        mine = self._own(prompts)
        rows = self.engine.generate(
            [prompts[i] for i in mine],
            list(mine),
            n=1 if greedy else self.n,
            seed=(self.seed, step),
            greedy=greedy,
        )
        return self.replica.gather_rows(rows)

    def metrics(self) -> Metrics:
        """The engine's."""
        return self.engine.metrics()

    def _own(self, prompts: Sequence[Prompt]) -> range:
        """Positions of the prompts that this rank generates for."""
        owned = share(len(prompts), self.data_parallel)
        return owned[share(len(owned), self.replica).start : share(len(owned), self.replica).stop]


@dataclass
class BackgroundRolloutWorker(RolloutWorker, Generic[Samples]):
    """The same in two parts, for generation beside training: `sample` may run on another thread, `collect` not."""

    engine: BackgroundEngine[Samples]

    def sample(self, prompts: Sequence[Prompt], step: int) -> Samples:
        """What this rank generates of the step; no collective."""
        mine = self._own(prompts)
        return self.engine.sample([prompts[i] for i in mine], list(mine), n=self.n, seed=(self.seed, step))

    def collect(self, samples: Samples) -> Rollout:
        """This replica's rows; collective over all ranks."""
        return self.replica.gather_rows(self.engine.collect(samples))
