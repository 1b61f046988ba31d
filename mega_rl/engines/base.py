"""The base of engines below the trainer, beyond `mega_rl.protocols.Engine`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.config.needs import Role
from mega_rl.config.schema import EngineConfig, MicrobatchConfig, ModelConfig, OptimConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.live.adapters import merged
from mega_rl.converters.live.export import ModelPlace, export_hf
from mega_rl.converters.live.save import SaveOptions, save_hf
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.data.packing import MicroBatch
from mega_rl.ddp.muon import Muon
from mega_rl.ddp.reduce_scatter import Scratch
from mega_rl.engines.microbatches import Batching, Finished, collect
from mega_rl.engines.models.specs import Attention
from mega_rl.engines.offload import PartsOffload
from mega_rl.parallel.boxes import EngineState
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.divergence import TeacherHead, vocab_parallel_divergence
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.vocab import VocabColumns, hide, vocab_parallel_logprobs_entropy
from mega_rl.protocols import PARTS, Engine, Inspect, TokenLoss
from mega_rl.types import TRAINED_TOKENS, Experience, IdRanges, Lesson, Metrics, Rollout, TokenOutputs


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a run that an engine reads."""

    engine: EngineConfig
    model: ModelConfig
    optim: OptimConfig
    microbatch: MicrobatchConfig
    deterministic: bool
    timeout_s: float  # limit of a collective
    temperature: float  # rollouts', so log-probs' too
    export_bucket_bytes: int
    hidden_tokens: IdRanges = ()  # never sampled by rollouts: probability 0


@dataclass(frozen=True)
class ModelRequest:
    """The model of a role, as an engine is to build it."""

    name: Role
    path: Path  # its Hugging Face checkpoint
    hf: HFConfig  # its config.json
    head: Head
    trainable: bool  # has gradients and an optimizer
    impl: Spec  # layers of Megatron-Core or of Transformer Engine
    attention: Attention
    packs: bool = True  # its sequences do not meet in a packed micro-batch


Exported = Literal["merged", "apart", "adapters"]


