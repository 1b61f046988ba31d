"""Messages of one micro-batch: the bytes that a rank sends in the forward and the backward of a pipeline stage.

Of an all-gather or reduce-scatter over d ranks a rank sends (d - 1) / d of the whole tensor, of an all-reduce twice
that, of an all-to-all what does not stay; less is impossible, and ring algorithms send as much. Numbers that steer a
step are left out: losses, norms, shapes and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.passes import recompute_of, tokens_of_longest
from mega_rl.plan.setup import PlannedModel, RunSetup

FP32 = 4
Group = Literal["tp", "cp", "dp", "ep", "etp", "experts", "expert dp", "pp", "embedding"]


@dataclass(frozen=True)
class Message:
    """Bytes of one kind in a micro-batch."""

    use: str
    collective: str
    group: Group
    forward: int = 0
    backward: int = 0
    again: int = 0  # in the forward that a backward repeats


def stride_of(layout: ParallelLayout, group: Group) -> int:
    """Return the distance of neighbours in a group, in global ranks."""
    strides: dict[Group, int] = {
        "tp": 1,
        "cp": layout.tp,
        "dp": layout.tp,
        "etp": 1,
        "ep": layout.etp,
        "experts": 1,
        "expert dp": layout.ep * layout.etp,
        "pp": layout.stage_size,
        "embedding": layout.stage_size * (layout.pp - 1),
    }
    return strides[group]


def share(nbytes: int, ranks: int) -> int:
    """Return the part of a tensor that belongs to the other ranks of a group."""
    return nbytes * (ranks - 1) // ranks


def stage_messages(setup: RunSetup, model: PlannedModel, pp_rank: int) -> Iterator[Message]:
    """Yield the messages of a micro-batch on a pipeline rank, its ends included; those of a kind may repeat."""
    layout, recompute = setup.layout, recompute_of(setup)
    stage = _Stage(setup, model, tokens_of_longest(setup))
    if pp_rank == 0:
        yield from stage.embedding()
    for chunk in range(layout.vpp):
        layers = layout.layers_of(pp_rank, model.hf.num_layers, chunk)
        for place, number in enumerate(layers):
            full = recompute.mode == "full" and (not recompute.layers or place < recompute.layers)
            for part, messages in stage.layer(moe=model.hf.is_moe(number)).items():
                repeats = full or recompute.selects(part)
                yield from (_repeated(each) if repeats else each for each in messages)
    if pp_rank == layout.pp - 1:
        yield from stage.head()
    if layout.pp > 1:
        yield stage.pipeline(pp_rank)


def _repeated(message: Message) -> Message:
    return Message(message.use, message.collective, message.group, message.forward, message.backward, message.forward)


@dataclass(frozen=True)
class _Stage:
    """Messages of the parts of a model's stage."""

    setup: RunSetup
    model: PlannedModel
    tokens: int  # of a micro-batch on a rank

    def embedding(self) -> list[Message]:
        """Return the messages of the embedding, whose rows are cut over tensor parallelism."""
        return self._reduce_rows(self.model.hf.hidden_size)

    def head(self) -> list[Message]:
        """Return the messages of the output layer, and of the sums over a vocabulary that is cut."""
        layout = self.setup.layout
        if layout.tp == 1:
            return []
        if self.model.head == "value":
            values = share(self.tokens * FP32, layout.tp)  # whose gradient every rank computes whole
            return [Message("tensor parallelism", "all-gather", "tp", values)] if layout.sequence_parallel else []
        entropy = self.model.role == "actor" and self.setup.config.algorithm.entropy_coef != 0
        one = 2 * share(self.tokens * FP32, layout.tp)
        sums = Message("log-probs", "all-reduce", "tp", 3 * one, one * entropy)  # entropy in training alone
        return [*self._gather_columns(self.model.hf.hidden_size), sums]

    def pipeline(self, pp_rank: int) -> Message:
        """Return the hidden states that a stage passes on, and the gradients that it passes back."""
        layout = self.setup.layout
        per_rank = self.tokens // layout.tp if layout.sequence_parallel else self.tokens
        one = per_rank * self.model.hf.hidden_size * self.setup.itemsize
        ahead = layout.vpp if pp_rank < layout.pp - 1 else layout.vpp - 1
        back = layout.vpp if pp_rank > 0 else layout.vpp - 1
        return Message("pipeline", "send", "pp", one * ahead, one * back)

    def layer(self, *, moe: bool) -> dict[str, list[Message]]:
        """Return the messages of a layer by the part that recomputation repeats together."""
        parts = {"attention": self._projections(), "core_attn": self._context_parallel()}
        if not moe:
            return parts | {"mlp": self._mlp()}
        assert self.model.hf.moe is not None
        shared = self._mlp() if self.model.hf.moe.shared_ffn_hidden_size else []
        return parts | {"moe": [*self._experts(), *shared]}

    def _mlp(self) -> list[Message]:
        return [*self._gather_columns(self.model.hf.hidden_size), *self._reduce_rows(self.model.hf.hidden_size)]

    def _projections(self) -> list[Message]:
        """Return the messages of attention's projections; of latent attention each reads what is before it."""
        mla = self.model.hf.mla
        if mla is None:
            return self._mlp()
        messages = [
            *self._gather_columns(mla.q_lora_rank or self.model.hf.hidden_size),
            *self._gather_columns(mla.kv_lora_rank),
        ]
        if self.setup.layout.tp > 1 and self.setup.layout.sequence_parallel:
            turned = self._ring(mla.qk_rope_head_dim)
            messages.append(Message("tensor parallelism", "all-gather", "tp", turned))
            messages.append(Message("tensor parallelism", "reduce-scatter", "tp", 0, turned))
        return [*messages, *self._reduce_rows(self.model.hf.hidden_size)]

    def _ring(self, width: int) -> int:
        """Return the bytes of a gather or scatter of all tokens over tensor parallelism."""
        return share(self.tokens * width * self.setup.itemsize, self.setup.layout.tp)

    def _gather_columns(self, width: int) -> list[Message]:
        """Return the messages of a linear layer whose rows of weights are cut; `width` is that of its input."""
        layout, ring = self.setup.layout, self._ring(width)
        if layout.tp == 1:
            return []
        if not layout.sequence_parallel:
            return [Message("tensor parallelism", "all-reduce", "tp", 0, 2 * ring)]
        return [
            # The backward gathers the input once more, for the weights' gradient.
            Message("tensor parallelism", "all-gather", "tp", ring, ring),
            Message("tensor parallelism", "reduce-scatter", "tp", 0, ring),
        ]

    def _reduce_rows(self, width: int) -> list[Message]:
        """Return the messages of a linear layer or embedding whose products are sums over ranks."""
        layout, ring = self.setup.layout, self._ring(width)
        if layout.tp == 1:
            return []
        if not layout.sequence_parallel:
            return [Message("tensor parallelism", "all-reduce", "tp", 2 * ring)]
        return [
            Message("tensor parallelism", "reduce-scatter", "tp", ring),
            Message("tensor parallelism", "all-gather", "tp", 0, ring),
        ]

    def _context_parallel(self) -> list[Message]:
        """Return the gathers of keys and values, and the way back of their gradients."""
        hf, layout = self.model.hf, self.setup.layout
        if layout.cp == 1:
            return []
        width = 2 * max(hf.num_kv_heads // layout.tp, 1) * hf.head_dim
        if hf.mla is not None:
            head = hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim + hf.mla.v_head_dim
            width = hf.num_heads // layout.tp * head
        sent = self.tokens * width * self.setup.itemsize * (layout.cp - 1)
        if self.setup.spec == "te":  # a ring, which in the backward carries gradients, too
            return [Message("context parallelism", "send", "cp", sent, 2 * sent)]
        return [
            Message("context parallelism", "all-gather", "cp", sent),
            Message("context parallelism", "all-to-all", "cp", 0, sent),
        ]

    def _experts(self) -> list[Message]:
        """Return the way of tokens to their experts and back, when all experts get alike."""
        hf, layout, b = self.model.hf, self.setup.layout, self.setup.itemsize
        moe, ranks = hf.moe, layout.ep * layout.etp
        assert moe is not None
        if ranks == 1:
            return []
        tokens = self.tokens // layout.tp if layout.sequence_parallel else self.tokens
        if self.setup.config.engine.megatron.moe.dispatcher == "allgather":
            return self._gathered_experts(tokens)
        routed = tokens * moe.top_k
        messages = []
        if layout.ep > 1:
            there = share(routed * (hf.hidden_size * b + FP32), layout.ep)
            back = share(routed * hf.hidden_size * b, layout.ep)
            messages.append(Message("experts", "all-to-all", "ep", there + back, there + back))
        if layout.etp > 1:
            others = layout.etp - 1
            there = routed * (hf.hidden_size * b + FP32) * others
            back = routed * hf.hidden_size * FP32 * others  # sums are in the router's type
            messages.append(Message("experts", "all-gather", "etp", there, back))
            messages.append(Message("experts", "reduce-scatter", "etp", back, there))
        return messages

    def _gathered_experts(self, tokens: int) -> list[Message]:
        """Return the messages of the dispatcher that gathers all tokens on all ranks with experts."""
        hf, layout = self.model.hf, self.setup.layout
        assert hf.moe is not None
        others = layout.ep * layout.etp - 1
        hidden = tokens * hf.hidden_size * self.setup.itemsize * others
        weights = tokens * hf.moe.num_experts * FP32 * others
        choices = tokens * hf.moe.num_experts * others  # a byte each
        combined = tokens * hf.hidden_size * FP32 * others  # sums are in the router's type
        return [
            Message("experts", "all-gather", "experts", hidden + weights + choices, combined),
            Message("experts", "reduce-scatter", "experts", combined, hidden + weights),
        ]
