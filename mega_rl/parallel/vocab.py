"""Log-probabilities and entropy of logits split over the vocabulary, and logits in float32 of bfloat16 weights.

With z = (logits - m) / temperature, m the maximum of a token's logits, and Z = sum exp(z) over the vocabulary:

    logprob  = z[target] - log Z            d logprob / d logits[j] = (1[j = target] - p[j]) / temperature
    entropy  = log Z - sum p z              d entropy / d logits[j] = -p[j] (log p[j] + entropy) / temperature

Every rank of the tensor-parallel group sums over its own columns against its own maximum; the sums are brought to the
common maximum as [T] vectors, so each logit is read once and only [T] vectors travel.

On a CUDA device with Triton, which torch for CUDA brings along, both passes over the logits are one kernel each
(`vocab_kernels`). What this module does instead, in chunks of rows, is their reference.

`fp32_linear` makes the logits of `model.fp32_head`: the product of two bfloat16 numbers is exact in float32, and what a
bfloat16 head loses, it loses when it rounds the logits to 8 bits. A GPU would multiply the float32 gradient at a
fraction of its speed. There the gradient is the sum of two bfloat16 parts, g = round(g) + round(g - round(g)) + error
with |error| <= 2^-17 |g|, and two products of bfloat16 take the place of one of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.types import IdRanges

vocab_kernels: ModuleType | None
try:
    from mega_rl.parallel import vocab_kernels
except ModuleNotFoundError:  # Triton is absent
    vocab_kernels = None

Collective = Callable[[Tensor], Tensor]

HIDDEN = -1e30  # logit of a hidden token: its probability is 0, and 0 * logit is 0, as that of infinity is not
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

    Temporaries are some float32 chunks of [chunk_rows, V / tp], or with kernels none; besides the logits nothing of
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
        inplace_backward: write the gradient over the logits, which must be a temporary without later readers, as an
            output layer's result is; autograd raises where somebody reads them, and on a second backward. False keeps
            the logits and allocates a gradient of their size.
    """
    columns = VocabColumns.of(
        logits, targets, group=group, vocab_size=vocab_size, temperature=temperature, chunk_rows=chunk_rows
    )
    logprobs, entropy = _LogprobsEntropy.apply(logits, targets - columns.first, columns, with_entropy, inplace_backward)
    return logprobs, (entropy if with_entropy else None)


@torch.no_grad()
def hide(logits: Tensor, hidden: IdRanges, *, first: int = 0) -> Tensor:
    """Overwrite columns of hidden ids in logits [..., V / tp]; first: of column 0.

    No gradient reaches these columns: that of a token of probability 0 is 0.
    """
    for low, high in hidden:
        logits[..., max(low - first, 0) : max(high - first, 0)] = HIDDEN
    return logits


