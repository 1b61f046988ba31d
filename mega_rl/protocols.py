"""What the parts of a run must do for each other. The trainer knows these and `mega_rl.types`, nothing below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from mega_rl.types import EngineState, Experience, Metrics, Prompt, Rollout, TokenOutputs

Batch = TypeVar("Batch", Rollout, Experience)
Samples = TypeVar("Samples")  # what an engine keeps of a generation under way


class Ranks(Protocol):
    """A group of ranks, seen from one of them. A single process is a group of size 1 in which nothing moves."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over the group, as a new tensor."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the group, as a new tensor."""
        ...

    def gather_rows(self, rows: Batch) -> Batch:
        """All ranks' rows in rank order, padded to the group's largest S."""
        ...

    def exchange_rows(self, rows: Batch, destinations: Tensor) -> Batch:
        """Send row i to rank `destinations[i]` ([B] int64); returns the rows received, in source-rank order."""
        ...

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """The tensor of group rank `source` on every rank (shapes and dtypes agree beforehand)."""
        ...


@dataclass
class LossOutput:
    """A loss over the tokens of one micro-batch and what to report of it.

    `loss` and `sums` are shares of the global value: adding them over micro-batches and data-parallel ranks gives the
    mini-batch's number, because every token carries its weight in the global mean.
    """

    loss: Tensor  # scalar float32
    sums: dict[str, Tensor] = field(default_factory=dict)  # scalars, added over micro-batches and ranks
    maxima: dict[str, Tensor] = field(default_factory=dict)  # scalars, maximum over micro-batches and ranks


# (outputs of the model on a micro-batch, the batch's per-token fields in the same shape) -> loss
TokenLoss = Callable[[TokenOutputs, Mapping[str, Tensor]], LossOutput]


# (a mini-batch, what the model said of its tokens) -> metrics; raises to stop an update before any weight changes
Inspect = Callable[[Experience, TokenOutputs], Metrics]


class Engine(Protocol):
    """One model with its gradients and optimizer state, spread over the ranks of a layout."""

    @property
    def data_parallel(self) -> Ranks:
        """Replicas of this model."""
        ...

    @property
    def replica(self) -> Ranks:
        """The ranks that together hold one copy of this model."""
        ...

    def forward(self, batch: Rollout | Experience) -> TokenOutputs:
        """Log-probs and entropy, or values, of every response token; equal on all ranks of the replica."""
        ...

    def train_minibatch(
        self, minibatch: Experience, loss: TokenLoss, *, lr: float, inspect: Inspect | None = None
    ) -> Metrics:
        """One optimizer step on this rank's share of a global mini-batch; `inspect` sees the forward first."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, the same on all ranks of the replica; collective."""
        ...

    def state(self) -> EngineState:
        """This rank's pieces of weights and optimizer state, views of live memory; collective.

        Names are the engine's own: "weights/decoder.layers.3...". Optimizer state is there from the start, as zeros.
        """
        ...

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        """Go on from what was written into the pieces of `state`, with the numbers that were saved; collective."""
        ...

    def offload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> int:
        """Give back the memory of parameters, gradients and optimizer state; returns the bytes."""
        ...

    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Undo `offload` of these parts."""
        ...


class RolloutEngine(Protocol):
    """Generates with the weights last published to it."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Rollout:
        """n samples of each prompt, rows ordered by prompt then sample, on the host.

        A sample depends on the weights, its prompt and (seed, prompt_index, sample number) and on nothing else, so it
        does not matter which rank generates it nor in which batch.
        """
        ...

    def metrics(self) -> Metrics:
        """Numbers of the generations since the last call, equal on all ranks; empty where there are none to tell."""
        ...


