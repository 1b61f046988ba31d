"""Repetition inside responses."""

from __future__ import annotations

import torch
from torch import Tensor

NGRAM = 8  # tokens; shorter ones come back in any long text
_FACTOR = 6364136223846793005  # odd and large: the hash of n tokens is a polynomial in it modulo 2^64


def repeated_fractions(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return [B] float64: share of a row's n-grams of `NGRAM` response tokens that stood earlier in it.

    tokens: [B, S] int64; mask: [B, S] bool, response tokens: an n-gram with any other token does not count. NaN in rows
    without an n-gram. N-grams are compared by hashes of 64 bits.
    """
    width = tokens.size(1) - NGRAM + 1
    if width < 1 or not len(tokens):
        return torch.full((len(tokens),), torch.nan, dtype=torch.float64)
    hashes = torch.zeros(len(tokens), width, dtype=torch.int64)
    whole = torch.ones(len(tokens), width, dtype=torch.bool)
    for place in range(NGRAM):
        hashes = hashes * _FACTOR + tokens[:, place : place + width].cpu() + 1
        whole &= mask[:, place : place + width].cpu()
    # What does not count becomes one value, which is as if it were one more n-gram that comes back.
    outside = torch.iinfo(torch.int64).max
    hashes = hashes.clamp(max=outside - 1).masked_fill(~whole, outside).sort(dim=1).values
    again = (hashes[:, 1:] == hashes[:, :-1]) & (hashes[:, 1:] != outside)
    count = whole.sum(dim=1).double()
    return again.sum(dim=1).double() / torch.where(count > 0, count, torch.nan)
