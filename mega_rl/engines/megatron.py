"""The Megatron-Core engine: one GPTModel over a parallel layout, with its gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mega_rl.config.attention import Role
from mega_rl.converters.live.export import export_hf
from mega_rl.converters.live.save import save_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.data.packing import MicroBatch, scatter_back
from mega_rl.ddp.access import (
    WholeChunk,
    exportable,
    finish_traffic,
    gradient_tensors,
    optimizer_tensors,
    parameter_tensors,
    unwrapped,
)
from mega_rl.ddp.bucket_groups import finish_param_sync, rounding_errors, scratches
from mega_rl.ddp.optimizer import clip, count_steps, create_state, set_steps, step, torch_optimizers
from mega_rl.ddp.state import find_pieces, follow_weights
from mega_rl.ddp.torch_fsdp2 import TorchFsdp
from mega_rl.engines.microbatches import Batching, to_device
from mega_rl.engines.offload import PartsOffload
from mega_rl.engines.outcome import STEPS, NonFiniteGradientError, check_numbers, detached
from mega_rl.models.attention import packed_sequences
from mega_rl.models.routing import Routing
from mega_rl.parallel.agreement import broadcast_json
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy
from mega_rl.protocols import Inspect, LossOutput, TokenLoss
from mega_rl.types import EngineState, Experience, Metrics, Rollout, TokenOutputs

UNKNOWN = 1 << 62  # more steps than anybody makes


@dataclass(frozen=True)
class Finished:
    """What one micro-batch leaves on the last pipeline stage; no part of it holds on to the graph."""

    micro: MicroBatch
    outputs: TokenOutputs  # like micro.tokens
    loss: LossOutput | None  # None in a forward only


@dataclass
class MegatronEngine:
    """One model, cut over `groups`, that evaluates tokens and (with an optimizer) learns. See `protocols.Engine`.

    `chunks` are GPTModels, wrapped in DDP or FSDP when there is an optimizer. `temperature` divides
    the logits of every log-prob and entropy, so that they speak of the distribution that was sampled.
    """

    name: Role
    chunks: Sequence[GPTModel | DistributedDataParallel | FullyShardedDataParallel | TorchFsdp]
    optimizer: MegatronOptimizer | None
    config: TransformerConfig
    sharding: Sharding
    groups: Groups
    batching: Batching
    device: torch.device
    attention: str = "sdpa"  # what core attention runs
    temperature: float = 1.0
    export_bucket_bytes: int = 256 << 20
    routing: Routing | None = None  # of a mixture of experts

    def __post_init__(self) -> None:
        self.data_parallel = GroupRanks(self.groups.dp)
        self.replica = GroupRanks(self.groups.replica)
        self._pipeline = GroupRanks(self.groups.pp)
        self._context = GroupRanks(self.groups.cp)
        self._token_shares = GroupRanks(self.groups.dp_cp)  # the ranks that have different tokens
        self._pp_size, self._pp_rank = self.groups.layout.pp, self.groups.coordinates.pp_rank
        self._is_last = self._pp_rank == self._pp_size - 1
        self._offload = PartsOffload(("parameters", "gradients", "optimizer"))

    def forward(self, batch: Rollout | Experience) -> TokenOutputs:
        """Log-probs and entropy ([B, S] float32, head "lm") or values ("value"), 0 off the loss mask.

        `batch` holds this data-parallel rank's rows, on the host, equal on all ranks of the replica; so is the result.
        """
        micros = self.batching.split(batch, data_parallel=self.data_parallel)
        if self.routing is not None:
            self.routing.begin(micros, width=batch.tokens.size(1), routing=batch.routing, training=False)
        with torch.no_grad():
            outputs = self._collect(self._run_schedule(micros, loss=None), batch)
        if self.routing is None:
            return outputs
        return replace(outputs, routing=self.routing.finish_forward(len(batch.tokens)))

    def train_minibatch(
        self, minibatch: Experience, loss: TokenLoss, *, lr: float, inspect: Inspect | None = None
    ) -> Metrics:
        """One optimizer step at learning rate `lr` on this rank's rows of a global mini-batch.

        The loss is the sum of `loss` over micro-batches and data-parallel ranks, so the result depends neither on how
        rows are cut nor on how many ranks there are. Returns the loss's reduced metrics, `grad_norm` (before
        clipping), `lr` and `num_microbatches`, equal on all ranks, and `grad_reduce_bf16_error` where it is measured.
        `inspect` gets the mini-batch and what the forward said of it, as `forward` would return it, before any weight
        changes; its metrics are added.

        Raises:
            NonFiniteGradientError: on all ranks alike, before any weight changes.
        """
        assert self.optimizer is not None, f"engine {self.name} is frozen"
        micros = self.batching.split(minibatch, data_parallel=self.data_parallel)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.routing is not None:
            self.routing.begin(
                micros,
                width=minibatch.tokens.size(1),
                routing=minibatch.routing,
                training=True,
                sequences=int(self.data_parallel.sum(torch.tensor(len(minibatch.tokens)))),
                averaged=not self.config.calculate_per_token_loss,
            )
        finished = self._run_schedule(micros, loss=loss)
        metrics = self._reduce([done.loss for done in finished if done.loss is not None]) | self._rounding_error()
        if inspect is not None:
            metrics |= inspect(minibatch, self._collect(finished, minibatch))
        if self.routing is not None:
            metrics |= self.routing.finish_training()
        metrics["grad_norm"] = self._apply_gradients(lr)
        if self.routing is not None:
            self.routing.update_biases()
        metrics["lr"] = lr
        metrics["num_microbatches"] = float(len(micros))
        return metrics

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in training dtype) of every weight, on all ranks of a replica; collective."""
        return export_hf(self.whole_chunks(), **self._where())

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP has spread parameters over data parallelism, so that reading one is collective."""
        return any(isinstance(exportable(chunk), WholeChunk) for chunk in self.chunks)

    def whole_chunks(self) -> list[torch.nn.Module]:
        """The chunks without their wrappers, with whole and up-to-date parameters; collective."""
        finish_param_sync(self.chunks)
        return [exportable(chunk) for chunk in self.chunks]

    def save_hf(self, directory: Path, *, source: Path) -> None:
        """Write the weights as a Hugging Face checkpoint with config and tokenizer of `source`; collective.

        One that is there is replaced as a whole. Raises UserError: see `converters.save.save_hf`.
        """
        chunks = self.whole_chunks()
        save_hf(chunks, directory, source=source, overwrite=True, sharded=self.is_sharded, **self._where())

    def _where(self) -> dict[str, Any]:
        """How the model is cut and which ranks have the parts, as exporters take it."""
        return {
            "sharding": self.sharding,
            "coordinates": self.groups.coordinates,
            "tp_group": self.groups.tp,
            "pp_group": self.groups.pp,
            "expert_group": self.groups.experts,
            "bucket_bytes": self.export_bucket_bytes,
        }

    @property
    def models(self) -> list[GPTModel]:
        """The chunks without their wrappers for data parallelism."""
        return [unwrapped(chunk) for chunk in self.chunks]

    def state(self) -> EngineState:
        """Pieces of weights and optimizer state, views of live memory, and the number of steps; collective.

        Raises:
            RuntimeError: parameters or optimizer state have been given back.
            UserError: a module has state that checkpoints cannot keep.
        """
        off = [part for part in ("parameters", "optimizer") if self.is_offloaded(part)]
        if off:
            raise RuntimeError(f"{self.name}: the memory of {' and '.join(off)} is given back; onload before state()")
        finish_traffic(self.chunks)
        if self.optimizer is not None:
            create_state(self.optimizer)
        pieces = list(find_pieces(self.chunks, self.optimizer, dp_cp_group=self.groups.dp_cp))
        return EngineState(pieces, {} if self.optimizer is None else {STEPS: self._steps(self.optimizer)})

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        """Go on from what was written into the pieces of `state`, with the numbers that were saved; collective.

        Raises:
            UserError: on all ranks alike, the numbers are not an engine's.
        """
        steps = check_numbers(self.name, numbers, trains=self.optimizer is not None)
        finish_traffic(self.chunks)
        if self.optimizer is None:
            return
        set_steps(self.optimizer, steps)
        follow_weights(self.chunks)

    def _steps(self, optimizer: MegatronOptimizer) -> int:
        """Steps that were made, which ranks without trainable weights learn from the others."""
        own = count_steps(optimizer)
        counts = [-1, -UNKNOWN] if own is None else [own, -own]
        most, least = GroupRanks(self.groups.world).max(torch.tensor(counts)).tolist()
        assert most == -least, f"{self.name}: ranks have made between {-least} and {most} steps"
        return int(most)

    def offload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> int:
        """Give back the memory of parameters, gradients and optimizer state; returns the bytes; collective.

        FP32 main parameters are optimizer state, unless they share the parameters' memory.
        """
        chosen = self._parts(parameters=parameters, gradients=gradients, optimizer=optimizer)
        finish_traffic(self.chunks)
        freed = sum(scratch.release() for scratch in scratches(self.chunks)) if gradients else 0
        inner = [] if self.optimizer is None else torch_optimizers(self.optimizer)
        tensors = {
            "parameters": parameter_tensors(self.chunks),
            "gradients": gradient_tensors(self.chunks),
            "optimizer": (tensor for each in inner for tensor in optimizer_tensors(each)),
        }
        # Some of the optimizer's state may be on the host already.
        here = {part: [t for t in found if t.device.type == self.device.type] for part, found in tensors.items()}
        return freed + self._offload.offload(here, chosen)

    def is_offloaded(self, part: str) -> bool:
        """Whether the memory of "parameters", "gradients" or "optimizer" has been given back."""
        return self._offload.is_off(part)

    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Undo `offload` of these parts, bit for bit."""
        self._offload.onload(self._parts(parameters=parameters, gradients=gradients, optimizer=optimizer))

    def _parts(self, **parts: bool) -> list[str]:
        return [part for part, chosen in parts.items() if chosen]

    def _run_schedule(self, micros: list[MicroBatch], *, loss: TokenLoss | None) -> list[Finished]:
        """Megatron-Core's schedule over the micro-batches; one result each on the last stage, none elsewhere.

        With a loss: forward and backward, gradients finalised. Without: forward only.
        """
        pipelined = self._pp_size > 1
        # With averages the schedule divides a loss by the number of micro-batches and DDP a gradient by its ranks.
        scale = 1 if self.config.calculate_per_token_loss else len(micros) * self._token_shares.size
        vpp = self.groups.layout.vpp
        schedule = get_forward_backward_func(pp_size=self._pp_size, vp_size=vpp if vpp > 1 else None)
        results: list[Finished] = schedule(
            forward_step_func=partial(self._forward_step, loss, scale),
            data_iterator=[to_device(micros, self.device) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(micros),
            # Upstream divides by cp (and tp); where it matters, with a pipeline, shapes travel with the tensors.
            seq_length=max(micro.tokens.size(1) for micro in micros) * self._context.size,
            micro_batch_size=micros[0].tokens.size(0),
            forward_only=loss is None,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.config) if pipelined else None,
            pg_collection=self.groups.collection,
        )
        return results

    def _forward_step(
        self, loss: TokenLoss | None, scale: int, micros: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        """One micro-batch through one chunk: what the schedule calls."""
        micro = next(micros)
        if self.routing is not None:
            self.routing.expect(next(i for i, chunk in enumerate(self.chunks) if chunk is model), self.device)
        packed = None
        if micro.cu_seqlens is not None:
            packed = packed_sequences(
                micro.cu_seqlens, micro.max_seqlen, cp_rank=self._context.rank, cp_size=self._context.size
            )
        output = model(micro.tokens, micro.position_ids, None, packed_seq_params=packed)
        return output, partial(self._finish_microbatch, loss, scale, micro)

    def _finish_microbatch(
        self, loss: TokenLoss | None, scale: int, micro: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, Finished]:
        """(loss, unused token count, result) of the last stage's output, as the schedule wants it."""
        no_count = torch.zeros([], dtype=torch.int, device=output.device)
        outputs = self._token_outputs(output, micro)
        if loss is None:
            return output.new_zeros([]), no_count, Finished(micro, outputs, None)
        result = loss(outputs, micro.fields)
        return result.loss * scale, no_count, Finished(micro, *detached(outputs, result))

    def _collect(self, finished: list[Finished], batch: Rollout | Experience) -> TokenOutputs:
        """The micro-batches' outputs, [B, S] float32 on the host of every rank of the replica, 0 off the loss mask."""
        names = ("values",) if self.sharding.head == "value" else ("logprobs", "entropy")
        full = torch.zeros(len(names), *batch.tokens.shape)
        for done in finished:
            for out, name in zip(full, names, strict=True):
                scatter_back(getattr(done.outputs, name).cpu(), done.micro, out)
        full *= batch.loss_mask
        if self._is_last and self._context.size > 1:
            full = self._context.sum(full)  # each place holds one rank's number and zeros
        if self._pp_size > 1:
            full = self._pipeline.broadcast(full, source=self._pp_size - 1)
        return TokenOutputs(**dict(zip(names, full, strict=True)))

    def _token_outputs(self, output: Tensor, micro: MicroBatch) -> TokenOutputs:
        """What the head's output [b, S, V/tp] or [b, S, 1] says of `micro.targets`; tensors shaped like them."""
        if self.sharding.head == "value":
            return TokenOutputs(values=output.squeeze(-1).float())
        shape = micro.targets.shape
        logprobs, entropy = vocab_parallel_logprobs_entropy(
            output.flatten(0, 1),
            micro.targets.flatten(),
            group=self.groups.tp,
            vocab_size=self.sharding.hf.vocab_size,
            temperature=self.temperature,
        )
        assert entropy is not None
        return TokenOutputs(logprobs=logprobs.view(shape), entropy=entropy.view(shape))

    def _reduce(self, outputs: list[LossOutput]) -> Metrics:
        """Loss metrics over micro-batches and the ranks that share the tokens, from the last stage to all."""
        reduced: Metrics = {}
        if self._is_last:
            sums = {name: torch.stack([o.sums[name] for o in outputs]).sum() for name in outputs[0].sums}
            maxima = {name: torch.stack([o.maxima[name] for o in outputs]).max() for name in outputs[0].maxima}
            for values, combine in ((sums, self._token_shares.sum), (maxima, self._token_shares.max)):
                if values:
                    stacked = combine(torch.stack(list(values.values())).double())
                    reduced.update(zip(values, stacked.tolist(), strict=True))
        if self._pp_size > 1:
            reduced = broadcast_json(reduced, self._pipeline, source=self._pp_size - 1)
        return reduced

    def _apply_gradients(self, lr: float) -> float:
        """Clip by the global norm and step; returns the norm before clipping.

        These are the pieces of Megatron-Core's `ChainedOptimizer.step`, with a look at the norm before any change.
        """
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"{self.name}: the gradient norm is {norm}; weights and optimizer state are unchanged"
            )
        clip(self.optimizer, norm=norm)
        step(self.optimizer, self.chunks)
        return norm

    def _rounding_error(self) -> Metrics:
        """`grad_reduce_bf16_error` where gradients travel in bf16 and are added in FP32; else nothing.

        |g' - g| / |g| over the whole model's gradients g of this step, g' being what a reduce-scatter that rounds to
        bf16 after every addition would have made of the same contributions.
        """
        metrics: Metrics = {}
        for error in rounding_errors(self.chunks):
            difference, reference = GroupRanks(self.groups.world).sum(error.take(self.device)).tolist()
            metrics["grad_reduce_bf16_error"] = math.sqrt(difference / reference) if reference else 0.0
        return metrics
