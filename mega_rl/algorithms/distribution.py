"""Moments, extremes and quantiles of numbers that are spread over ranks, without gathering them.

A rank's `summary` and `histogram` are vectors: summaries are put side by side and histograms are added up, both in one
sum over the ranks. The histogram is one for all numbers: 64 bins for every doubling of the absolute value from 2^-24 to
2^24, for both signs, and one for what is nearer 0. A quantile is the middle of its bin, within the extremes: its error
is at most 1/128 of the value, for values between those bounds, and 2^-24 below them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SUMMARY = 5  # count, mean, sum of squared distances to it, lowest, highest
_PER_DOUBLING = 6  # bits: the leading ones of a float32's fraction
_SHIFT = 23 - _PER_DOUBLING
_FIRST = (127 - 24) << _PER_DOUBLING  # leading bits of 2^-24
_HALF = 48 << _PER_DOUBLING  # bins of one sign
BINS = 2 * _HALF + 1
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}  # of tokens


def summary(x: Tensor) -> Tensor:
    """Return [SUMMARY] float64 of numbers [n]."""
    if not x.numel():
        return torch.zeros(SUMMARY, dtype=torch.float64)
    x = x.double()
    mean = x.mean()
    return torch.stack([torch.tensor(float(len(x))).double(), mean, (x - mean).square().sum(), x.min(), x.max()])


def histogram(x: Tensor) -> Tensor:
    """Return [BINS] float64, the number of elements of x, [n] floating, in each bin; from the lowest bin on."""
    return torch.bincount(_places(x), minlength=BINS).double()


def histogram_where(x: Tensor, chosen: Tensor) -> Tensor:
    """Return `histogram` of the elements of x that are chosen; it stays on the device, which nothing waits for.

    x: floating; chosen: bool of its shape.
    """
    counts = torch.zeros(BINS, dtype=torch.float64, device=x.device)
    return counts.scatter_add_(0, _places(x.flatten()), chosen.flatten().double())


def _places(x: Tensor) -> Tensor:
    """Return the bin of each number, [n] int64."""
    bits = x.float().abs().contiguous().view(torch.int32) >> _SHIFT
    places = (bits - _FIRST + 1).clamp(min=0, max=_HALF).long()
    return _HALF + torch.where(x < 0, -places, places)


def combine(summaries: Tensor, counts: Tensor, *, quantiles: Mapping[str, float]) -> dict[str, float]:
    """Return "std", "min", "max" and the quantiles by their names over all ranks; empty without numbers.

    summaries: [ranks, SUMMARY], of each rank; counts: [BINS], the sum of all histograms. The deviation is the
    population's. A quantile q is that of the number of rank ceil(q * count).
    """
    count, mean, squares, low, high = summaries[summaries[:, 0] > 0].unbind(dim=1)
    total = count.sum()
    if not total:
        return {}
    overall = (count * mean).sum() / total
    variance = (squares + count * (mean - overall).square()).sum() / total
    lowest, highest = float(low.min()), float(high.max())
    points = {name: min(max(point, lowest), highest) for name, point in points_of(counts, quantiles=quantiles).items()}
    return {"std": math.sqrt(float(variance)), "min": lowest, "max": highest} | points


def points_of(counts: Tensor, *, quantiles: Mapping[str, float]) -> dict[str, float]:
    """Return the quantiles of a histogram, [BINS] on the host, by their names; empty without numbers."""
    below = counts.cumsum(0)
    total = float(below[-1])
    points = {}
    for name, share in quantiles.items() if total else ():
        place = torch.tensor([math.ceil(share * total - 1e-9)], dtype=below.dtype).clamp(min=1.0)
        points[name] = _middle(int(torch.searchsorted(below, place)))
    return points


def _middle(place: int) -> float:
    """Return the middle of a bin."""
    distance = abs(place - _HALF)
    if distance == 0:
        return 0.0
    doubling, part = divmod(distance - 1, 1 << _PER_DOUBLING)
    value = math.ldexp(1.0 + (part + 0.5) / (1 << _PER_DOUBLING), doubling - 24)
    return math.copysign(value, place - _HALF)
