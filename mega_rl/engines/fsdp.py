"""The FSDP engine: one Hugging Face model under PyTorch FSDP2, with its gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mega_rl.config.schema import OptimConfig
from mega_rl.converters.hf.untabled import accepted
from mega_rl.data.packing import MicroBatch
from mega_rl.ddp.access import local, rows_here, whole_tensor
from mega_rl.ddp.muon import Muon, panels_of_rows
from mega_rl.ddp.optimizer import MOMENTS
from mega_rl.ddp.reduce_scatter import Scratch
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.fsdp_model import (
    TokenClassifier,
    attention_arguments,
    fsdp_modules,
    hidden_outputs,
    sharded_parameters,
)
from mega_rl.engines.fsdp_weights import disk_buffers, is_first_copy, whole_model
from mega_rl.engines.microbatches import (
    STEPS,
    Finished,
    check_norm,
    check_numbers,
    finished,
    microbatch_loss,
    reduce_losses,
    to_device,
)
from mega_rl.parallel.accelerator.base import send, squared_norm
from mega_rl.parallel.boxes import EngineState, Piece, whole
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Ranks, TokenLoss
from mega_rl.types import Experience, Lesson, Metrics, Rollout, TokenOutputs


@dataclass(kw_only=True)
class FSDPEngine(ModelEngine):
    """One model, sharded over all ranks, that evaluates tokens and (with an optimizer) learns. See `protocols.Engine`.

    Every rank is a data-parallel rank with its own rows, and a replica by itself: weights meet only while a layer
    runs.
    """

    model: nn.Module  # transformers' causal model, or a TokenClassifier
    optimizer: torch.optim.AdamW | None
    dtype: torch.dtype  # layers compute in it, and weights leave in it
    scratch: Scratch | None = None  # messages arrive in it
    reduce_every_microbatch: bool = True
    keep_gathered: bool = False  # layers between forward and backward, and from one micro-batch to the next

    is_sharded = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replica = SingleRank()
        self._scratches = [] if self.scratch is None else [self.scratch]
        if self.optimizer is not None and self.by_muon:
            panels = list(panels_of_rows(sharded_parameters(self.model), self.sharding))
            self.muon = Muon([self.optimizer], panels, self.sharding, self.groups)

    def forward(self, batch: Rollout | Experience, *, with_entropy: bool = False) -> TokenOutputs:
        micros = self.batching.split(batch, data_parallel=self.data_parallel)
        with torch.no_grad():
            results = [
                Finished(micro, self._token_outputs(micro, there, with_entropy=with_entropy), None)
                for micro, there in zip(micros, to_device(micros, self.device), strict=True)
            ]
        return self._collect(results, batch, with_entropy=with_entropy)

    def teach(self, minibatch: Experience) -> Lesson:
        micros = self.batching.split(minibatch, data_parallel=self.data_parallel)
        model = cast(PreTrainedModel, self.model)
        with torch.no_grad(), hidden_outputs(model):
            hidden = [
                _head_output(model, micro, there, attention=self.attention)[0].cpu()
                for micro, there in zip(micros, to_device(micros, self.device), strict=True)
            ]
        sharded_parameters(model)  # the projection is one of them again
        weight = model.get_output_embeddings().weight
        return Lesson(hidden, whole_tensor(weight, self.dtype, self.device))

    def _learn(
        self, micros: list[MicroBatch], minibatch: Experience, loss: TokenLoss, lesson: Lesson | None
    ) -> tuple[list[Finished], Metrics]:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        loss_of = microbatch_loss(loss, minibatch)
        results: list[Finished] = []
        for micro, there in zip(micros, to_device(micros, self.device), strict=True):
            is_last = len(results) == len(micros) - 1
            _expect_backward(
                self.model, sends=is_last or self.reduce_every_microbatch, frees=is_last or not self.keep_gathered
            )
            outputs = self._token_outputs(micro, there, with_entropy=loss.needs_entropy, lesson=lesson)
            result = loss_of(outputs, there.fields)
            result.loss.backward()
            results.append(finished(micro, outputs, result))
        return results, reduce_losses(results, self.data_parallel)

    @property
    def export_dtype(self) -> torch.dtype:
        return self.dtype

    def whole_chunks(self) -> list[nn.Module]:
        return [whole_model(self.model, sharding=self.sharding, dtype=self.dtype, device=self.device)]

    def state(self) -> EngineState:
        self.check_state_is_here()
        pieces = []
        for name, parameter in sharded_parameters(self.model).items():
            tensors: dict[str, Tensor] = {"weights": parameter}
            if self.optimizer is not None and parameter.requires_grad:
                tensors |= {name: each for name, each in self.optimizer.state[parameter].items() if name in MOMENTS}
            for kind, tensor in tensors.items():
                data = local(tensor)
                if data.numel():
                    shape, box = tuple(parameter.shape), rows_here(parameter)
                    pieces.append(Piece(f"{kind}/{name}", shape, box, data, owned=is_first_copy(parameter)))
        first = self.data_parallel.rank == 0
        for name, buffer in disk_buffers(self.model).items():
            shape = tuple(buffer.shape)
            pieces.append(Piece(f"weights/{name}", shape, whole(shape), buffer.detach(), owned=first))
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return EngineState(pieces, {STEPS: int(states[0]["step"])} if states else {})

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        steps = check_numbers(self.name, numbers, trains=self.optimizer is not None)
        self._memory.changed()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["step"].fill_(steps)

    def _tensors(self) -> Mapping[str, Iterable[Tensor]]:
        shards = sharded_parameters(self.model).values()
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return {
            "parameters": [local(parameter) for parameter in shards],
            "gradients": [local(parameter.grad) for parameter in shards if parameter.grad is not None],
            "optimizer": [local(each) for state in states for name, each in state.items() if name in MOMENTS],
        }

    @property
    def parameters(self) -> list[DTensor]:
        """Every parameter, a tied one once."""
        return list(sharded_parameters(self.model).values())

    def _token_outputs(
        self, micro: MicroBatch, there: MicroBatch, *, with_entropy: bool, lesson: Lesson | None = None
    ) -> TokenOutputs:
        """Return outputs for `micro.targets`, shaped like them, on the device, where `there` is the micro-batch."""
        logits, kept = _head_output(self.model, micro, there, attention=self.attention)
        return self.token_outputs(logits, there, group=None, with_entropy=with_entropy, lesson=lesson, kept=kept)

    def _apply_gradients(self, lr: float, metrics: Metrics) -> float:
        assert self.optimizer is not None
        parameters = self.parameters
        norm = gradient_norm(parameters, self.data_parallel)
        check_norm(self.name, norm, metrics)
        clip(parameters, norm=norm, limit=self.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.muon is not None:
            self.muon.step()
        self.optimizer.step()
        return norm


def _head_output(
    model: nn.Module, micro: MicroBatch, there: MicroBatch, *, attention: str
) -> tuple[Tensor, Tensor | None]:
    """Return (logits [N, V] or values [N, 1], their flat positions [N]; None: all).

    `there` is the micro-batch on the device.
    """
    device = there.tokens.device
    bounds, lengths = micro.cu_seqlens, micro.lengths
    arguments = attention_arguments(attention, bounds, micro.max_seqlen, device=device, lengths=lengths)
    arguments |= {"position_ids": there.position_ids, "use_cache": False}
    if isinstance(model, TokenClassifier):
        body = model.get_submodule(model.body)
        return model(there.tokens, **accepted(body, arguments)).flatten(0, 1), None
    # In a packed micro-batch the head reads the positions that predict a token of the loss, and no other.
    kept = send(_predicting(micro), device) if micro.packed else None
    arguments = accepted(model, {**arguments, "logits_to_keep": kept} if micro.packed else arguments)
    logits = model(there.tokens, **arguments).logits.flatten(0, 1)
    return (logits, kept) if kept is None or len(logits) == len(kept) else (logits[kept], kept)


def _expect_backward(model: nn.Module, *, sends: bool, frees: bool) -> None:
    """Set whether the next backward sends gradients and frees layers."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(sends, recurse=False)
        module.set_reshard_after_backward(frees, recurse=False)


