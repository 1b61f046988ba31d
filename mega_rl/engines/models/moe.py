"""Parts of a mixture of experts: router, token dispatcher, and the experts' second linear layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor
from torch.nn.functional import linear

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class RoutedTokens:
    """The n tokens of one micro-batch that this rank's routers see, in their order.

    `replay` and `chosen` are keyed by the number of the layer among the model's mixtures. Behind the last of those come
    the indexers of sparse attention, whose choices are [b, S, k] int64 columns of the micro-batch.
    """

    real: Tensor  # [n] bool, False on padding
    sequence: Tensor  # [n] int64, number of the token's row in the micro-batch; 0 on padding
    lengths: Tensor  # [rows] float32, tokens of each whole row
    training: bool  # a backward follows
    balance_weight: float = 0.0  # weight of each row's balance loss; 0: there is none
    replay: dict[int, Tensor] = field(default_factory=dict)  # [n, top_k] int16, -1 where the router is to choose
    chosen: dict[int, Tensor] | None = None  # [n, top_k] int16, what the routers took; None: not asked for


class Expecting:
    """A module that is told the tokens of its forwards, and again when one is recomputed."""

    number = 0  # number of its choice in `RoutedTokens`

    def reset(self) -> None:
        """Forget every expected token: a new mini-batch begins."""
        self._expected: RoutedTokens | None = None
        self._again: deque[RoutedTokens] = deque()

    def expect(self, tokens: RoutedTokens | None) -> None:
        """Set the tokens of the next forward pass; None makes it upstream's module."""
        self._expected = tokens

    def _tokens(self) -> RoutedTokens | None:
        """Return the tokens of the present forward, which `expect` has announced; None without them.

        The first pass over a layer that is recomputed runs without gradients. The backward comes back to it later, when
        other micro-batches may have been expected meanwhile, but in the order of the first passes.
        """
        tokens = self._expected
        if tokens is None or not tokens.training:
            return tokens
        if not torch.is_grad_enabled():
            self._again.append(tokens)
            return tokens
        return self._again.popleft() if self._again else tokens


class Router(Expecting, TopKRouter):
    """Top-k router of Megatron-Core that can replay choices, and counts and balances real tokens only.

    The caller announces the tokens of each forward (`expect`); without that it is upstream's router.
    Upstream's own replay and counts know neither padding nor pipelines in which forwards run ahead of recomputation,
    and its balance loss is scaled for gradients that are divided by a token count at the end.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **place: bool
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **place)  # from 0.18: is_mtp_layer
        self.weight_floor: float | None = getattr(config, "moe_router_weight_floor", None)
        if self.weight_floor is not None:
            del self.expert_bias  # upstream's None
            self.register_buffer("expert_bias", torch.zeros(1, self.num_experts, dtype=torch.float32))
        self.router_replay: _Choice | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every expected token, count and loss: a new mini-batch begins."""
        super().reset()
        self.loads: Tensor | None = None  # [experts] int64, real tokens of this rank; None before the first
        self.balance_loss: Tensor | None = None  # scalar float32, this rank's share

    def gating(self, input: Tensor) -> Tensor:
        """[..., experts] logits of `config.moe_router_dtype` from hidden states [..., H].

        Upstream uses Transformer Engine's matrix product or, where that is not installed, an undefined name.
        """
        if moe_utils.HAVE_TE:
            logits: Tensor = super().gating(input)
            return logits
        dtype = DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(input.to(dtype), self.weight.to(dtype), bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights [n, experts], 0 unless chosen; chosen [n, experts] bool) of logits [S, B, experts]."""
        tokens = self._tokens()
        if tokens is not None:
            assert len(tokens.real) == logits[..., 0].numel(), f"{len(tokens.real)} tokens expected, not {logits.shape}"
        if tokens is not None or self.weight_floor is not None:
            bias = None if self.weight_floor is None else self.expert_bias
            self.router_replay = _Choice(tokens, self.number, bias, self.weight_floor)
        probs, chosen = super().routing(logits)
        self.router_replay = None
        if tokens is None or not (tokens.training and torch.is_grad_enabled()):
            return probs, chosen
        real = chosen & tokens.real[:, None]
        counts = real.sum(0)
        self.loads = counts if self.loads is None else self.loads + counts
        if not tokens.balance_weight:
            return probs, chosen
        loss = self._balance(logits.flatten(0, 1), real, tokens)
        share = loss.detach()
        self.balance_loss = share if self.balance_loss is None else self.balance_loss + share
        return _WithLoss.apply(probs, loss), chosen

    def _balance(self, logits: Tensor, chosen: Tensor, tokens: RoutedTokens) -> Tensor:
        """Return this rank's share of the balance loss, weighted: a scalar float32.

        Of a row of T tokens: E / (k T^2) sum_e count_e sum_t score_te, which is 1 where all E experts get alike
        (DeepSeek-V3, arXiv:2412.19437, equations 17-20; `count` is of the experts in fact chosen).
        """
        if self.score_function == "softmax":
            scores = logits.softmax(-1, dtype=torch.float32)
        else:
            raw = logits.float().sigmoid()
            scores = raw / raw.sum(-1, keepdim=True)
        counts = scores.new_zeros(len(tokens.lengths), self.num_experts)
        counts.index_add_(0, tokens.sequence, chosen.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        factor = tokens.balance_weight * self.num_experts / (self.topk * tokens.lengths.square())
        per_token = (scores * (counts * factor[:, None])[tokens.sequence]).sum(-1)
        return (per_token * tokens.real).sum()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: `loads` has the counts, and the bias moves after the optimizer's step."""


