"""Divergence of a student's distributions from a teacher's over a vocabulary split over ranks.

With p = softmax(student logits / temperature), q = softmax(teacher logits / temperature), m = beta q + (1 - beta) p:

    beta = 1          D = KL(p || q)                                    reverse KL
    0 < beta < 1      D = beta KL(q || m) + (1 - beta) KL(p || m)       generalised Jensen-Shannon divergence
    beta = 0          D = KL(q || p)                                    forward KL

    d D / d logits[j] = c p[j] (log(p[j] / m[j]) - KL(p || m)) / temperature    c = 1 - beta; m = q and c = 1 for beta 1
                      = (p[j] - q[j]) / temperature                             for beta 0

Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 2 and eq. 1; beta as there.

The teacher's logits never exist: they are the product of its last hidden states [T, H] and its vocabulary projection,
of which a rank holds its logits' columns, made in float32 a chunk of rows at a time, in the forward and
again in the backward. Vectors travel: maxima and sums of exponentials of a chunk, and in the end [T] divergences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.parallel.vocab import (
    VocabColumns,
    hide,
    product,
    row_chunks,
    row_values,
    scaled_difference,
    write_gradient,
)
from mega_rl.types import IdRanges


@dataclass(frozen=True)
class TeacherHead:
    """Last hidden states of a teacher, and its projection's rows for this rank's logits."""

    hidden: Tensor  # [T, H] float32 or bfloat16
    weight: Tensor  # [V / tp, H]
    beta: float = 1.0  # divergence, see the module
    unsaid: IdRanges = ()  # hidden tokens, as in the student's logits

    def logits(self, rows: slice, columns: VocabColumns) -> Tensor:
        """Return the logits of a chunk of rows, [n, columns.count] float32."""
        logits = product(self.hidden[rows], self.weight[: columns.count].t())
        return hide(logits, self.unsaid, first=columns.first)


class DistilledOutputs(NamedTuple):
    """Outputs of the student for each row, [T] float32 with gradient."""

    logprobs: Tensor  # the targets'
    entropy: Tensor | None  # None where it was not asked for
    divergence: Tensor  # nats


def vocab_parallel_divergence(
    logits: Tensor, targets: Tensor, teacher: TeacherHead, *, columns: VocabColumns, with_entropy: bool = False
) -> DistilledOutputs:
    """Return log-probs, entropy and divergence of each row of logits [T, V / tp]; collective.

    As `vocab_parallel_logprobs_entropy`, whose arguments these are: the backward writes the gradient of all three over
    the logits, which must be a temporary without later readers. The teacher gets no gradient. Beside the logits there
    are some float32 chunks of [columns.chunk_rows, V / tp].
    """
    assert 0.0 <= teacher.beta <= 1.0, f"beta={teacher.beta} must be from 0 to 1"
    assert len(teacher.hidden) == len(logits), f"{len(teacher.hidden)} hidden states of {len(logits)} tokens"
    assert len(teacher.weight) == logits.shape[1], f"{len(teacher.weight)} rows for {logits.shape[1]} columns"
    logprobs, entropy, divergence = _Divergence.apply(logits, targets - columns.first, teacher, columns, with_entropy)
    return DistilledOutputs(logprobs, entropy if with_entropy else None, divergence)


class _Divergence(torch.autograd.Function):
    """Log-prob, entropy and divergence; `local_targets` count from this rank's first column."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local_targets: Tensor, teacher: TeacherHead, columns: VocabColumns, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, *values = row_values(logits, local_targets, columns, with_entropy=with_entropy)
        normaliser = torch.empty_like(logprobs)  # log of the teacher's sum of exponentials
        sums = torch.zeros(2, len(logits), device=logits.device)
        for rows in row_chunks(len(logits), columns.chunk_rows):
            z = teacher.logits(rows, columns).mul_(columns.scale)
            normaliser[rows] = _log_sum_over_ranks(z, columns)
            logp, logq = _log_probs(logits[rows], values, rows, columns), z.sub_(normaliser[rows, None])
            sums[0, rows], sums[1, rows] = _divergence_sums(logp, logq, teacher.beta)
        if columns.group is not None:
            dist.all_reduce(sums, group=columns.group)
        if not with_entropy:
            ctx.mark_non_differentiable(values[-1])
        ctx.save_for_backward(logits, local_targets, *values, normaliser, sums[1])
        ctx.set_materialize_grads(False)
        ctx.teacher, ctx.columns = teacher, columns
        return logprobs, values[-1], sums[0]

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local_targets, *values, normaliser, own = ctx.saved_tensors
        of_logprobs, of_entropy, of_divergence = of_results
        columns: VocabColumns = ctx.columns
        count, others = columns.count, of_logprobs is not None or of_entropy is not None
        nothing = (None,) * 4
        if of_divergence is None and not others:
            return (None, *nothing)
        for rows in row_chunks(len(logits), columns.chunk_rows):
            pieces: Tensor | None = None
            if of_divergence is not None:
                logp = _log_probs(logits[rows], values, rows, columns)
                logq = ctx.teacher.logits(rows, columns).mul_(columns.scale).sub_(normaliser[rows, None])
                slope = columns.scale * of_divergence[rows]
                pieces = _divergence_gradient(logp, logq, own[rows], ctx.teacher.beta).mul_(slope[:, None])
            grad = logits[rows]
            if others:
                results = (_rows(of_logprobs, rows), _rows(of_entropy, rows))
                maximum, log_sum, entropy = (value[rows] for value in values)
                write_gradient(grad, local_targets[rows], (maximum, log_sum, entropy), results, columns)
            if pieces is not None:
                grad[:, :count] = pieces.add_(grad[:, :count]) if others else pieces
            grad[:, count:] = 0
        return (logits, *nothing)


