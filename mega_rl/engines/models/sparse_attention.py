"""Sparse attention of Megatron-Core (DSA): each token sees the `top_k` tokens that an indexer chooses."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from torch import Tensor
from torch.nn.functional import linear

from mega_rl.engines.models.attention import PackedSequences
from mega_rl.engines.models.moe import Expecting

KEY_NORM_EPS = 1e-6  # built into the architecture's code


class KeyNorm(torch.nn.LayerNorm):
    """LayerNorm of the indexer's keys, with the arguments that Megatron-Core passes to a norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=KEY_NORM_EPS, dtype=config.params_dtype)


class HeadWeights(Linear):
    """Projection to the weights of the indexer's heads, in float32 as in transformers."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return ([..., heads] float32 of [..., H], no bias)."""
        return linear(x.float(), self.weight.float()), None


class SparseAttention(Expecting, DSAttention):
    """Core attention over the tokens that the indexer chooses, a choice for all heads.

    Packed tokens choose within their own sequence. The choice has no gradient, and so the indexer keeps its weights:
    it has neither gradients nor optimizer state. Where the caller announces tokens, the choice is replayed or recorded
    as another layer's of upstream, which looks it up instead of its indexer's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.indexer.requires_grad_(False)
        self.reset()

    def forward(
        self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> Tensor:  # arguments of `DSAttention.forward`
        """Return [S, B, heads*E], or [T, 1, heads*E] of packed tokens; rows are right-padded."""
        if packed_seq_params is not None:
            assert isinstance(packed_seq_params, PackedSequences)
            packed_seq_params = packed_seq_params.by_sequence
        tokens = self._tokens()
        replay = None if tokens is None else tokens.replay.get(self.number)
        self.index_share, self.skip_topk = tokens is not None, replay is not None
        self._choice = {} if replay is None else {self.layer_number: replay}
        context: Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if tokens is not None and tokens.chosen is not None:
            tokens.chosen[self.number] = self._choice[self.layer_number]
        self._choice = {}
        return context

    def _get_index_share_topk_holder(self, *args: Any) -> dict[int, Tensor]:
        return self._choice

    def _get_index_share_topk_length_holder(self, *args: Any) -> dict[int, Tensor]:
        return {}


def sparse_attention_spec() -> ModuleSpec:
    """Return the spec of sparse attention, whose indexer every tensor-parallel rank holds whole."""
    parts = {"linear_wq_b": Linear, "linear_wk": Linear, "k_norm": KeyNorm, "linear_weights_proj": HeadWeights}
    indexer = ModuleSpec(module=DSAIndexer, submodules=DSAIndexerSubmodules(**parts))
    submodules = DSAttentionSubmodules(indexer=indexer)
    return ModuleSpec(module=SparseAttention, submodules=submodules)
