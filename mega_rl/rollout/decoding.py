"""Decoding loop of the embedded rollout engine, with a key-value cache that grows in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mega_rl.converters.hf.config import needs_proof
from mega_rl.converters.hf.small import random_model, random_rows, shrink
from mega_rl.converters.hf.untabled import FOREIGN, accepted
from mega_rl.errors import UserError
from mega_rl.parallel.vocab import hide
from mega_rl.rollout.sampling import Sampler, uniform_at
from mega_rl.tracking import progress
from mega_rl.types import IdRanges

# Finished rows leave the batch when at least this share of it is finished: each removal copies the cache once.
SHRINK_SHARE = 0.25
# Tokens from one look at who is finished to the next. On a GPU the host waits for the device to look, and a finished
# row costs little; on a CPU a finished row costs as much as any other.
CHECK_TOKENS = {"cpu": 1}
_CHECK_TOKENS_ON_DEVICE = 16
# (logits [R, V], streams [R] int64, positions [R] or one for all) -> (tokens [R] int64, log-probs [R] float32)
Draw = Callable[[Tensor, Tensor, Tensor | int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Decoded:
    """Responses of one batch: R rows of at most N tokens, meaningless past a row's length."""

    tokens: Tensor  # [R, N] int64
    logprobs: Tensor  # [R, N] float32
    lengths: Tensor  # [R] int64
    finished: Tensor  # [R] bool


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], prompt_of_row: Tensor, keys: Tensor, *,
    draw: Draw, max_new_tokens: int, stop_token_ids: Tensor, hidden: IdRanges = (),
) -> Decoded:  # fmt: skip
    """Return a response for each row: read each prompt once, then sample the rows that continue it.

    Of transformers it needs a model's forward and a cache (`make_cache`). transformers' own `generate` draws V random
    numbers per row and token from the global generator, which costs more than the model on a CPU and ties a sample to
    its batch, and it computes finished rows to the end.

    prompt_of_row: [R] int64, into `prompts`; keys: [R] int64, random stream of each row; stop_token_ids: int64, any
    number of them; hidden: tokens that are never chosen.
    """
    num_rows, device = prompt_of_row.shape[0], prompt_of_row.device
    tokens = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(num_rows, max_new_tokens, dtype=torch.float32, device=device)
    lengths = torch.full((num_rows,), max_new_tokens, dtype=torch.int64, device=device)
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    check_tokens = check_interval(device)
    rows = torch.arange(num_rows, device=device)  # row of the result that each row of the shrinking batch fills
    input_ids, mask = left_padded(prompts, device)
    width = input_ids.shape[1]
    cache = make_cache(model.config, max_tokens=width + max_new_tokens)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = forward(model, cache, input_ids, mask, positions, hidden=hidden)[prompt_of_row]
    select_rows(cache, prompt_of_row)
    mask = nn.functional.pad(mask, (0, max_new_tokens), value=1)[prompt_of_row]
    positions = positions[prompt_of_row, -1:] + 1
    for step in range(max_new_tokens):
        progress.note(f"token {step + 1}/{max_new_tokens}")
        drawn, tokens_logprobs = draw(logits, keys[rows], step)
        tokens[rows, step], logprobs[rows, step] = drawn, tokens_logprobs
        newly = (drawn[:, None] == stop_token_ids).any(-1) & ~finished[rows]
        lengths[rows] = torch.where(newly, step + 1, lengths[rows])
        finished[rows] |= newly
        if step + 1 == max_new_tokens:
            break
        if (step + 1) % check_tokens == 0:
            keep = (~finished[rows]).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) <= (1.0 - SHRINK_SHARE) * len(rows):
                select_rows(cache, keep)
                rows, drawn, mask, positions = rows[keep], drawn[keep], mask[keep], positions[keep]
        seen = mask[:, : width + step + 1]
        logits = forward(model, cache, drawn[:, None], seen, positions + step, hidden=hidden)
    return Decoded(tokens=tokens, logprobs=logprobs, lengths=lengths, finished=finished)


def forward(
    model: PreTrainedModel, cache: Cache, input_ids: Tensor, mask: Tensor, positions: Tensor, *, hidden: IdRanges
) -> Tensor:
    """Return the logits of the last token, [rows, V]; the cache grows by the tokens.

    input_ids, positions: [rows, N]; mask: [rows, tokens of the cache, then N]; hidden: tokens that are never chosen.
    """
    arguments = {
        "attention_mask": mask,
        "position_ids": positions,
        "use_cache": True,
        "logits_to_keep": 1,
        cache_argument(model): cache,
    }
    output = model(input_ids, **accepted(model, arguments))
    return hide(output.logits[:, -1], hidden)


def check_interval(device: torch.device) -> int:
    """Return the tokens from one look at who is finished to the next."""
    return CHECK_TOKENS.get(device.type, _CHECK_TOKENS_ON_DEVICE)