def _log_sum_over_ranks(z: Tensor, columns: VocabColumns) -> Tensor:
    """Return log sum exp(z) over the vocabulary, [n], of z [n, columns.count]; collective."""
    if columns.group is None:
        return z.logsumexp(dim=1)
    here = columns.count > 0
    maximum = z.amax(dim=1) if here else torch.full((len(z),), torch.finfo(z.dtype).min, device=z.device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=columns.group)
    total = (z - maximum[:, None]).exp_().sum(dim=1)
    dist.all_reduce(total, group=columns.group)
    return total.log_().add_(maximum)


def _log_probs(logits: Tensor, values: Sequence[Tensor], rows: slice, columns: VocabColumns) -> Tensor:
    """Return the student's log-probs of a chunk, [n, columns.count] float32; maximum and log_sum lead `values`."""
    z = scaled_difference(logits[:, : columns.count], values[0][rows], columns.scale)
    return z.sub_(values[1][rows, None])


def _mixture(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Return log(beta q + (1 - beta) p)."""
    return logq if beta == 1.0 else torch.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))


def _divergence_sums(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the divergence and of KL(p || m), [n] each."""
    if beta == 0.0:
        forward = (logq.exp() * (logq - logp)).sum(dim=1)
        return forward, torch.zeros_like(forward)
    logm = _mixture(logp, logq, beta)
    own = (logp.exp() * (logp - logm)).sum(dim=1)
    if beta == 1.0:
        return own, own
    return beta * (logq.exp() * (logq - logm)).sum(dim=1) + (1.0 - beta) * own, own


def _divergence_gradient(logp: Tensor, logq: Tensor, own: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence by logits / temperature; own: KL(p || m), [n]."""
    if beta == 0.0:
        return logp.exp().sub_(logq.exp())
    ratio = (logp - _mixture(logp, logq, beta)).sub_(own[:, None])
    return ratio.mul_(logp.exp()).mul_(1.0 if beta == 1.0 else 1.0 - beta)


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]