def _predicting(micro: MicroBatch) -> Tensor:
    """Return [N] int64 flat positions whose output enters the loss, on the host.

    One at least: every rank needs a backward.
    """
    positions = micro.fields["loss_mask"].flatten().nonzero().flatten()
    return positions if len(positions) else positions.new_zeros(1)


def build_adam(parameters: Mapping[str, DTensor], optim: OptimConfig) -> torch.optim.AdamW:
    """Build torch's fused AdamW with its state created as zeros.

    Weight decay is decoupled and spares tensors of one dimension, norms and biases, and the stacked biases of experts.
    """
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    spared = {id(p) for name, p in parameters.items() if p.dim() == 1 or name.endswith("bias")}
    decaying, others = ([p for p in trained if (id(p) in spared) == spares] for spares in (False, True))
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": others}], lr=optim.lr, fused=True)
    set_optim(optimizer, optim)
    for parameter in trained:
        # AdamW makes the same state at its first step: the number of steps is on the parameter's device.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.to_local().device),
            **{name: torch.zeros_like(parameter) for name in MOMENTS},
        }
    return optimizer


def set_optim(optimizer: torch.optim.AdamW, optim: OptimConfig) -> None:
    """Let later steps follow these settings; the learning rate comes with each step."""
    for group, decay in zip(optimizer.param_groups, (optim.weight_decay, 0.0), strict=True):
        group.update(weight_decay=decay, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def gradient_norm(parameters: Iterable[DTensor], ranks: Ranks) -> float:
    """Return the L2 norm of all gradients, squares summed in float64 over all `ranks`; collective."""
    own = (local(p.grad) for p in parameters if p.grad is not None and is_first_copy(p))
    squares = squared_norm([gradient for gradient in own if gradient.numel()])
    return math.sqrt(float(ranks.sum(squares.cpu())))


def clip(parameters: Iterable[DTensor], *, norm: float, limit: float) -> None:
    """Scale all gradients, of norm `norm`, down to `limit`; 0 leaves them as they are."""
    factor = limit / (norm + 1e-6)
    if limit > 0.0 and factor < 1.0:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
