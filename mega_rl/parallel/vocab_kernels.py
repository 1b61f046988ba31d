"""Triton kernels of `mega_rl.parallel.vocab`: sums over a rank's columns, and gradients, in one pass each.

Each logit is read once in the forward, and read and written once in the backward: 2 and 4 bytes in bf16. All arithmetic
is float32. The formulas stand in `vocab`, whose own loops are the reference. The import fails where Triton is not
installed. Triton's compiler, unlike its interpreter, evaluates the annotations of a kernel and refuses names of other
modules than its own.

A sum that is kept against the highest logit so far moves to a higher one, a distance d = (old - new) / temperature
away, as sum exp(z + d) = exp(d) S and sum (z + d) exp(z + d) = exp(d) (W + d S), with S = sum exp z, W = sum z exp z.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns that a program has in registers
WARPS = 8
# exp is 0 in float32 below; keeps the distance from no logit at all, which is infinite, out of 0 * inf.
FARTHEST = tl.constexpr(-200.0)


@triton.jit
def _sum_rows(
    logits: tl.tensor, stride: int, targets: tl.tensor, maxima: tl.tensor, sums: tl.tensor, tokens: int, columns: int,
    scale: float, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    maximum = -float("inf")
    total = 0.0
    weighted = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(line + at, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(values, axis=0))
        distance = tl.maximum((maximum - higher) * scale, FARTHEST)
        decay = tl.exp(distance)
        z = (values - higher) * scale
        exponential = tl.exp(z)
        if WITH_ENTROPY:
            weighted = decay * (weighted + distance * total) + tl.sum(tl.where(inside, z * exponential, 0.0), axis=0)
        total = decay * total + tl.sum(exponential, axis=0)
        maximum = higher
    target = tl.load(targets + row)
    hit = (target >= 0) & (target < columns)
    at_target = tl.load(line + tl.where(hit, target, 0)).to(tl.float32)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(sums + tokens + row, tl.where(hit, (at_target - maximum) * scale, 0.0))
    if WITH_ENTROPY:
        tl.store(sums + 2 * tokens + row, weighted)


@triton.jit
def _differentiate_rows(
    logits: tl.tensor, stride: int, targets: tl.tensor, maxima: tl.tensor, log_sums: tl.tensor, entropies: tl.tensor,
    of_logprobs: tl.tensor, of_entropies: tl.tensor, columns: int, width: int, scale: float,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(logits + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    logp = (values - tl.load(maxima + row)) * scale - tl.load(log_sums + row)
    weight = -scale * tl.load(of_logprobs + row)
    piece = weight * tl.exp(logp)
    if WITH_ENTROPY:
        piece -= scale * tl.load(of_entropies + row) * (logp + tl.load(entropies + row)) * tl.exp(logp)
    piece -= tl.where(at == tl.load(targets + row), weight, 0.0)
    tl.store(logits + row * stride + at, tl.where(inside, piece, 0.0), mask=at < width)


def local_sums(
    logits: Tensor, local_targets: Tensor, *, columns: int, scale: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return float32 row maxima [T] and sums [2 or 3, T] over the first `columns` columns.

    Against the row's own maximum: sum exp z, z of the target where it is here (else 0), and sum z exp z. Rows must be
    contiguous; without columns the maxima are -inf.
    """
    tokens = len(logits)
    maxima = torch.empty(tokens, device=logits.device)
    sums = torch.empty(3 if with_entropy else 2, tokens, device=logits.device)
    if tokens:
        _sum_rows[(tokens,)](
            logits,
            logits.stride(0),
            local_targets,
            maxima,
            sums,
            tokens,
            columns,
            scale,
            WITH_ENTROPY=with_entropy,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return maxima, sums


def write_gradient(
    logits: Tensor,
    local_targets: Tensor,
    row_values: tuple[Tensor, Tensor, Tensor],
    of_results: tuple[Tensor, Tensor | None],
    *,
    columns: int,
    scale: float,
) -> None:
    """Write the gradient [T, V / tp] over the logits; 0 beyond `columns`.

    row_values: maximum over all ranks, log of the sum and entropy of each row, [T] float32.
    of_results: gradients of the log-probs and, unless None, of the entropies, [T] float32.
    """
    tokens, width = logits.shape
    of_logprobs, of_entropy = of_results
    if tokens:
        _differentiate_rows[(tokens, triton.cdiv(width, BLOCK))](
            logits,
            logits.stride(0),
            local_targets,
            *row_values,
            of_logprobs.contiguous(),
            of_logprobs if of_entropy is None else of_entropy.contiguous(),
            columns,
            width,
            scale,
            WITH_ENTROPY=of_entropy is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
