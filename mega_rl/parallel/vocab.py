"""Log-probabilities and entropy from logits that are split over the vocabulary, without a second [T, V] tensor.

With z = (logits - m) / temperature, m the maximum of a token's logits, and Z = sum exp(z) over the vocabulary:

    logprob  = z[target] - log Z            d logprob / d logits[j] = (1[j = target] - p[j]) / temperature
    entropy  = log Z - sum p z              d entropy / d logits[j] = -p[j] (log p[j] + entropy) / temperature

Every rank of the tensor-parallel group sums over its own columns against its own maximum; the sums are brought to the
common maximum as [T] vectors, so each logit is read once and only [T] vectors travel.

On a CUDA device with Triton, which torch for CUDA brings along, both passes over the logits are one kernel each
(`vocab_kernels`). What this module does instead, in chunks of rows, is their reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

vocab_kernels: ModuleType | None
try:
    from mega_rl.parallel import vocab_kernels
except ModuleNotFoundError:  # of Triton
    vocab_kernels = None

# Elements of one float32 temporary. A CPU wants it in its cache, a GPU wants few and large kernels.
CPU_CHUNK_ELEMENTS = 2**18
GPU_CHUNK_ELEMENTS = 2**24


def vocab_parallel_logprobs_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
    with_entropy: bool = True,
    inplace_backward: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and entropy (nats) of each row's distribution, both [T] float32.

    Temporaries are a few float32 chunks of [chunk_rows, V / tp], or with kernels none; beside the logits nothing of
    their size is allocated, forward or backward. Two all-reduces of [T] and [2 or 3, T] in the forward, none in the
    backward.

    Args:
        logits: [T, V / tp] float32 or bfloat16, finite; rank r of `group` holds columns r * V / tp and up.
        targets: [T] int64 in [0, vocab_size), the same on every rank of `group`.
        group: tensor-parallel group; None where the logits hold the whole vocabulary.
        vocab_size: entries of the vocabulary; columns beyond are padding and count as if absent. None: no padding.
        temperature: the logits are divided by it.
        chunk_rows: rows handled at a time; None chooses. The kernels need none.
        with_entropy: False saves its share of the work and returns None in its place.
        inplace_backward: write the gradient over the logits, which must be a temporary without later readers, as
            an output layer's result is; autograd raises where somebody does, and on a second backward. False allocates
            a gradient of the logits' size.
    """
    assert logits.dim() == 2, f"logits are [T, V / tp], not {tuple(logits.shape)}"
    assert targets.shape == logits.shape[:1], f"targets {tuple(targets.shape)} for logits {tuple(logits.shape)}"
    assert temperature > 0, f"temperature={temperature} must be above 0"
    tp_rank, tp_size = (0, 1) if group is None else (group.rank(), group.size())
    width = logits.shape[1]
    first = tp_rank * width
    vocab_size = width * tp_size if vocab_size is None else vocab_size
    assert vocab_size <= width * tp_size, f"vocab_size={vocab_size} is above the {width * tp_size} columns there are"
    columns = min(max(vocab_size - first, 0), width)
    if chunk_rows is None:
        budget = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        chunk_rows = max(1, budget // max(1, width))
    logprobs, entropy = _LogprobsEntropy.apply(
        logits,
        targets - first,
        group if tp_size > 1 else None,
        columns,
        1.0 / temperature,
        chunk_rows,
        with_entropy,
        inplace_backward,
    )
    return logprobs, (entropy if with_entropy else None)


class _LogprobsEntropy(torch.autograd.Function):
    """Log-prob and entropy as in the module's docstring; `local_targets` count from this rank's first column."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local_targets: Tensor,
        group: ProcessGroup | None,
        columns: int,
        scale: float,
        chunk_rows: int,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels(logits)
        if kernels is not None:
            maximum, sums = kernels.local_sums(
                logits, local_targets, columns=columns, scale=scale, with_entropy=with_entropy
            )
        else:
            maximum, sums = _local_sums(
                logits, local_targets, columns=columns, scale=scale, chunk_rows=chunk_rows, with_entropy=with_entropy
            )
        if group is not None:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            if columns:
                _shift(sums, (local_maximum - maximum) * scale, hit=_hits(local_targets, columns))
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        logprobs = sums[1] - log_sum
        entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.empty_like(log_sum)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(logits, local_targets, maximum, log_sum, entropy)
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.scale, ctx.chunk_rows, ctx.inplace = columns, scale, chunk_rows, inplace_backward
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local_targets, maximum, log_sum, entropy = ctx.saved_tensors
        nothing = (None,) * 7
        if grad_logprobs is None and grad_entropy is None:
            return (None, *nothing)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sum)
        grad = logits if ctx.inplace else torch.empty_like(logits)
        row_values, of_results = (maximum, log_sum, entropy), (grad_logprobs, grad_entropy)
        kernels, how = _kernels(logits), {"columns": ctx.columns, "scale": ctx.scale}
        if kernels is not None:
            kernels.write_gradient(grad, logits, local_targets, row_values, of_results, **how)
        else:
            _write_gradient(grad, logits, local_targets, row_values, of_results, chunk_rows=ctx.chunk_rows, **how)
        return (grad, *nothing)


def _kernels(logits: Tensor) -> ModuleType | None:
    """Return the kernels where they run: on CUDA with Triton, and rows of neighbouring logits."""
    return vocab_kernels if logits.is_cuda and logits.stride(1) == 1 else None


def _write_gradient(
    grad: Tensor,
    logits: Tensor,
    local_targets: Tensor,
    row_values: tuple[Tensor, Tensor, Tensor],
    of_results: tuple[Tensor, Tensor | None],
    *,
    columns: int,
    scale: float,
    chunk_rows: int,
) -> None:
    """Write the gradient of logits [T, V / tp] into `grad`, which may be the logits themselves; 0 beyond `columns`.

    row_values: maximum over all ranks, log of the sum and entropy of each row, [T] float32.
    of_results: gradients of the log-probs and, unless None, of the entropies, [T] float32.
    """
    maximum, log_sum, entropy = row_values
    grad_logprobs, grad_entropy = of_results
    grad[:, columns:] = 0
    hit = _hits(local_targets, columns)
    for rows in _row_chunks(len(logits), chunk_rows if columns else 0):
        # log p, then p; the rest is the two formulas at the top of the module, with p factored out.
        logp = _scaled_difference(logits[rows, :columns], maximum[rows], scale).sub_(log_sum[rows, None])
        weight = -scale * grad_logprobs[rows]
        if grad_entropy is None:
            piece = logp.exp_().mul_(weight[:, None])
        else:
            slope = -scale * grad_entropy[rows]
            probability = logp.exp()
            piece = logp.add_(entropy[rows, None]).mul_(slope[:, None]).add_(weight[:, None]).mul_(probability)
        at_target = torch.where(hit[rows], -weight, 0.0)[:, None]
        piece.scatter_add_(1, _inside(local_targets[rows], columns)[:, None], at_target)
        grad[rows, :columns] = piece


def _local_sums(
    logits: Tensor, local_targets: Tensor, *, columns: int, scale: float, chunk_rows: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(row maxima [T], sums [2 or 3, T]) over this rank's columns, float32.

    Against the row's own maximum: sum exp z, z of the target where it is here (else 0), and sum z exp z.
    """
    tokens = len(logits)
    maximum = torch.full((tokens,), torch.finfo(torch.float32).min, device=logits.device)
    sums = torch.zeros(3 if with_entropy else 2, tokens, device=logits.device)
    hit = _hits(local_targets, columns)
    for rows in _row_chunks(tokens, chunk_rows if columns else 0):
        part = logits[rows, :columns]
        maximum[rows] = part.amax(dim=1).float()
        z = _scaled_difference(part, maximum[rows], scale)
        at_target = z.gather(1, _inside(local_targets[rows], columns)[:, None])[:, 0]
        sums[1, rows] = torch.where(hit[rows], at_target, 0.0)
        exponential = z.exp() if with_entropy else z.exp_()
        sums[0, rows] = exponential.sum(dim=1)
        if with_entropy:
            sums[2, rows] = z.mul_(exponential).sum(dim=1)
    return maximum, sums


def _shift(sums: Tensor, distance: Tensor, *, hit: Tensor) -> None:
    """Turn `_local_sums` against the local maximum into sums against one that is `-distance` higher; in place."""
    factor = distance.exp()
    sums[1] += torch.where(hit, distance, 0.0)
    if len(sums) == 3:
        sums[2].addcmul_(distance, sums[0]).mul_(factor)
    sums[0] *= factor


def _scaled_difference(logits: Tensor, maximum: Tensor, scale: float) -> Tensor:
    """(logits - maximum) * scale as a new float32 tensor; the difference first, which large logits need."""
    z = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    torch.sub(logits, maximum[:, None], out=z)
    return z if scale == 1.0 else z.mul_(scale)


def _row_chunks(tokens: int, chunk_rows: int) -> Iterator[slice]:
    """Yield slices that cover the rows; none if `chunk_rows` is 0, as on a rank that holds only padding."""
    if chunk_rows:
        yield from (slice(start, min(start + chunk_rows, tokens)) for start in range(0, tokens, chunk_rows))


def _hits(local_targets: Tensor, columns: int) -> Tensor:
    """Return [T] bool: whether the target's column is on this rank."""
    return (local_targets >= 0) & (local_targets < columns)


def _inside(local_targets: Tensor, columns: int) -> Tensor:
    """Return targets clamped to valid column indices of this rank."""
    return local_targets.clamp(0, columns - 1)
