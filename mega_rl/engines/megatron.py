"""The Megatron-Core engine: one GPTModel over a parallel layout, with its gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mega_rl.data.packing import MicroBatch
from mega_rl.ddp.access import (
    WholeChunk,
    exportable,
    finish_traffic,
    gradient_tensors,
    main_gradients,
    optimizer_tensors,
    parameter_tensors,
    unwrapped,
)
from mega_rl.ddp.bucket_groups import finish_param_sync, scratches
from mega_rl.ddp.muon import Muon, panels_of_chunks
from mega_rl.ddp.optimizer import clip, count_steps, create_state, set_steps, step, torch_optimizers
from mega_rl.ddp.state import find_pieces, follow_weights
from mega_rl.ddp.torch_fsdp2 import TorchFsdp
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.microbatches import (
    STEPS,
    Finished,
    check_norm,
    check_numbers,
    microbatch_loss,
    reduce_losses,
)
from mega_rl.engines.models.heads import projection
from mega_rl.engines.models.routing import Routing
from mega_rl.engines.schedule import Schedule
from mega_rl.parallel.agreement import broadcast_json
from mega_rl.parallel.boxes import EngineState
from mega_rl.parallel.comm import ranks_of, sum_over_context
from mega_rl.protocols import Ranks, TokenLoss
from mega_rl.types import Experience, Lesson, Metrics, Rollout, TokenOutputs

UNKNOWN = 1 << 62  # more steps than any run makes


@dataclass(kw_only=True)
class MegatronEngine(ModelEngine):
    """One model, cut over `groups`, that evaluates tokens and (with an optimizer) learns. See `protocols.Engine`.

    `chunks` are GPTModels, wrapped in DDP or FSDP when there is an optimizer.
    """

    chunks: Sequence[GPTModel | DistributedDataParallel | FullyShardedDataParallel | TorchFsdp]
    optimizer: MegatronOptimizer | None
    config: TransformerConfig
    routing: Routing | None = None  # a mixture's; None for a dense model

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.groups
        self.replica = ranks_of(groups.host_replica)  # for the roles: their batches are on the host
        self._scratches = scratches(self.chunks)
        self._pipeline = ranks_of(groups.pp)
        self._context = ranks_of(groups.cp)
        self._token_shares = ranks_of(groups.dp_cp)  # the ranks that have different tokens
        self._is_last = self._pipeline.rank == self._pipeline.size - 1
        self._schedule = Schedule(self.config, self.sharding, groups, self.device, self.routing)
        if self.optimizer is not None and self.by_muon:
            panels = list(panels_of_chunks(self.chunks, self.optimizer, self.sharding, groups.coordinates))
            self.muon = Muon(torch_optimizers(self.optimizer), panels, self.sharding, groups)

    def forward(self, batch: Rollout | Experience, *, with_entropy: bool = False) -> TokenOutputs:
        micros = self.batching.split(batch, data_parallel=self.data_parallel)
        if self.routing is not None:
            self.routing.begin(micros, batch, training=False)
        with torch.no_grad():
            read = partial(self.token_outputs, group=self.groups.tp, with_entropy=with_entropy)
            results = self._schedule.run(self.chunks, micros, read, loss=None)
        outputs = self._collect(results, batch, with_entropy=with_entropy)
        if self.routing is None:
            return outputs
        return replace(outputs, routing=self.routing.finish_forward(len(batch.tokens)))

    def teach(self, minibatch: Experience) -> Lesson:
        micros = self.batching.split(minibatch, data_parallel=self.data_parallel)
        if self.routing is not None:
            self.routing.begin(micros, minibatch, training=False)
        hidden = self._schedule.hidden_states(self.models, micros)
        if self.routing is not None:
            self.routing.finish_forward(len(minibatch.tokens))
        return Lesson(hidden, projection(self.models))

    def _learn(
        self, micros: list[MicroBatch], minibatch: Experience, loss: TokenLoss, lesson: Lesson | None
    ) -> tuple[list[Finished], Metrics]:
        assert self.optimizer is not None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.routing is not None:
            sequences = int(self.data_parallel.sum(torch.tensor(len(minibatch.tokens))))
            averaged = not self.config.calculate_per_token_loss
            self.routing.begin(micros, minibatch, training=True, sequences=sequences, averaged=averaged)
        over_context = partial(sum_over_context, group=self.groups.cp)
        loss_of = microbatch_loss(loss, minibatch, sum_over_context=over_context)
        read = partial(self.token_outputs, group=self.groups.tp, with_entropy=loss.needs_entropy, lesson=lesson)
        results = self._schedule.run(self.chunks, micros, read, loss=loss_of)
        metrics = _reduce(results, self._token_shares, self._pipeline)
        return results, metrics if self.routing is None else metrics | self.routing.finish_training()

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(exportable(chunk), WholeChunk) for chunk in self.chunks)

    def whole_chunks(self) -> list[torch.nn.Module]:
        finish_param_sync(self.chunks)
        return [exportable(chunk) for chunk in self.chunks]

    @property
    def models(self) -> list[GPTModel]:
        """The chunks without their wrappers for data parallelism."""
        return [unwrapped(chunk) for chunk in self.chunks]

    def state(self) -> EngineState:
        self.check_state_is_here()
        finish_traffic(self.chunks)
        if self.optimizer is not None:
            create_state(self.optimizer)
        pieces = list(find_pieces(self.chunks, self.optimizer, dp_cp_group=self.groups.dp_cp))
        if self.optimizer is None:
            return EngineState(pieces, {})
        return EngineState(pieces, {STEPS: _steps(self.optimizer, ranks_of(self.groups.world))})

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        steps = check_numbers(self.name, numbers, trains=self.optimizer is not None)
        finish_traffic(self.chunks)
        self._memory.changed()
        if self.optimizer is None:
            return
        set_steps(self.optimizer, steps)
        follow_weights(self.chunks)

    def _tensors(self) -> Mapping[str, Iterable[Tensor]]:
        finish_traffic(self.chunks)
        inner = [] if self.optimizer is None else torch_optimizers(self.optimizer)
        return {
            "parameters": parameter_tensors(self.chunks),
            "gradients": chain(gradient_tensors(self.chunks), *map(main_gradients, inner)),
            "optimizer": chain(*map(optimizer_tensors, inner)),
        }

    def _combine(self, full: Tensor) -> Tensor:
        if self._is_last and self._context.size > 1:
            full = self._context.sum(full)  # each place holds one rank's number and zeros
        if self._pipeline.size > 1:
            full = self._pipeline.broadcast(full, source=self._pipeline.size - 1)
        return full

    def _apply_gradients(self, lr: float, metrics: Metrics) -> float:
        # These are the pieces of Megatron-Core's `ChainedOptimizer.step`, with a look at the norm before any change.
        optimizer = self.optimizer
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        check_norm(self.name, norm, metrics)
        clip(optimizer, norm=norm, limit=self.clip_grad)
        if self.muon is not None:
            self.muon.step()
        step(optimizer, self.chunks)
        if self.routing is not None:
            self.routing.update_biases()
        return norm


def _reduce(results: list[Finished], token_shares: Ranks, pipeline: Ranks) -> Metrics:
    """Return the loss metrics over all ranks; the last pipeline stage has the results."""
    last = pipeline.size - 1
    reduced = reduce_losses(results, token_shares) if pipeline.rank == last else {}
    return broadcast_json(reduced, pipeline, source=last) if pipeline.size > 1 else reduced


def _steps(optimizer: MegatronOptimizer, world: Ranks) -> int:
    """Return the steps that were made, which ranks without trainable weights learn from the others; collective."""
    own = count_steps(optimizer)
    counts = [-1, -UNKNOWN] if own is None else [own, -own]
    most, least = world.max(torch.tensor(counts)).tolist()
    assert most == -least, f"ranks have made between {-least} and {most} steps"
    return int(most)
