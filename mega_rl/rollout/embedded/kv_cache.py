"""Key-value cache and attention for generation, where a batch grows by one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "mega_rl_grouped_sdpa"
_FIRST_RESERVE = 64  # tokens


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to spare.

    transformers' own dynamic layer copies everything it holds for each new token; this one writes the token in place
    and doubles its room when it is full, up to `max_tokens` of a row, the most that will come.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self._key_buffer: Tensor | None = None  # [B, kv heads, room, head size]
        self._value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values [B, kv heads, tokens so far, head size] after appending the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, self.num_tokens = self.num_tokens, self.num_tokens + key_states.shape[2]
        room = max(min(self.num_tokens + max(first, _FIRST_RESERVE), self._max_tokens), self.num_tokens)
        self._key_buffer = _with_room(self._key_buffer, key_states, first, self.num_tokens, room)
        self._value_buffer = _with_room(self._value_buffer, value_states, first, self.num_tokens, room)
        self._key_buffer[:, :, first : self.num_tokens] = key_states
        self._value_buffer[:, :, first : self.num_tokens] = value_states
        self.keys = self._key_buffer[:, :, : self.num_tokens]
        self.values = self._value_buffer[:, :, : self.num_tokens]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens held per row."""
        return self.num_tokens

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [R] int64, in that order; a row may be named several times."""
        assert self._key_buffer is not None, "rows selected from an empty cache"
        assert self._value_buffer is not None
        self._key_buffer = self._key_buffer.index_select(0, indices)
        self._value_buffer = self._value_buffer.index_select(0, indices)
        self.keys = self._key_buffer[:, :, : self.num_tokens]
        self.values = self._value_buffer[:, :, : self.num_tokens]


def _with_room(buffer: Tensor | None, like: Tensor, num_held: int, num_needed: int, room: int) -> Tensor:
    """Return `buffer` if it has room for `num_needed` tokens, else one of `room` with the same first `num_held`."""
    if buffer is not None and buffer.shape[2] >= num_needed:
        return buffer
    batch_size, num_heads, _, head_size = like.shape
    larger = like.new_empty(batch_size, num_heads, room, head_size)
    if buffer is not None:
        larger[:, :, :num_held] = buffer[:, :, :num_held]
    return larger


def make_cache(config: PreTrainedConfig, *, max_tokens: int) -> Cache:
    """An empty cache for one batch, whose rows reach `max_tokens` tokens at most.

    Models with other layers than full attention get transformers' own.
    """
    layer_types = config.to_dict().get("layer_types") or ["full_attention"] * config.num_hidden_layers
    if all(layer_type == "full_attention" for layer_type in layer_types):
        return Cache(layers=[GrowingLayer(max_tokens) for _ in layer_types])
    return DynamicCache(config=config)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(attention output [B, queries, heads, head size], None) of grouped-query attention.

    With one query per row, the query heads that share a key head are passed to SDPA as queries of that head:
    nothing is copied. transformers' own function writes every key and value once per query head when there is a mask.
    query: [B, heads, queries, head size]; key, value: [B, kv heads, tokens, head size]; attention_mask: [B, 1, queries,
    tokens] bool or additive, or None.
    """
    batch_size, num_heads, num_queries, head_size = query.shape
    num_kv_heads = key.shape[1]
    if num_queries > 1 or num_heads == num_kv_heads:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    by_group = query.reshape(batch_size, num_kv_heads, num_heads // num_kv_heads, head_size)
    output = torch.nn.functional.scaled_dot_product_attention(
        by_group, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch_size, 1, num_heads, head_size), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
