"""Numbers of tokens that are spread over ranks: moments, whitening, quantiles, sums over sequences.

Nothing is gathered. A rank's `summary` and `histogram` are vectors: summaries are put side by side and histograms are
added up, both in one sum over the ranks. The histogram is one for all numbers: 64 bins for every doubling of the
absolute value from 2^-24 to 2^24, for both signs, and one for what is nearer 0. A quantile is the middle of its bin,
within the extremes: its error is at most 1/128 of the value, for values between those bounds, and 2^-24 below them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself, the sum over a group of one rank."""
    return tensor


def global_moments(x: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity) -> tuple[Tensor, Tensor]:
    """Return mean and population variance of `x[mask]` over all ranks, scalar float64 tensors.

    x: any shape, floating; mask: same shape, bool. Two passes (the mean first, then squared distances to it) with
    float64 sums, because E[x^2] - E[x]^2 loses every digit when the mean is large against the spread. `sum_over_ranks`
    is called exactly twice, also by a rank without tokens, with float64 tensors of shape [2] and [1]. An empty global
    batch has mean and variance 0.
    """
    masked = torch.where(mask, x.double(), 0.0)
    count, total = sum_over_ranks(torch.stack([mask.sum().double(), masked.sum()])).unbind()
    safe_count = count.clamp(min=1.0)
    mean = total / safe_count
    squares = torch.where(mask, (masked - mean).square(), 0.0).sum()
    variance = sum_over_ranks(squares.reshape(1))[0] / safe_count
    return mean, variance


def whiten(x: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity, eps: float = 1e-8) -> Tensor:
    """Return `x` with mean 0 and variance 1 over the global batch; 0 off the mask.

        y = (x - mean) / sqrt(variance + eps)

    x [B, S] float32, mask [B, S] bool -> [B, S] float32. The variance is the population's (divided by the count): the
    tokens at hand are the whole batch, not a sample of one, and a batch of one token gives 0 instead of 0/0. N ranks
    give what one rank holding all rows gives, up to the order of float64 sums.
    Source: per-batch advantage normalisation of PPO implementations (Andrychowicz et al. 2021, arXiv:2006.05990, C67).
    """
    mean, variance = global_moments(x, mask, sum_over_ranks=sum_over_ranks)
    y = (x.double() - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, y, 0.0).to(torch.float32)


@dataclass(frozen=True)
class Sequences:
    """Response tokens of a micro-batch by their sequence.

    Sequences are the n rows of a data-parallel rank's mini-batch, of which a micro-batch has some, and none in part: a
    sum over one that is elsewhere is 0. n comes from the host, so no sum waits for the device.

    A loss remains a sum over tokens. It reads a sequence's number on each of its tokens (`spread`) and never adds up
    what `sum` returns, which every context-parallel rank has.
    """

    rows: Tensor  # [1, T] or [b, S] int64, number of the sequence from 1 on response tokens, 0 elsewhere
    count: int  # n
    # sum over the ranks that share these sequences, differentiable (`mega_rl.parallel.comm`)
    sum_over_context: Callable[[Tensor], Tensor] = identity

    def sum(self, x: Tensor) -> Tensor:
        """Return [n] in `x`'s dtype: its sum over each sequence's response tokens on all ranks.

        `x` has the shape of `rows` and is floating. Differentiable; collective under context parallelism. What stands
        off the response tokens, even a NaN, touches neither sums nor gradient.
        """
        assert x.shape == self.rows.shape, f"x is {tuple(x.shape)}, the micro-batch {tuple(self.rows.shape)}"
        if self.count == 0:
            return x.new_zeros(0)
        sums = x.new_zeros(self.count + 1).index_add(0, self.rows.flatten(), x.flatten())
        return self.sum_over_context(sums[1:])

    def mean(self, x: Tensor) -> Tensor:
        """Return [n] like `sum`: the mean over each sequence's response tokens, 0 without any."""
        return self.sum(x) / self.sum((self.rows > 0).to(x.dtype)).clamp(min=1.0)

    def spread(self, y: Tensor) -> Tensor:
        """Return each sequence's number in `y` [n] on its response tokens, 0 elsewhere, shaped like `rows`.

        Differentiable. A NaN of one sequence reaches no token of another.
        """
        assert y.shape == (self.count,), f"y is {tuple(y.shape)} for {self.count} sequences"
        return torch.cat([y.new_zeros(1), y]).index_select(0, self.rows.flatten()).view(self.rows.shape)


SUMMARY = 5  # count, mean, sum of squared distances to it, lowest, highest
_PER_DOUBLING = 6  # bits: the leading ones of a float32's fraction
_SHIFT = 23 - _PER_DOUBLING
_FIRST = (127 - 24) << _PER_DOUBLING  # leading bits of 2^-24
_HALF = 48 << _PER_DOUBLING  # bins of one sign
BINS = 2 * _HALF + 1
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}  # levels over tokens


def summary(x: Tensor) -> Tensor:
    """Return [SUMMARY] float64 of numbers [n]."""
    if not x.numel():
        return torch.zeros(SUMMARY, dtype=torch.float64)
    x = x.double()
    mean = x.mean()
    return torch.stack([torch.tensor(float(len(x))).double(), mean, (x - mean).square().sum(), x.min(), x.max()])


def histogram(x: Tensor) -> Tensor:
    """Return [BINS] float64: counts of the elements of x, [n] floating, per bin, lowest first."""
    return torch.bincount(_places(x), minlength=BINS).double()


def histogram_where(x: Tensor, chosen: Tensor) -> Tensor:
    """Return `histogram` of the chosen elements of x on its device, without waiting for it.

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
