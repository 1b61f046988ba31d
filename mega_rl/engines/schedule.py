"""Micro-batches through a model's chunks, in the order of Megatron-Core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mega_rl.converters.plan.sharding import Sharding
from mega_rl.data.packing import MicroBatch
from mega_rl.engines.microbatches import Finished, MicrobatchLoss, finished, to_device
from mega_rl.engines.models.attention import packed_sequences, te_sequences
from mega_rl.engines.models.heads import hidden_outputs
from mega_rl.engines.models.routing import Routing
from mega_rl.parallel.groups import Groups
from mega_rl.types import TokenOutputs

Result = TypeVar("Result")  # a micro-batch's
# (a micro-batch, the last stage's output) -> (loss, unused token count, result)
Finish = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Result]]


@dataclass(frozen=True)
class Schedule:
    """Runs micro-batches forward, and backward where there is a loss, over the pipeline of a layout."""

    config: TransformerConfig
    sharding: Sharding
    groups: Groups
    device: torch.device
    routing: Routing | None  # a mixture's; None for a dense model

    def run(
        self,
        chunks: Sequence[torch.nn.Module],
        micros: list[MicroBatch],
        outputs: Callable[[Tensor, MicroBatch], TokenOutputs],
        *,
        loss: MicrobatchLoss | None,
    ) -> list[Finished]:
        """Return one result for each micro-batch on the last pipeline stage, none elsewhere; collective.

        outputs: of the logits of a micro-batch. With a loss: forward and backward, gradients finalised. Without:
        forward only.
        """
        # With averages the schedule divides a loss by the number of micro-batches and DDP a gradient by its ranks.
        scale = 1 if self.config.calculate_per_token_loss else len(micros) * self.groups.dp_cp.size()
        finish = partial(_finish_microbatch, loss, scale, outputs)
        return self._run(chunks, micros, finish, forward_only=loss is None)

    def hidden_states(self, chunks: Sequence[GPTModel], micros: list[MicroBatch]) -> list[Tensor]:
        """Return each micro-batch's last hidden states, [tokens, H] on the host; none off the last stage."""
        with torch.no_grad(), hidden_outputs(chunks):
            return self._run(chunks, micros, _keep_hidden, forward_only=True)

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        micros: list[MicroBatch],
        finish: Finish[Result],
        *,
        forward_only: bool,
    ) -> list[Result]:
        """Return `finish`'s results for each micro-batch on the last pipeline stage, none elsewhere; collective."""
        layout = self.groups.layout
        # Between stages shapes travel ahead of tensors, and the host waits for them: not where all are the same.
        self.config.variable_seq_lengths = len({micro.tokens.shape for micro in micros}) > 1
        schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp if layout.vpp > 1 else None)
        results: list[Result] = schedule(
            forward_step_func=partial(self._forward_step, chunks, finish),
            data_iterator=[to_device(micros, self.device) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(micros),
            # Upstream divides by cp (and tp).
            seq_length=max(micro.tokens.size(1) for micro in micros) * layout.cp,
            micro_batch_size=micros[0].tokens.size(0),
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.config) if layout.pp > 1 else None,
            pg_collection=self.groups.collection,
        )
        return results

    def _forward_step(
        self,
        chunks: Sequence[torch.nn.Module],
        finish: Finish[Result],
        micros: Iterator[MicroBatch],
        model: torch.nn.Module,
    ) -> tuple[Tensor, Any]:
        """Run the next micro-batch through one chunk; the schedule calls this."""
        micro = next(micros)
        if self.routing is not None:
            self.routing.expect(next(i for i, chunk in enumerate(chunks) if chunk is model), self.device)
        output = model(micro.tokens, micro.position_ids, None, packed_seq_params=self._sequences(micro))
        return output, partial(finish, micro)

    def _sequences(self, micro: MicroBatch) -> PackedSeqParams | None:
        """Return the attention parameters of a packed micro-batch; None of a padded one."""
        if micro.cu_seqlens is None:
            return None
        positions, cp_size = micro.position_ids.flatten(), self.groups.layout.cp
        if self.sharding.spec == "te":
            return te_sequences(micro.cu_seqlens, micro.max_seqlen, positions=positions, cp_size=cp_size)
        return packed_sequences(
            micro.cu_seqlens,
            micro.max_seqlen,
            positions=positions,
            device=self.device,
            cp_rank=self.groups.coordinates.cp_rank,
            cp_size=cp_size,
        )


def _finish_microbatch(
    loss: MicrobatchLoss | None,
    scale: int,
    outputs_of: Callable[[Tensor, MicroBatch], TokenOutputs],
    micro: MicroBatch,
    output: Tensor,
) -> tuple[Tensor, Tensor, Finished]:
    """Return (loss, unused token count, result) of the last stage's output, as the schedule wants it."""
    no_count = torch.zeros([], dtype=torch.int, device=output.device)
    outputs = outputs_of(output.flatten(0, 1), micro)
    if loss is None:
        return output.new_zeros([]), no_count, Finished(micro, outputs, None)
    result = loss(outputs, micro.fields)
    return result.loss * scale, no_count, finished(micro, outputs, result)


def _keep_hidden(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (no loss, unused token count, last hidden states [tokens, H] on the host)."""
    no_count = torch.zeros([], dtype=torch.int, device=output.device)
    return output.new_zeros([]), no_count, output.flatten(0, 1).cpu()