@dataclass(kw_only=True)
class ModelEngine(Engine):
    """A model on either backend: how its weights leave, and what is on the host."""

    name: Role  # the model's role
    sharding: Sharding  # the model, and the place of each Hugging Face tensor in `whole_chunks`
    groups: Groups  # the layout's
    batching: Batching  # how rows become micro-batches on this rank
    device: torch.device  # on which the model computes
    attention: str  # "sdpa", or with Transformer Engine "te: flash"
    optimizer: MegatronOptimizer | torch.optim.AdamW | None  # None: a frozen model
    clip_grad: float = 1.0  # limit of the gradient norm; 0: none
    temperature: float = 1.0  # divides logits, so that log-probs and entropies are those of what was sampled
    hidden_tokens: IdRanges = ()  # have probability 0, as in what was sampled
    export_bucket_bytes: int = 256 << 20
    by_muon: bool = False  # Muon steps matrices, and Adam the rest
    muon: Muon | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.data_parallel = ranks_of(self.groups.dp)
        # The next mini-batch begins with gradients of zero.
        self._memory = PartsOffload(PARTS, device=self.device, discarded=("gradients",))
        self._scratches: list[Scratch] = []  # memory that messages arrive in

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Return whether FSDP has spread parameters over data parallelism, so that reading one is collective."""

    @abstractmethod
    def whole_chunks(self) -> list[torch.nn.Module]:
        """Return the chunks with current parameters, whole over data parallelism, for exporters.

        Collective, and so is reading a parameter where `is_sharded`.
        """

    @abstractmethod
    def _learn(
        self, micros: list[MicroBatch], minibatch: Experience, loss: TokenLoss, lesson: Lesson | None
    ) -> tuple[list[Finished], Metrics]:
        """Make the gradients of a mini-batch; return this rank's results and the metrics over all; collective."""

    @abstractmethod
    def _apply_gradients(self, lr: float, metrics: Metrics) -> float:
        """Clip by the global norm and step; return the norm before; collective. metrics: for errors."""

    @abstractmethod
    def _tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """Return this rank's tensors of each of `PARTS`, in the order that awards shared memory; collective."""

    def _combine(self, full: Tensor) -> Tensor:
        """Return the replica's outputs from those of this rank, [n, B, S] both; collective."""
        return full

    def _collect(self, results: Sequence[Finished], batch: Rollout | Experience, *, with_entropy: bool) -> TokenOutputs:
        head = self.sharding.head
        return collect(results, batch, head=head, with_entropy=with_entropy, combine=self._combine)

    def train_minibatch(
        self,
        minibatch: Experience,
        loss: TokenLoss,
        *,
        lr: float,
        inspect: Inspect | None = None,
        lesson: Lesson | None = None,
    ) -> Metrics:
        assert self.optimizer is not None, f"engine {self.name} is frozen"
        micros = self.batching.split(minibatch, data_parallel=self.data_parallel)
        if lesson is not None and lesson.hidden:
            micros = [replace(micro, hidden=hidden) for micro, hidden in zip(micros, lesson.hidden, strict=True)]
        self._memory.changed()
        results, metrics = self._learn(micros, minibatch, loss, lesson)
        if not metrics[TRAINED_TOKENS]:
            return {TRAINED_TOKENS: 0.0}
        if inspect is not None:
            metrics |= inspect(minibatch, self._collect(results, minibatch, with_entropy=loss.needs_entropy))
        metrics["grad_norm"] = metrics["grad_norm_max"] = self._apply_gradients(lr, metrics)
        if self.clip_grad > 0.0:
            metrics["grad_clipped_fraction"] = float(metrics["grad_norm"] > self.clip_grad)
        metrics["lr"] = lr
        metrics["num_microbatches"] = float(len(micros))
        return metrics

    @property
    def export_dtype(self) -> torch.dtype | None:
        """Return the dtype in which weights leave; None: that of the parameters."""
        return None

    @property
    def place(self) -> ModelPlace:
        """Return this rank's part of `whole_chunks`, as exporters take it."""
        return ModelPlace.of(
            self.sharding, self.groups, is_sharded=self.is_sharded, bucket_bytes=self.export_bucket_bytes
        )

    def export_weights(self, what: Exported = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with their adapters in them, next to their adapters, or only adapters; collective."""
        weights = export_hf(self.whole_chunks(), self.place, dtype=self.export_dtype, only_adapters=what == "adapters")
        return merged(weights, self.sharding.hf.adapter) if what == "merged" else weights

    def save_hf(self, directory: Path, *, source: Path) -> list[float]:
        """Write the weights as a Hugging Face checkpoint with config and tokenizer of `source`; collective.

        One that is there is replaced as a whole. Returns and raises as `converters.live.save.save_hf`.
        """
        options = SaveOptions(dtype=self.export_dtype, overwrite=True)
        return save_hf(self.whole_chunks(), directory, source=source, place=self.place, options=options)

    def token_outputs(
        self,
        logits: Tensor,
        micro: MicroBatch,
        *,
        group: ProcessGroup | None,
        with_entropy: bool,
        lesson: Lesson | None = None,
        kept: Tensor | None = None,
    ) -> TokenOutputs:
        """Return outputs for `micro.targets` of logits [n, V / tp], or values [n, 1]; collective.

        micro: on the device. group: tensor parallel, if logits are cut. kept: [n] flat positions of the logits; None:
        all, in order. With a `lesson` of the micro-batch outputs have the divergence from a teacher.
        """
        shape, targets = micro.targets.shape, micro.targets.flatten()
        if self.sharding.head == "value":
            return TokenOutputs(values=logits.view(shape).float())
        vocab_size, temperature = self.sharding.hf.vocab_size, self.temperature
        how: dict[str, Any] = {"group": group, "vocab_size": vocab_size, "temperature": temperature}
        targets = targets if kept is None else targets[kept]
        hide(logits, self.hidden_tokens, first=0 if group is None else group.rank() * logits.shape[1])
        results: tuple[Tensor | None, ...]
        if lesson is None:
            results = vocab_parallel_logprobs_entropy(logits, targets, with_entropy=with_entropy, **how)
        else:
            assert micro.hidden is not None, "the lesson is of another pipeline stage"
            assert lesson.weight is not None, "the lesson is of another pipeline stage"
            teacher = TeacherHead(micro.hidden, lesson.weight, lesson.beta, self.hidden_tokens)
            columns = VocabColumns.of(logits, targets, **how)
            results = vocab_parallel_divergence(logits, targets, teacher, columns=columns, with_entropy=with_entropy)

        def placed(values: Tensor) -> Tensor:
            if kept is not None:
                values = values.new_zeros(micro.targets.numel()).index_put((kept,), values)
            return values.view(shape)

        names = ("logprobs", "entropy", "divergence")
        return TokenOutputs(**{n: placed(v) for n, v in zip(names, results, strict=False) if v is not None})

    def is_offloaded(self, part: str) -> bool:
        return self._memory.is_off(part)

    def offload(self, parts: Collection[str] = PARTS) -> int:
        """Give back the device memory of these parts; returns the bytes; collective.

        Gradients are lost: the next mini-batch begins with zeros. State that settings keep on the host is there
        already.
        """
        tensors = self._tensors()
        freed = sum(scratch.release() for scratch in self._scratches) if "gradients" in parts else 0
        return freed + self._memory.offload(tensors, parts)

    def onload(self, parts: Collection[str] = PARTS) -> None:
        self._memory.onload(parts)

    def on_host(self, state: EngineState) -> EngineState:
        pieces = [replace(piece, data=self._memory.on_host(piece.data)) for piece in state.pieces]
        return EngineState(pieces, state.numbers)

    def check_state_is_here(self) -> None:
        """Raise RuntimeError where parameters or optimizer state have been given back."""
        off = [part for part in ("parameters", "optimizer") if self.is_offloaded(part)]
        if off:
            raise RuntimeError(f"{self.name}: the memory of {' and '.join(off)} is given back; onload before state()")
