"""Interfaces between the parts of a run. The trainer knows these and `mega_rl.types`, nothing below."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from mega_rl.types import Arrived, Draw, Draws, Experience, Lesson, Metrics, Prompt, Rewards, Rollout, TokenOutputs
from mega_rl.types import LossOutput as LossOutput

if TYPE_CHECKING:
    from mega_rl.algorithms.statistics import Sequences
    from mega_rl.parallel.boxes import EngineState

Batch = TypeVar("Batch", Rollout, Experience)
PARTS = ("parameters", "gradients", "optimizer")  # of a model's memory, which leave the device one by one


class Ranks(Protocol):
    """A group of ranks, seen from one of them; a single process is one, too."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the group, as a new tensor."""

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the group, as a new tensor."""

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, as JSON carries it, in rank order."""

    def gather_rows(self, rows: Batch) -> Batch:
        """Return all ranks' rows in rank order, padded to the group's largest S."""

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """Send row i to rank `destinations[i]` ([B] int64); returns the rows received, in source-rank order."""

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return the tensor of group rank `source` on every rank (shapes and dtypes agree beforehand)."""


class TokenLoss(Protocol):
    """A loss from a micro-batch's outputs and per-token fields of one shape.

    `sequences` sums over whole sequences; collective over the ranks that share them.
    """

    @property
    def needs_entropy(self) -> bool: ...
    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences, /) -> LossOutput: ...


# (a mini-batch, the model's outputs on its tokens) -> metrics; raises to stop an update before any weight changes
Inspect = Callable[[Experience, TokenOutputs], Metrics]


class StatefulModel(Protocol):
    """A model whose state a checkpoint keeps."""

    def state(self) -> EngineState:
        """Return this rank's pieces of weights and optimizer state, views of live memory, and counters; collective."""

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        """Go on from the bytes written into the pieces of `state`, and the saved numbers; collective."""


class Teacher(Protocol):
    """A model whose distributions over the whole vocabulary another one learns."""

    def teach(self, minibatch: Experience) -> Lesson: ...


class ModelPasses(Teacher, Protocol):
    """The computations of a model; all are collective."""

    def forward(self, batch: Rollout | Experience, *, with_entropy: bool = False) -> TokenOutputs:
        """Return [B, S] float32 log-probs (head "lm") or values ("value") of response tokens, on the host."""

    def train_minibatch(
        self, minibatch: Experience, loss: TokenLoss, *,
        lr: float, inspect: Inspect | None = None, lesson: Lesson | None = None,
    ) -> Metrics:  # fmt: skip
        """Make one optimizer step on this rank's rows of a mini-batch; return metrics, equal on ranks.

        The loss is the sum of `loss` over micro-batches and data-parallel ranks; with a `lesson` it gets divergences.
        Without a token that trains there is no step, and `trained_tokens`, 0, is the only metric. Raises
        NonFiniteGradientError on all ranks, before a weight changes.
        """


class Engine(ModelPasses, StatefulModel, Protocol):
    """One model with its gradients and optimizer state, spread over the ranks of a layout."""

    data_parallel: Ranks  # replicas of this model
    replica: Ranks  # the ranks that together hold one copy of this model

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor in training dtype) of every weight, on all ranks; collective."""

    def offload(self, parts: Collection[str] = PARTS) -> int:
        """Give back the memory of these parts; returns the bytes; collective."""

    def onload(self, parts: Collection[str] = PARTS) -> None:
        """Undo `offload` of these parts, bit for bit; gradients are zero then, as before a mini-batch."""

    def is_offloaded(self, part: str) -> bool:
        """Return whether the memory of one of `PARTS` has been given back."""

    def on_host(self, state: EngineState) -> EngineState:
        """Return pieces of an earlier `state` as views of host copies; `onload` brings their changes."""


class Measured(Protocol):
    """A role that measures its work."""

    def metrics(self) -> Metrics:
        """Return metrics since the last call, equal on all ranks."""


class RolloutEngine(Measured, Protocol):
    """Generates with the weights last published to it."""

    def generate(
        self, prompts: Sequence[Prompt], prompt_index: Sequence[int], *,
        n: int, seed: tuple[int, ...], greedy: bool = False, draws: Draws | None = None,
    ) -> Rollout:  # fmt: skip
        """Return n samples of each prompt, rows ordered by prompt then sample, on the host.

        A sample depends only on weights, prompt and (seed, prompt_index, sample number). draws: parameters of an
        evaluation, in place of the engine's own.
        """


class WeightSync(Protocol):
    """Sends the policy's weights to the rollout engine; `weight_version` counts publishes from 1."""

    @property
    def weight_version(self) -> int: ...

    def resume_at(self, version: int) -> None:
        """Continue the count after a resume: the next publish stamps `version`."""

    def publish(self) -> Metrics:
        """Send every weight, verify when due, raise the version; returns metrics."""


class RolloutSource(Measured, Protocol):
    """Rollout role: prompts in, responses out."""

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return this replica's rows: n samples of each prompt, one when greedy, or as `draws`."""


class Flow(Protocol):
    """Generation as a collector sees it: prompts in, complete groups out. All methods are collective."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """Return the tickets of groups in progress, each with the version of its oldest token."""

    def add(self, draw: Draw, prompts: Mapping[int, Prompt]) -> None:
        """Begin the groups of a draw's prompts, by ticket."""

    def arrived(self, *, wait: bool) -> Arrived | None:
        """Return the groups that became complete since the last call, or None; wait: until there is one."""

    def go_on(self) -> None:
        """Continue what is in progress while the step trains."""


class Scorer(Measured, Protocol):
    """Reward role: responses in, scores out."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, with parts of the same names on all ranks."""


class EarlyScorer(Protocol):
    """A reward role that scores a trajectory while others of its generation run; no collective."""

    def begin(self, rollout: Rollout, prompts: Sequence[Prompt]) -> None:
        """Begin to score rows that `score` will get too; returns at once."""

    def forget(self) -> None:
        """Drop what was begun: `score` will not get it."""


class TokenModel(Protocol):
    """Frozen or trained model that returns one value or log-prob per token (actor, reference, critic)."""

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        """Return the outputs for every response token; empty ones from a role that the run lacks."""


class Learner(TokenModel, Protocol):
    """Trained role, actor or critic; an update is one optimizer step, or nothing."""

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics: ...


class RankState(Protocol):
    """State of each rank that a checkpoint keeps, such as a rollout in progress."""

    def state(self) -> dict[str, Tensor]:
        """Return tensors of any shape by name; collective."""

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the tensors of `state` of this rank; None when the layout has changed since; collective."""


class MetricsSink(Protocol):
    """Receiver of a run's metrics and sampled rollouts."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Record sampled rollouts, all with the same keys; `validation`: answers to held-out prompts."""

    def close(self, *, failed: bool = False) -> None:
        """Finish all writes; `failed` where an error ends the run."""
