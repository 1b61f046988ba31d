"""Counter-based random numbers: a draw depends on its key and position, not on rank, time or batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    """Apply SplitMix64's finaliser, a bijection of 64-bit words in which every input bit moves half of the output bits.

    x: any shape, int64; products wrap modulo 2**64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, with the constants of Stafford's variant 13.
    """
    x = (x ^ _logical_shift(x, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    x = (x ^ _logical_shift(x, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return x ^ _logical_shift(x, _SHIFTS[2])


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Return the next state after one more key word. Mixing between words keeps (a, b) and (b, a) apart."""
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


def uniform_at(keys: Tensor, position: Tensor | int) -> Tensor:
    """Return the `position`-th uniform of each stream: float64 in [0, 1) with 53 random bits, in broadcast shape."""
    return _logical_shift(_absorb(keys, position), 11).double() * 2.0**-53