def left_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return left-padded (tokens, mask), both [P, L] int64 and 0 on padding."""
    rows = [torch.tensor(sequence, dtype=torch.int64, device=device) for sequence in sequences]
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded(rows), padded([torch.ones_like(row) for row in rows])


ATTENTION = "mega_rl_grouped"  # a name with "sdpa" is refused for models with sinks
DECODING_TOLERANCE = 1e-3  # log-probs in float32; padding or another row gives 0.1 and more
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
        self._buffers = list[Tensor]()  # of keys and of values, [B, kv heads, room, head size]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all so far, [B, kv heads, tokens so far, head size]."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
        first, self.num_tokens = self.num_tokens, self.num_tokens + key_states.shape[2]
        room = max(min(self.num_tokens + max(first, _FIRST_RESERVE), self._max_tokens), self.num_tokens)
        if first == 0 or self._buffers[0].shape[2] < self.num_tokens:
            larger = [states.new_empty(*states.shape[:2], room, states.shape[3]) for states in new]
            for buffer, held in zip(larger, self._buffers, strict=False):  # the first time nothing is held
                buffer[:, :, :first] = held[:, :, :first]
            self._buffers = larger
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, first : self.num_tokens] = states
        return self._held()

    def _held(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, : self.num_tokens] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens held per row."""
        return self.num_tokens

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [R] int64, in that order; a row may be named several times."""
        assert self._buffers, "rows selected from an empty cache"
        self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
        self._held()


def make_cache(config: PreTrainedConfig, *, max_tokens: int) -> Cache:
    """An empty cache for one batch, whose rows reach `max_tokens` tokens at most.

    Models with other layers than full attention get transformers' own.
    """
    if has_full_attention(config):
        return Cache(layers=[GrowingLayer(max_tokens) for _ in range(config.num_hidden_layers)])
    return DynamicCache(config=config)


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Return whether all layers attend to all tokens, in a way that needs no proof."""
    layer_types = config.to_dict().get("layer_types") or []
    return not needs_proof(config.to_dict()) and all(layer_type == "full_attention" for layer_type in layer_types)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which a model's forward takes its cache: "cache" from transformers 5.24."""
    names = signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")


def select_rows(cache: Cache, indices: Tensor) -> None:
    """Keep the rows `indices` [R] int64 of a cache, in that order and repeated as named."""
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        cache.reorder_cache(cast(torch.LongTensor, indices))
    else:
        cache.batch_select_indices(indices)


@dataclass(frozen=True)
class Way:
    """Attention and padding of decoding."""

    attention: str
    left_padded: bool  # a batch has prompts of several lengths


def prove_decoding(config: PreTrainedConfig, device: torch.device) -> Way:
    """Return how cached decoding equals the uncached forward of single rows, on a small model.

    Raises UserError: it does not, or the model has no cache.
    """
    why = "it cannot be built small"
    for way in (Way(name, padded) for padded in (True, False) for name in (ATTENTION, "sdpa", "eager")):
        try:
            small = shrink(config)
            far = _decoding_error(small, way, device)
        except FOREIGN as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            continue
        if far <= DECODING_TOLERANCE:
            return way
        why = f"log-probs differ by {far:.1e}"
    raise UserError(
        f"rollout.backend=hf: model_type={config.model_type}: decoding with transformers' cache is not its forward "
        f"({why}); set rollout.backend=sglang, or take another model"
    )


@torch.inference_mode()
def _decoding_error(small: PreTrainedConfig, way: Way, device: torch.device) -> float:
    """Return the largest difference of decoded log-probs from those of the uncached forward."""
    lengths = (9, 6) if way.left_padded else (9, 9)
    prompts, of_row = random_rows(lengths, device=device), torch.tensor([0, 1, 1], device=device)
    sampler = Sampler(temperature=1.0, top_p=1.0, top_k=0)
    decoded = decode(
        random_model(small, attention=way.attention, device=device),
        [prompt.tolist() for prompt in prompts],
        of_row,
        torch.arange(3, device=device),
        draw=lambda logits, keys, position: sampler.draw(logits, uniform_at(keys, position)),
        max_new_tokens=6,
        stop_token_ids=torch.tensor([], dtype=torch.int64, device=device),
    )
    judge, worst = random_model(small, attention="eager", device=device), 0.0
    for row, prompt in enumerate(of_row.tolist()):
        tokens = torch.cat([prompts[prompt], decoded.tokens[row]])
        logits = judge(tokens[None], **accepted(judge, {"use_cache": False})).logits[0]
        expected = logits[lengths[prompt] - 1 : -1].float().log_softmax(-1)
        expected = expected.gather(1, decoded.tokens[row][:, None])[:, 0]
        worst = max(worst, float((expected - decoded.logprobs[row]).abs().nan_to_num(nan=float("inf")).max()))
    return worst


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(attention output [B, queries, heads, head size], None) of grouped-query attention.

    With one query per row, the query heads that share a key head are passed to SDPA as queries of that head:
    nothing is copied. transformers' own function writes every key and value once per query head when there is a mask.
    query: [B, heads, queries, head size]; key, value: [B, kv heads, tokens, head size]; attention_mask: [B, 1, queries,
    tokens] bool, or None for causality; s_aux: [heads], logits of sinks, which take attention and give nothing.
    """
    if s_aux is not None:
        return _attention_with_sinks(query, key, value, attention_mask, s_aux, scaling), None
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


def _attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scaling: float | None
) -> Tensor:
    """Return the output of `grouped_attention`; a sink is a key of zeros with a mask entry."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    shape = (len(bias), len(sinks), queries)
    bias = torch.cat([bias.expand(*shape, -1), sinks.to(bias)[:, None, None].expand(*shape, 1)], dim=-1)
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
