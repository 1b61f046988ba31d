"""The FSDP engine: one Hugging Face model under PyTorch FSDP2, with its gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_rl.config.attention import Role
from mega_rl.converters.live.export import export_hf
from mega_rl.converters.live.save import save_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.data.packing import MicroBatch, scatter_back
from mega_rl.ddp.reduce_scatter import Scratch
from mega_rl.engines.fsdp.attention import attention_arguments
from mega_rl.engines.fsdp.model import fsdp_modules, sharded_parameters
from mega_rl.engines.fsdp.optimizer import MOMENTS, clip, count_steps, gradient_norm, local, set_steps
from mega_rl.engines.fsdp.weights import WholeModel, disk_buffers, is_first_copy, rows_here
from mega_rl.engines.microbatches import Batching, to_device
from mega_rl.engines.offload import PartsOffload
from mega_rl.engines.outcome import STEPS, NonFiniteGradientError, check_numbers, detached
from mega_rl.parallel.boxes import whole
from mega_rl.parallel.comm import GroupRanks, SingleRank
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy
from mega_rl.protocols import Inspect, LossOutput, TokenLoss
from mega_rl.types import EngineState, Experience, Metrics, Piece, Rollout, TokenOutputs


@dataclass
class FSDPEngine:
    """One model, sharded over all ranks, that evaluates tokens and (with an optimizer) learns. See `protocols.Engine`.

    Every rank is a data-parallel rank with rows of its own, and a replica by itself: weights meet only while a layer
    runs. `temperature` divides the logits of every log-prob and entropy, so that they speak of the distribution that
    was sampled.
    """

    name: Role
    model: nn.Module  # transformers' causal model, or a TokenClassifier
    optimizer: torch.optim.AdamW | None
    sharding: Sharding
    groups: Groups
    batching: Batching
    device: torch.device
    dtype: torch.dtype  # that layers compute in, and weights leave in
    attention: str  # "eager", "sdpa" or "flash_attention_2"
    scratch: Scratch | None = None  # that messages arrive in
    clip_grad: float = 1.0
    reduce_every_microbatch: bool = True
    keep_gathered: bool = False  # layers between forward and backward, and from one micro-batch to the next
    temperature: float = 1.0
    export_bucket_bytes: int = 256 << 20

    is_sharded = True

    def __post_init__(self) -> None:
        self.data_parallel = GroupRanks(self.groups.dp)
        self.replica = SingleRank()
        self._offload = PartsOffload(("parameters", "gradients", "optimizer"))

    def forward(self, batch: Rollout | Experience) -> TokenOutputs:
        """Log-probs and entropy ([B, S] float32, head "lm") or values ("value"), 0 off the loss mask.

        `batch` holds this rank's rows, on the host; so does the result.
        """
        micros = self.batching.split(batch, data_parallel=self.data_parallel)
        with torch.no_grad():
            found = [self._token_outputs(micro) for micro in to_device(micros, self.device)]
        return self._collect(micros, found, batch)

    def train_minibatch(
        self, minibatch: Experience, loss: TokenLoss, *, lr: float, inspect: Inspect | None = None
    ) -> Metrics:
        """One optimizer step at learning rate `lr` on this rank's rows of a global mini-batch.

        The loss is the sum of `loss` over micro-batches and ranks, so the result depends neither on how rows are cut
        nor on how many ranks there are. Returns the loss's reduced metrics, `grad_norm` (before clipping), `lr` and
        `num_microbatches`, equal on all ranks. `inspect` gets the mini-batch and what the forward said of it, as
        `forward` would return it, before any weight changes; its metrics are added.

        Raises:
            NonFiniteGradientError: on all ranks alike, before any weight changes.
        """
        assert self.optimizer is not None, f"engine {self.name} is frozen"
        micros = self.batching.split(minibatch, data_parallel=self.data_parallel)
        self.optimizer.zero_grad()
        found, losses = [], []
        for number, micro in enumerate(to_device(micros, self.device)):
            self._expect_backward(is_last=number == len(micros) - 1)
            outputs = self._token_outputs(micro)
            result = loss(outputs, micro.fields)
            result.loss.backward()
            seen, kept = detached(outputs, result)
            found.append(seen)
            losses.append(kept)
        metrics = self._reduce(losses)
        if inspect is not None:
            metrics |= inspect(minibatch, self._collect(micros, found, minibatch))
        metrics["grad_norm"] = self._apply_gradients(lr)
        metrics["lr"] = lr
        metrics["num_microbatches"] = float(len(micros))
        return metrics

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in training dtype) of every weight, on all ranks; collective."""
        return export_hf(self.whole_chunks(), **self._where())

    def save_hf(self, directory: Path, *, source: Path) -> None:
        """Write the weights as a Hugging Face checkpoint with config and tokenizer of `source`; collective.

        One that is there is replaced as a whole. Raises UserError: see `converters.save.save_hf`.
        """
        save_hf(self.whole_chunks(), directory, source=source, overwrite=True, sharded=True, **self._where())

    def whole_chunks(self) -> list[nn.Module]:
        """The tensors of the model's checkpoint, one after the other; reading one is collective."""
        return [WholeModel(self.model, sharding=self.sharding, dtype=self.dtype, device=self.device)]

    def _where(self) -> dict[str, Any]:
        """How the model is cut, as exporters take it: not at all, once data parallelism is gathered."""
        return {
            "sharding": self.sharding,
            "coordinates": self.groups.coordinates,
            "bucket_bytes": self.export_bucket_bytes,
            "dtype": self.dtype,
        }

    def state(self) -> EngineState:
        """Pieces of weights and optimizer state, views of live memory, and the number of steps; collective.

        Raises:
            RuntimeError: parameters or optimizer state have been given back.
        """
        off = [part for part in ("parameters", "optimizer") if self.is_offloaded(part)]
        if off:
            raise RuntimeError(f"{self.name}: the memory of {' and '.join(off)} is given back; onload before state()")
        pieces = []
        for name, parameter in sharded_parameters(self.model).items():
            tensors: dict[str, Tensor] = {"weights": parameter}
            if self.optimizer is not None and parameter.requires_grad:
                tensors |= {moment: self.optimizer.state[parameter][moment] for moment in MOMENTS}
            for kind, tensor in tensors.items():
                data = local(tensor)
                if data.numel():
                    shape, box = tuple(parameter.shape), rows_here(parameter)
                    pieces.append(Piece(f"{kind}/{name}", shape, box, data, owned=is_first_copy(parameter)))
        first = self.data_parallel.rank == 0
        for name, buffer in disk_buffers(self.model).items():
            shape = tuple(buffer.shape)
            pieces.append(Piece(f"weights/{name}", shape, whole(shape), buffer.detach(), owned=first))
        return EngineState(pieces, {} if self.optimizer is None else {STEPS: count_steps(self.optimizer)})

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        """Go on from what was written into the pieces of `state`, with the numbers that were saved; collective.

        Raises:
            UserError: on all ranks alike, the numbers are not an engine's.
        """
        steps = check_numbers(self.name, numbers, trains=self.optimizer is not None)
        if self.optimizer is not None:
            set_steps(self.optimizer, steps)

    def offload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> int:
        """Give back the device memory of parameters, gradients and optimizer state; returns the bytes."""
        shards = sharded_parameters(self.model).values()
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        tensors = {
            "parameters": [local(parameter) for parameter in shards],
            "gradients": [local(parameter.grad) for parameter in shards if parameter.grad is not None],
            "optimizer": [local(state[name]) for state in states for name in MOMENTS],
        }
        # With fsdp.cpu_offload all of it is on the host already.
        here = {part: [t for t in found if t.device.type == self.device.type] for part, found in tensors.items()}
        freed = self.scratch.release() if self.scratch is not None and gradients else 0
        return freed + self._offload.offload(
            here, _chosen(parameters=parameters, gradients=gradients, optimizer=optimizer)
        )

    def is_offloaded(self, part: str) -> bool:
        """Whether the memory of "parameters", "gradients" or "optimizer" has been given back."""
        return self._offload.is_off(part)

    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Undo `offload` of these parts, bit for bit."""
        self._offload.onload(_chosen(parameters=parameters, gradients=gradients, optimizer=optimizer))

    @property
    def parameters(self) -> list[DTensor]:
        """Every parameter, a tied one once."""
        return list(sharded_parameters(self.model).values())

    def _expect_backward(self, *, is_last: bool) -> None:
        """Whether gradients travel after the next backward, and whether layers stay gathered for another forward."""
        for module in fsdp_modules(self.model):
            module.set_requires_gradient_sync(is_last or self.reduce_every_microbatch, recurse=False)
            module.set_reshard_after_backward(is_last or not self.keep_gathered, recurse=False)

    def _token_outputs(self, micro: MicroBatch) -> TokenOutputs:
        """What the model says of `micro.targets`; tensors shaped like them, on the device."""
        arguments: dict[str, Any] = {"position_ids": micro.position_ids, "use_cache": False}
        arguments |= attention_arguments(self.attention, micro.cu_seqlens, micro.max_seqlen)
        if self.sharding.head == "value":
            return TokenOutputs(values=self.model(micro.tokens, **arguments).squeeze(-1).float())
        # Of a packed micro-batch the head reads the positions that predict a token of the loss, and no other.
        kept = _predicting(micro) if micro.packed else None
        if kept is not None:
            arguments["logits_to_keep"] = kept
        logits = self.model(micro.tokens, **arguments).logits.flatten(0, 1)
        targets = micro.targets.flatten()
        logprobs, entropy = vocab_parallel_logprobs_entropy(
            logits,
            targets if kept is None else targets[kept],
            group=None,
            vocab_size=self.sharding.hf.vocab_size,
            temperature=self.temperature,
        )
        assert entropy is not None
        return TokenOutputs(logprobs=_placed(logprobs, kept, micro), entropy=_placed(entropy, kept, micro))

    def _collect(
        self, micros: list[MicroBatch], found: list[TokenOutputs], batch: Rollout | Experience
    ) -> TokenOutputs:
        """The micro-batches' outputs, [B, S] float32 on the host, 0 off the loss mask."""
        names = ("values",) if self.sharding.head == "value" else ("logprobs", "entropy")
        full = torch.zeros(len(names), *batch.tokens.shape)
        for micro, outputs in zip(micros, found, strict=True):
            for out, name in zip(full, names, strict=True):
                scatter_back(getattr(outputs, name).cpu(), micro, out)
        full *= batch.loss_mask
        return TokenOutputs(**dict(zip(names, full, strict=True)))

    def _reduce(self, losses: list[LossOutput]) -> Metrics:
        """Loss metrics over micro-batches and ranks."""
        reduced: Metrics = {}
        sums = {name: torch.stack([found.sums[name] for found in losses]).sum() for name in losses[0].sums}
        maxima = {name: torch.stack([found.maxima[name] for found in losses]).max() for name in losses[0].maxima}
        for values, combine in ((sums, self.data_parallel.sum), (maxima, self.data_parallel.max)):
            if values:
                stacked = combine(torch.stack(list(values.values())).double())
                reduced.update(zip(values, stacked.tolist(), strict=True))
        return reduced

    def _apply_gradients(self, lr: float) -> float:
        """Clip by the global norm and step; returns the norm before clipping."""
        assert self.optimizer is not None
        parameters = self.parameters
        norm = gradient_norm(parameters, self.data_parallel)
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"{self.name}: the gradient norm is {norm}; weights and optimizer state are unchanged"
            )
        clip(parameters, norm=norm, limit=self.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm


def _predicting(micro: MicroBatch) -> Tensor:
    """[N] int64 flat positions whose output enters the loss; one at least, so that every rank has a backward."""
    found = micro.fields["loss_mask"].flatten().nonzero().flatten()
    return found if len(found) else found.new_zeros(1)


def _placed(values: Tensor, kept: Tensor | None, micro: MicroBatch) -> Tensor:
    """Values of the positions `kept`, [N], in a micro-batch of zeros; all positions where None."""
    if kept is None:
        return values.view(micro.targets.shape)
    return values.new_zeros(micro.targets.numel()).index_put((kept,), values).view(micro.targets.shape)


def _chosen(**parts: bool) -> list[str]:
    return [part for part, chosen in parts.items() if chosen]
