"""Sampling that rollout engines share: lengths of responses, random streams, and a token out of logits.

Random numbers are counter-based: a draw depends on its key and position, not on rank, time or batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.types import Draws, Prompt

# Sums of exponentials are kept per block of this many tokens, so that the running sum, the slow part of an inverse-CDF
# draw, is over V/64 blocks and then inside one block only.
_BLOCK = 64
# A nucleus is nearly always found among this many most likely tokens; a whole sort costs ten times more.
_NUCLEUS_CANDIDATES = 512


@dataclass(frozen=True)
class Sampler:
    """Sampling of a token by temperature, top-k and top-p; ties at a cut are all kept."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all

    def draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [B] int64, log-probs [B] float32) of one draw per row.

        logits: [B, V] floating; uniforms: [B] float64 in [0, 1). The log-prob is the full distribution's at the
        temperature, whatever top-k and top-p cut away. A token of probability zero is never drawn.
        """
        exponents, weights = self._exponentials(logits)
        block_sums = _block_sums(weights)
        mass = block_sums.sum(-1, dtype=torch.float64)
        if self.top_k or self.top_p < 1.0:
            weights = self._truncate(weights, mass)
            block_sums = _block_sums(weights)
        tokens = _invert_cdf(weights, block_sums, uniforms)
        return tokens, _logprob(exponents, tokens, mass)

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [B] int64, log-probs [B] float32) of the largest logit, the log-prob at the temperature."""
        tokens = logits.argmax(-1)
        exponents, weights = self._exponentials(logits)
        return tokens, _logprob(exponents, tokens, _block_sums(weights).sum(-1, dtype=torch.float64))

    def _exponentials(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(z - max z, its exponential), both [B, V] float32, of z = logits / temperature."""
        scaled = logits.float()
        if self.temperature != 1.0:
            scaled = scaled / self.temperature
        exponents = scaled - scaled.amax(-1, keepdim=True)
        return exponents, exponents.exp()

    def _truncate(self, weights: Tensor, mass: Tensor) -> Tensor:
        """Return `weights` [B, V] with tokens outside top-k and then outside the nucleus at zero."""
        vocab_size = weights.shape[1]
        if 0 < self.top_k < vocab_size:
            ranked = weights.topk(self.top_k).values
            mass = ranked.sum(-1, dtype=torch.float64)
        else:
            ranked = weights.topk(min(_NUCLEUS_CANDIDATES, vocab_size)).values
            if bool((ranked.sum(-1, dtype=torch.float64) < self.top_p * mass).any()):
                ranked = weights.sort(descending=True).values
        threshold = ranked[:, -1:]
        if self.top_p < 1.0:
            # A token is in the nucleus when those above it do not yet hold the wanted mass.
            sizes, unit = _fixed_point(ranked)
            above = (sizes.cumsum(-1) - sizes) * unit
            num_kept = (above < self.top_p * mass[:, None]).sum(-1, keepdim=True)
            threshold = ranked.gather(-1, (num_kept - 1).clamp(min=0))
        return torch.where(weights >= threshold, weights, 0.0)


def _logprob(exponents: Tensor, tokens: Tensor, mass: Tensor) -> Tensor:
    """[B] float32 log-softmax at `tokens`."""
    return (exponents.gather(1, tokens[:, None])[:, 0].double() - mass.log()).float()


def _block_sums(weights: Tensor) -> Tensor:
    """[B, ceil(V / 64)] float32 sums of neighbouring tokens."""
    num_whole, rest = divmod(weights.shape[1], _BLOCK)
    sums = weights[:, : num_whole * _BLOCK].unflatten(1, (num_whole, _BLOCK)).sum(-1)
    if not rest:
        return sums
    return torch.cat([sums, weights[:, num_whole * _BLOCK :].sum(-1, keepdim=True)], dim=1)


def _fixed_point(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weights` [B, N], at least 0, as int64 multiples of a unit [B, 1] float64.

    The largest of a row has 53 bits, or as many as keep the row's sum below 2**62. Running sums of integers are the
    same in every order and on every device, unlike those of floating-point numbers.
    """
    largest = weights.amax(-1, keepdim=True).double()
    unit = largest * 2.0 ** -min(53, 62 - weights.shape[1].bit_length())
    return (weights.double() / unit).round().long(), unit


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return (index [B] int64 at which the running sum passes `uniforms`, uniform [B] within the element).

    weights: [B, N] floating, at least 0 and not all 0; uniforms: [B] float64 in [0, 1). The element's weight is
    positive.
    """
    sizes, _ = _fixed_point(weights)
    ends = sizes.cumsum(-1)
    target = uniforms * ends[:, -1]  # in float64, where it may be rounded up to the end
    whole = torch.minimum(target.long(), ends[:, -1] - 1)
    index = torch.searchsorted(ends, whole[:, None], right=True).clamp(max=weights.shape[1] - 1)
    size = sizes.gather(1, index)[:, 0]
    start = ends.gather(1, index)[:, 0] - size
    return index[:, 0], ((target - start) / size).clamp(0.0, 1.0 - 2.0**-53)


def _invert_cdf(weights: Tensor, block_sums: Tensor, uniforms: Tensor) -> Tensor:
    """[B] int64, the token where the running sum of `weights` passes `uniforms` times their total.

    weights: [B, V] float32, not negative; block_sums: [B, ceil(V / 64)]; uniforms: [B] float64 in [0, 1).
    """
    block, within = _invert(block_sums, uniforms)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    in_vocab = ids < weights.shape[1]
    inside = torch.where(in_vocab, weights.gather(1, ids.clamp(max=weights.shape[1] - 1)), 0.0)
    offset, _ = _invert(inside, within)
    return ids.gather(1, offset[:, None])[:, 0].clamp(max=weights.shape[1] - 1)


_MASK_64 = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(word: int) -> int:
    """Return the int64 with the bits of `word` modulo 2**64."""
    word &= _MASK_64
    return word - (1 << 64) if word >> 63 else word


def _logical_shift(x: Tensor, shift: int) -> Tensor:
    """Shift int64 right as unsigned; torch's own repeats the sign bit."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser, a 64-bit bijection; each input bit flips half of the output bits.

    x: any shape, int64; products wrap modulo 2**64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, with the constants of Stafford's variant 13.
    """
    x = (x ^ _logical_shift(x, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    x = (x ^ _logical_shift(x, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return x ^ _logical_shift(x, _SHIFTS[2])


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Return the next state after a key word; mixing keeps (a, b) and (b, a) apart."""
    return _mix((state ^ word) + _signed(_WEYL))


def stream_keys(seed: Sequence[int], *words: Tensor) -> Tensor:
    """Return the key of each stream, int64 in the broadcast shape of `words`.

    seed: any integers, any number of them; words: int64 tensors, one per further coordinate (prompt, sample, ...).
    """
    device = words[0].device if words else None
    state = torch.zeros((), dtype=torch.int64, device=device)
    for number in (len(seed), *seed):
        state = _absorb(state, _signed(int(number)))
    for word in words:
        state = _absorb(state, word)
    return state


def turn_keys(seed: Sequence[int], prompts: Tensor, samples: Tensor, numbers: Tensor) -> Tensor:
    """Return the key of each turn, [R] int64; a first turn's is that of a response."""
    keys = stream_keys(seed, prompts, samples)
    return torch.where(numbers > 0, _absorb(keys, numbers), keys)


def uniform_at(keys: Tensor, position: Tensor | int) -> Tensor:
    """Return each stream's `position`-th uniform: float64 in [0, 1), 53 random bits, broadcast shape."""
    return _logical_shift(_absorb(keys, position), 11).double() * 2.0**-53


def response_limit(prompts: Sequence[Prompt], draws: Draws | None, *, max_new_tokens: int, max_positions: int) -> int:
    """Return the most tokens of a response, the evaluation's or the run's.

    max_positions: the model's, prompt and response together.

    Raises UserError for prompts that are empty or leave no room for a response.
    """
    limit = max_new_tokens if draws is None else draws.max_new_tokens or max_new_tokens
    check_positions(max((len(prompt.token_ids) for prompt in prompts), default=0), limit, max_positions=max_positions)
    empty = [prompt.index for prompt in prompts if not prompt.token_ids]
    if empty:
        raise UserError(f"prompts without tokens, data set rows {empty[:8]}: a prompt needs one token; remove them")
    return limit


def check_positions(longest: int, limit: int, *, max_positions: int) -> None:
    """Raise UserError unless the model has positions for the longest prompt and its response."""
    if longest + limit > max_positions:
        raise UserError(
            f"the longest prompt has {longest} tokens and its response up to {limit}: together more than the model's "
            f"max_position_embeddings={max_positions}; lower data.max_prompt_tokens or the length of responses, "
            "rollout.max_new_tokens or validation.max_new_tokens"
        )


def is_greedy(greedy: bool, draws: Draws | None) -> bool:
    """Return whether rollouts take the most likely tokens: if greedy, or evaluating at temperature 0."""
    return greedy or (draws is not None and not draws.temperature)