@dataclass(frozen=True)
class VocabColumns:
    """A rank's columns of logits [T, V / tp] that are split over a tensor-parallel group."""

    group: ProcessGroup | None  # None: the whole vocabulary is here
    first: int  # this rank's first entry of the vocabulary
    count: int  # columns of the vocabulary; what follows them is padding
    scale: float  # factor on logits: 1 / temperature
    chunk_rows: int  # handled at a time without kernels; the same on all ranks

    @classmethod
    def of(
        cls,
        logits: Tensor,
        targets: Tensor,
        *,
        group: ProcessGroup | None,
        vocab_size: int | None,
        temperature: float,
        chunk_rows: int | None = None,
    ) -> VocabColumns:
        """Return the columns of this rank; arguments as of `vocab_parallel_logprobs_entropy`."""
        assert logits.dim() == 2, f"logits are [T, V / tp], not {tuple(logits.shape)}"
        assert targets.shape == logits.shape[:1], f"targets {tuple(targets.shape)} for logits {tuple(logits.shape)}"
        assert temperature > 0, f"temperature={temperature} must be above 0"
        tp_rank, tp_size = (0, 1) if group is None else (group.rank(), group.size())
        width = logits.shape[1]
        first = tp_rank * width
        vocab_size = width * tp_size if vocab_size is None else vocab_size
        assert vocab_size <= width * tp_size, f"vocab_size={vocab_size} is above the {width * tp_size} columns"
        budget = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        return cls(
            group=group if tp_size > 1 else None,
            first=first,
            count=min(max(vocab_size - first, 0), width),
            scale=1.0 / temperature,
            chunk_rows=max(1, budget // max(1, width)) if chunk_rows is None else chunk_rows,
        )


def row_values(
    logits: Tensor, local_targets: Tensor, columns: VocabColumns, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-prob of the target, maximum, log_sum, entropy) of each row, [T] float32 each; two all-reduces.

    log_sum: of exp((logits - maximum) / temperature) over the whole vocabulary. entropy: uninitialised where it was not
    asked for. `local_targets` count from this rank's first column.
    """
    kernels = _kernels(logits)
    if kernels is not None:
        maximum, sums = kernels.local_sums(
            logits, local_targets, columns=columns.count, scale=columns.scale, with_entropy=with_entropy
        )
    else:
        maximum, sums = _local_sums(logits, local_targets, columns, with_entropy=with_entropy)
    if columns.group is not None:
        local_maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=columns.group)
        if columns.count:
            _shift(sums, (local_maximum - maximum) * columns.scale, hit=_hits(local_targets, columns.count))
        dist.all_reduce(sums, group=columns.group)
    log_sum = sums[0].log()
    entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.empty_like(log_sum)
    return sums[1] - log_sum, maximum, log_sum, entropy


class _LogprobsEntropy(torch.autograd.Function):
    """Log-prob and entropy as in the module's docstring; `local_targets` count from this rank's first column."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local_targets: Tensor, columns: VocabColumns, with_entropy: bool, inplace: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, *values = row_values(logits, local_targets, columns, with_entropy=with_entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(values[-1])
        ctx.save_for_backward(logits, local_targets, *values)
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.inplace = columns, inplace
        return logprobs, values[-1]

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local_targets, *values = ctx.saved_tensors
        nothing = (None,) * 4
        if grad_logprobs is None and grad_entropy is None:
            return (None, *nothing)
        grad = logits if ctx.inplace else logits.clone()
        write_gradient(grad, local_targets, tuple(values), (grad_logprobs, grad_entropy), ctx.columns)
        return (grad, *nothing)


def write_gradient(
    logits: Tensor,
    local_targets: Tensor,
    values: tuple[Tensor, Tensor, Tensor],
    of_results: tuple[Tensor | None, Tensor | None],
    columns: VocabColumns,
) -> None:
    """Write the gradient of rows of logits over them; 0 on padding.

    values: maximum, log_sum and entropy of `row_values`. of_results: gradients of log-probs and entropies, [T] float32,
    None where there is none.
    """
    grad_logprobs, grad_entropy = of_results
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(values[1])
    count, scale = columns.count, columns.scale
    if (kernels := _kernels(logits)) is not None:
        results = (grad_logprobs, grad_entropy)
        kernels.write_gradient(logits, local_targets, values, results, columns=count, scale=scale)
        return
    maximum, log_sum, entropy = values
    logits[:, count:] = 0
    hit = _hits(local_targets, count)
    for rows in row_chunks(len(logits), columns.chunk_rows if count else 0):
        # log p, then p; the rest is the two formulas at the top of the module, with p factored out.
        logp = scaled_difference(logits[rows, :count], maximum[rows], scale).sub_(log_sum[rows, None])
        weight = -scale * grad_logprobs[rows]
        if grad_entropy is None:
            piece = logp.exp_().mul_(weight[:, None])
        else:
            slope = -scale * grad_entropy[rows]
            probability = logp.exp()
            piece = logp.add_(entropy[rows, None]).mul_(slope[:, None]).add_(weight[:, None]).mul_(probability)
        at_target = torch.where(hit[rows], -weight, 0.0)[:, None]
        piece.scatter_add_(1, _inside(local_targets[rows], count)[:, None], at_target)
        logits[rows, :count] = piece


def _kernels(logits: Tensor) -> ModuleType | None:
    """Return the kernels where they run: on CUDA with Triton, and rows of neighbouring logits."""
    return vocab_kernels if logits.is_cuda and logits.stride(1) == 1 else None


def _local_sums(
    logits: Tensor, local_targets: Tensor, columns: VocabColumns, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(row maxima [T], sums [2 or 3, T]) over this rank's columns, float32.

    Against the row's own maximum: sum exp z, z of the target where it is here (else 0), and sum z exp z.
    """
    tokens, count = len(logits), columns.count
    maximum = torch.full((tokens,), torch.finfo(torch.float32).min, device=logits.device)
    sums = torch.zeros(3 if with_entropy else 2, tokens, device=logits.device)
    hit = _hits(local_targets, count)
    for rows in row_chunks(tokens, columns.chunk_rows if count else 0):
        part = logits[rows, :count]
        maximum[rows] = part.amax(dim=1).float()
        z = scaled_difference(part, maximum[rows], columns.scale)
        at_target = z.gather(1, _inside(local_targets[rows], count)[:, None])[:, 0]
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


def scaled_difference(logits: Tensor, maximum: Tensor, scale: float) -> Tensor:
    """Return (logits - maximum) * scale, new and float32; large logits need the difference first."""
    z = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    torch.sub(logits, maximum[:, None], out=z)
    return z if scale == 1.0 else z.mul_(scale)


def row_chunks(tokens: int, chunk_rows: int) -> Iterator[slice]:
    """Yield slices that cover the rows; none if `chunk_rows` is 0, on padding."""
    if chunk_rows:
        yield from (slice(start, min(start + chunk_rows, tokens)) for start in range(0, tokens, chunk_rows))


def _hits(local_targets: Tensor, columns: int) -> Tensor:
    """Return [T] bool: whether the target's column is on this rank."""
    return (local_targets >= 0) & (local_targets < columns)


def _inside(local_targets: Tensor, columns: int) -> Tensor:
    """Return targets clamped to valid column indices of this rank."""
    return local_targets.clamp(0, columns - 1)


def fp32_linear(
    hidden: Tensor, weight: Tensor, *, gather: Collective | None = None, reduce: Collective | None = None
) -> Tensor:
    """Return hidden @ weight.T, float32 [S, B, V], of bfloat16 [S, B, H] and [V, H].

    Gradients are computed in float32 and rounded once, to the dtypes of `hidden` and `weight`. Only the two inputs are
    kept for the backward.

    gather: applied to `hidden` before the product, in both passes: the tokens of other ranks. None: none.
    reduce: applied to the float32 gradient of what `gather` gave: the sum over ranks that hold other columns, this
        rank's tokens of it where `gather` added some. None: the weight is whole.
    """
    return _Fp32Linear.apply(hidden, weight, gather, reduce)


class _Fp32Linear(torch.autograd.Function):
    """The map and its gradients; see `fp32_linear`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, gather: Collective | None, reduce: Collective | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gather, ctx.reduce = gather, reduce
        whole = hidden if gather is None else gather(hidden)
        return product(whole.flatten(0, -2), weight.t()).view(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden: Tensor | None = None
        of_weight: Tensor | None = None
        whole = hidden if ctx.gather is None or not ctx.needs_input_grad[1] else ctx.gather(hidden)
        rows = whole.flatten(0, -2)
        for part in parts(grad.flatten(0, -2), split=grad.is_cuda):
            if ctx.needs_input_grad[0]:
                of_hidden = _plus(of_hidden, product(part, weight))
            if ctx.needs_input_grad[1]:
                of_weight = _plus(of_weight, product(part.t(), rows))
        if of_hidden is not None:
            of_hidden = of_hidden.view(*grad.shape[:-1], weight.shape[1])
            of_hidden = (of_hidden if ctx.reduce is None else ctx.reduce(of_hidden)).to(hidden.dtype)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None


def parts(grad: Tensor, *, split: bool) -> Iterator[Tensor]:
    """Yield bfloat16 tensors whose sum is `grad` to 2^-17 of each element, or `grad`.

    Both parts use the same memory: the second takes the place of the first.
    """
    if not split:
        yield grad
        return
    part = grad.bfloat16()
    yield part
    yield torch.sub(grad, part, out=part)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, of [M, K] and [K, N], bfloat16 or float32."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    """Return the sum of both, in the memory of `total` where there is one."""
    return term if total is None else total.add_(term)