@dataclass(frozen=True)
class _Choice:
    """Choice of experts that Megatron-Core's routing calls in place of its top-k.

    Megatron-Core's softmax knows no corrections: with them the weights are normalised here.
    """

    tokens: RoutedTokens | None  # None: nothing is replayed or kept
    mixture: int
    bias: Tensor | None  # [1, experts] float32, corrections of a softmax
    weight_floor: float | None  # least divisor of corrected weights

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, top_k: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores [n, k], experts [n, k] int64) of scores [n, experts]; gradients reach replayed experts' too."""
        corrected = scores if self.bias is None else scores + self.bias
        values, experts = top_k(corrected, topk, num_groups=num_groups, group_topk=group_topk)
        replay = None if self.tokens is None else self.tokens.replay.get(self.mixture)
        if replay is not None:
            experts = torch.where(replay[:, :1] < 0, experts, replay.long())
        if replay is not None or self.bias is not None:
            values = scores.gather(1, experts)
        if self.weight_floor is not None:
            values = values / values.sum(-1, keepdim=True).clamp(min=self.weight_floor)
        if self.tokens is not None and self.tokens.chosen is not None:
            self.tokens.chosen[self.mixture] = experts.to(torch.int16)
        return values, experts


class _WithLoss(torch.autograd.Function):
    """Identity on a tensor; its backward also gives a scalar loss the gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Token dispatcher by all-gather for ranks with different numbers of tokens.

    Expert-parallel ranks may be data-parallel ones, whose packed micro-batches are not equally long, and upstream's
    gathering takes equal parts for granted. The shorter ranks add tokens that go to no expert.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden states [n', H], weights [n', experts]); n' is the group's largest number of tokens."""
        tokens, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._held = tokens.size(0)
        if self.tp_size * self.ep_size > 1:
            most = torch.tensor(self._held, device=tokens.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
            missing = int(most) - self._held
            self.routing_map = _with_rows(routing_map, missing)
            return _with_rows(tokens, missing), _with_rows(probs, missing)
        return tokens, probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return [n, H] of this rank's own tokens, summed over the experts' ranks."""
        combined: Tensor = super().token_combine(hidden_states)
        return combined[: self._held]


def _with_rows(tensor: Tensor, missing: int) -> Tensor:
    """Return [n, ...] with `missing` rows of zeros (False) appended."""
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def use_own_dispatchers(model: torch.nn.Module, collection: ProcessGroupCollection) -> None:
    """Put `AllGatherDispatcher` in the place of Megatron-Core's in every mixture that dispatches by gathering."""
    for module in model.modules():
        if isinstance(module, MoELayer) and module.config.moe_token_dispatcher_type == "allgather":
            module.token_dispatcher = AllGatherDispatcher(
                module.num_local_experts, module.local_expert_indices, config=module.config, pg_collection=collection
            )


class ExpertRowParallelLinear(RowParallelLinear):
    """Second linear layer of an expert; the dispatcher adds its partial sums, also on one rank.

    On a single rank upstream's passes its output through a reduction that does nothing but make it a view, to which
    the expert's bias can then not be added in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
