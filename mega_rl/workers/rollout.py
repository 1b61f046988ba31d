"""Rollout role: shares the step's prompts over all ranks and returns each replica its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks, RolloutEngine
from mega_rl.rollout.sglang.generation.engine import Sampled, SglangRolloutEngine
from mega_rl.types import Draws, Metrics, Prompt, Rollout

EVALUATION = 0x6576616C  # "eval": third word of the seeds of evaluations


def own_share(count: int, data_parallel: Ranks, replica: Ranks) -> range:
    """Return which of `count` prompts this rank generates for: a share of its replica's."""
    owned = share(count, data_parallel)
    part = share(len(owned), replica)
    return owned[part.start : part.stop]


def evaluation_stream(draws: Draws | None) -> tuple[int, ...]:
    """Return the words after seed and step in seeds of evaluations; none in training."""
    return () if draws is None else (EVALUATION, draws.stream)


@dataclass
class RolloutWorker:
    """Rollout role with an engine on every rank."""

    engine: RolloutEngine
    data_parallel: Ranks
    replica: Ranks
    n: int
    seed: int

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return this replica's rows: n samples of each prompt (greedy: one), by prompt and sample."""
        mine = self._own(prompts)
        own = [prompts[i] for i in mine]
        if draws is not None:
            seed = (self.seed, step, *evaluation_stream(draws))
            places = [draws.first + i for i in mine]
            rows = self.engine.generate(own, places, n=draws.n, seed=seed, draws=draws)
            rows.prompt_index = rows.prompt_index - draws.first
        else:
            n = 1 if greedy else self.n
            rows = self.engine.generate(own, list(mine), n=n, seed=(self.seed, step), greedy=greedy)
        return self.replica.gather_rows(rows)

    def metrics(self) -> Metrics:
        return self.engine.metrics()

    def _own(self, prompts: Sequence[Prompt]) -> range:
        """Return the positions of the prompts that this rank generates for."""
        return own_share(len(prompts), self.data_parallel, self.replica)


@dataclass
class BackgroundRolloutWorker(RolloutWorker):
    """Generation in two parts, for the background: `sample` may run on another thread, `collect` not."""

    engine: SglangRolloutEngine

    def sample(self, prompts: Sequence[Prompt], step: int) -> Sampled:
        """Generate this rank's samples of the step; no collective."""
        mine = self._own(prompts)
        return self.engine.sample([prompts[i] for i in mine], list(mine), n=self.n, seed=(self.seed, step))

    def collect(self, samples: Sampled) -> Rollout:
        """Return this replica's rows; collective over all ranks."""
        return self.replica.gather_rows(self.engine.collect(samples))


@dataclass(frozen=True)
class VocabularyGuard:
    """Check that sampled tokens lie in the smallest vocabulary of the models that read them.

    Vocabularies of one tokenizer are padded to different sizes. An actor hardly ever samples an id without a token,
    but if it does, a smaller embedding would be read beyond its end.
    """

    vocab_size: int
    reader: str  # "reference"
    everyone: Ranks

    def __call__(self, rollout: Rollout) -> None:
        """Raise RunError on all ranks for a token id from `vocab_size` on; collective."""
        largest = int(rollout.tokens.max()) if rollout.tokens.numel() else 0
        failure = None
        if largest >= self.vocab_size:
            failure = RunError(
                f"the actor sampled token id {largest}, and the {self.reader} has a vocabulary of {self.vocab_size}; "
                f"use a {self.reader} whose embedding has as many rows as the actor's"
            )
        raise_together(failure, self.everyone, error=RunError)