class BackgroundEngine(RolloutEngine, Protocol[Samples]):
    """A rollout engine that can generate beside training: what `generate` does, in two parts."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Samples:
        """What this rank has to generate; may run on another thread, for it does no collective."""
        ...

    def collect(self, samples: Samples) -> Rollout:
        """The rows, complete; collective over all ranks."""
        ...


class EmbeddedEngine(RolloutEngine, Protocol):
    """A rollout engine in the trainer's own process, with weights of its own."""

    def load_weights(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the named weights (full tensors, Hugging Face names and shapes)."""
        ...

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Return the checksum of each named weight (`mega_rl.rollout.embedded.weight_sync.checksum`)."""
        ...

    def finish_update(self, version: int) -> None:
        """All buckets have been loaded: every later rollout carries this version."""
        ...


class WeightSync(Protocol):
    """Sends the policy's weights to the rollout engine."""

    @property
    def weight_version(self) -> int:
        """Version of the weights last published; 0 before the first time."""
        ...

    def resume_at(self, version: int) -> None:
        """Go on numbering after a resume: the next publish stamps `version`."""
        ...

    def publish(self) -> Metrics:
        """Send every weight, verify when due, raise the version."""
        ...


class RolloutSource(Protocol):
    """Rollout role: prompts in, responses out."""

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False) -> Rollout:
        """This replica's rows: n samples of each of its prompts, one when greedy."""
        ...

    def metrics(self) -> Metrics:
        """Numbers of the generations since the last call, equal on all ranks."""
        ...


class BackgroundRollouts(Protocol):
    """Generation of a step's samples while the trainer does something else; one step at a time, the same on all ranks.

    Only `finish`, `drain` and `interrupt` may do collectives: what goes on in between runs beside the trainer's own.
    """

    def start(self, prompts: Sequence[Prompt], *, step: int) -> None:
        """Begin, with the weights that the engine holds now; returns at once."""
        ...

    def finish(self) -> Rollout:
        """Wait for what `start` began; this replica's rows. Raises what went wrong since, on all ranks; collective."""
        ...

    def drain(self) -> None:
        """Wait until no rank has a request in flight; what went wrong is left for `finish`; collective."""
        ...

    def interrupt(self) -> None:
        """Break off every request in flight, keeping the tokens that came; collective."""
        ...

    def resume(self) -> None:
        """Go on with what `interrupt` broke off, with the weights of now."""
        ...

    def close(self) -> None:
        """Give up what is going on, at the end of the run; no collective, never blocks, may be called twice."""
        ...


class ServerMemory(Protocol):
    """The device memory of the servers that share the trainer's devices, in tags: "weights" and "kv_cache".

    Collective over all ranks: when a call returns on any rank, every server has done it. Servers are idle when it is
    called. A server that has been started anew holds everything; such a difference is the implementation's to settle.
    """

    def release(self, tags: Sequence[str]) -> None:
        """Give this memory back; the weights in it are lost."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Take this memory again; what it holds is undefined."""
        ...


class Scorer(Protocol):
    """Reward role: responses in, scores out."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32, the reward of each row."""
        ...


class TokenModel(Protocol):
    """A frozen or learning model that speaks of tokens (actor, reference, critic)."""

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs: ...


class Learner(TokenModel, Protocol):
    """Trained role: the actor or the critic."""

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics: ...


class RankState(Protocol):
    """Something of each rank's own that a checkpoint keeps: random numbers, rollouts under way."""

    def state(self) -> dict[str, Tensor]:
        """Tensors of any shape by name; collective."""
        ...

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Take back what `state` gave on this rank; None when the layout has changed since; collective."""
        ...


class CheckpointStore(Protocol):
    """Saves everything a run needs to go on. All methods are collective."""

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Metrics | None = None) -> None:
        """Begin to write models, optimizers and `state` (JSON) after `step` steps; done when it returns unless async.

        `metrics`: of the step, from which the best checkpoint is known.
        """
        ...

    def poll(self) -> Metrics:
        """What has become of saves since the last call; raises what one failed with where that ends the run."""
        ...

    def finish(self) -> None:
        """Wait for the save under way, within its deadline; raises like `poll`."""
        ...


class MetricsSink(Protocol):
    """Receiver of a run's metrics and sampled rollouts."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """Finish what is written; `failed` where an error ends the run."""
        ...
