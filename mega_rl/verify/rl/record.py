"""Record a real run from outside: wrap its source, scorer, batches and learners; collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.fsdp import FSDPEngine
from mega_rl.engines.megatron import MegatronEngine
from mega_rl.operations.diagnosis import investigate
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.protocols import Inspect, Ranks, RolloutSource
from mega_rl.trainer import Trainer
from mega_rl.trainer.assemble import running
from mega_rl.trainer.collect import Batch, Collector
from mega_rl.trainer.policy_gradient import PolicyGradient
from mega_rl.trainer.rows import Samples, gather_column
from mega_rl.trainer.selection import Pool
from mega_rl.types import Draws, Experience, Metrics, Prompt, Rewards, Rollout, TokenOutputs
from mega_rl.verify.measure import exported_gradients, kept
from mega_rl.verify.rl.independent.records import Figures
from mega_rl.verify.rl.inputs import reward_of
from mega_rl.verify.rl.trace import DRAWN, GREEDY, PART, ROWS, by_sample, shift, write_rows, write_update
from mega_rl.workers.models import LearningWorker, PolicyLoss


def run_task(arguments: Sequence[tuple[Mapping[str, object], str]], accelerator: Accelerator) -> None:
    """Record runs, each by its settings and folder."""
    for settings, folder in arguments:
        record(with_settings(Config(), settings), Path(folder), accelerator)


def record(config: Config, folder: Path, accelerator: Accelerator) -> None:
    """Run the trainer of a config to its end; rank 0 writes the trace. Collective."""
    reward = reward_of(config) if config.reward.source.name == "function" else None
    with running([config], accelerator, investigate, rewards=[reward]) as ((trainer,), _):
        instrument(trainer, folder)
        trainer.fit()


def instrument(trainer: Trainer, folder: Path) -> None:
    """Wrap the trainer's parts by recorders."""
    batches, algorithm = trainer.batches, trainer.algorithm
    assert isinstance(batches, Collector)
    assert isinstance(algorithm, PolicyGradient)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    recorder = Recorder(folder, batches, is_writer=is_first)
    batches.source, batches.watch = GreedyRollouts(batches.source, recorder), partial(shifted, batches.watch)
    if batches.stock is not None:
        batches.stock.pool = RecordedPool(recorder=recorder)
    actor = algorithm.actor
    assert isinstance(actor, LearningWorker)
    names = ["advantages"] if actor.lessons is None else []  # a divergence from a teacher reads none
    loss = actor.loss
    if not (isinstance(loss, PolicyLoss) and loss.on_policy):  # then an update has them from its own forward
        names.append("old_logprobs")
    if algorithm.reference is not None:
        names.append("ref_logprobs")
    algorithm.actor = RecordedLearner(actor, recorder, "actor", tuple(names))
    if algorithm.critic is not None:
        assert isinstance(algorithm.critic, LearningWorker)
        algorithm.critic = RecordedLearner(algorithm.critic, recorder, "critic", ("values", "returns"))
    trainer.batches = recorder


@dataclass
class Recorder:
    """Batch source that records the samples that train, of all data-parallel replicas; rank 0 writes."""

    folder: Path
    batches: Collector
    is_writer: bool
    step: int = field(default=0, init=False)
    generation: int = field(default=0, init=False)  # times that groups came in the step so far

    @property
    def ranks(self) -> Ranks:
        """Return the data-parallel replicas."""
        return self.batches.ranks

    def take(self, step: int) -> Batch:
        batch = self.batches.take(step)
        self.write(batch.samples.rollout, batch.samples.rewards)
        self.step, self.generation = self.step + 1, 0
        return batch

    def write(self, rollout: Rollout, rewards: Rewards, *, kind: str = "") -> None:
        """Write samples of the present step with their rewards; collective. kind: as in `write_rows`."""
        columns, rows = gather_column(rewards.columns().double(), self.ranks), self.ranks.gather_rows(rollout)
        known = ((name, getattr(rows, name)) for name in ROWS if name != "rewards")
        fields: dict[str, Tensor] = {name: column for name, column in known if column is not None}
        if rewards.scored:
            parts = () if rewards.parts is None else rewards.parts.names
            fields |= dict(zip(["rewards", *(PART + name for name in parts)], columns.unbind(dim=1), strict=True))
        if self.is_writer:
            write_rows(self.folder, self.step, fields, kind=kind)


def shifted(watch: Callable[[Rollout], None], rollout: Rollout) -> None:
    """Move log-probs of samples that train by a known pattern, as another engine's are.

    Importance sampling then has something to correct, and a trainer that takes them for its own is wrong.
    """
    own = shift(rollout.tokens, rollout.sample_index) * rollout.loss_mask
    rollout.rollout_logprobs = rollout.rollout_logprobs + own
    watch(rollout)


@dataclass(frozen=True)
class GreedyRollouts:
    """Rollout source that records greedy responses, which no step trains on, with their rewards."""

    source: RolloutSource
    recorder: Recorder

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        rollout = self.source.generate(prompts, step=step, greedy=greedy, draws=draws)
        if greedy:
            self.recorder.write(rollout, self.recorder.batches.rewards.score(rollout, prompts), kind=GREEDY)
        return rollout

    def metrics(self) -> Metrics:
        return self.source.metrics()


@dataclass
class RecordedPool(Pool):
    """Pool that records the groups that come, numbered by their tickets."""

    recorder: Recorder = field(kw_only=True)

    def add(self, samples: Samples, oldest: Sequence[int], usable: Tensor, means: Tensor, *, count: int) -> None:
        rows = replace(samples.rollout, prompt_index=samples.tickets[samples.rollout.prompt_index])
        self.recorder.write(rows, samples.rewards, kind=f"{DRAWN}{self.recorder.generation}")
        self.recorder.generation += 1
        super().add(samples, oldest, usable, means, count=count)


@dataclass
class RecordedLearner:
    """Role that records each of its updates: figures of tokens, clipped gradients, weights."""

    learner: LearningWorker
    recorder: Recorder
    role: str
    names: tuple[str, ...]  # recorded fields of an experience
    _place: tuple[int, int] = field(default=(-1, 0), init=False)  # step, mini-batch

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        return self.learner.evaluate(batch)

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        metrics = self.learner.update(minibatch, step=step, inspect=inspect)
        if metrics:  # a role that is absent, or does not train yet, has none
            self._place = (step, self._place[1] + 1 if self._place[0] == step else 0)
            rows = self.recorder.ranks.gather_rows(minibatch)
            order = by_sample(rows.prompt_index, rows.sample_index)
            mask = rows.loss_mask[order]
            engine = self.learner.engine
            assert isinstance(engine, MegatronEngine | FSDPEngine)
            gather_gradients(engine)
            figures = Figures(
                self.role,
                *self._place,
                tokens={name: getattr(rows, name)[order][mask].double() for name in self.names},
                loss=metrics.get(f"{self.role}/loss", 0.0),  # 0 of a mini-batch without tokens
                loss_scale=0.0,
                grad_norm=metrics.get(f"{self.role}/grad_norm", 0.0),
                gradients={name: kept(gradient) for name, gradient in exported_gradients(engine)},
                weights={name: kept(weight) for name, weight in engine.export_weights()},
            )
            if self.recorder.is_writer:
                write_update(self.recorder.folder, figures, rows.prompt_index.unique().tolist())
        return metrics


def gather_gradients(engine: ModelEngine) -> None:
    """Make the gradients whole on every rank where a distributed optimizer leaves each its share; collective."""
    for chunk in engine.chunks if isinstance(engine, MegatronEngine) else []:
        if not (isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer):
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
