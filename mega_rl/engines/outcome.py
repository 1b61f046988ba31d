"""Results of micro-batches put together, and the checks of a step and of a state that all engines make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import BINS, QUANTILES, Sequences, identity, points_of
from mega_rl.converters.plan.sharding import Head
from mega_rl.data.packing import MicroBatch, scatter_back
from mega_rl.errors import NonFiniteGradientError, UserError
from mega_rl.protocols import LossOutput, Ranks, TokenLoss
from mega_rl.types import TRAINED_TOKENS, Experience, Metrics, Rollout, TokenOutputs

STEPS = "optimizer_steps"  # the number of an engine's state

# (the model's outputs on a micro-batch, its fields) -> share of the loss
MicrobatchLoss = Callable[[TokenOutputs, Mapping[str, Tensor]], LossOutput]


def microbatch_loss(
    loss: TokenLoss, minibatch: Experience, *, sum_over_context: Callable[[Tensor], Tensor] = identity
) -> MicrobatchLoss:
    """Return `loss` as a function of the micro-batches of `minibatch`, this rank's rows on the host.

    Each share of the loss counts its tokens on the loss mask, `trained_tokens`.

    sum_over_context: differentiable sum over the ranks that have the same rows and other tokens of them.
    """
    numbers = minibatch.rows.amax(dim=1) if len(minibatch.rows) else minibatch.rows.flatten()
    numbers = numbers[numbers > 0]
    assert len(numbers.unique()) == len(numbers), "rows are numbered on another rank: two have one number"
    count = int(numbers.max()) if len(numbers) else 0

    def of_microbatch(outputs: TokenOutputs, fields: Mapping[str, Tensor]) -> LossOutput:
        share = loss(outputs, fields, Sequences(fields["rows"], count, sum_over_context))
        return replace(share, sums={**share.sums, TRAINED_TOKENS: fields["loss_mask"].sum().float()})

    return of_microbatch


@dataclass(frozen=True)
class Finished:
    """The result of one micro-batch, detached from autograd."""

    micro: MicroBatch
    outputs: TokenOutputs  # like micro.tokens
    loss: LossOutput | None  # None in a forward only


def finished(micro: MicroBatch, outputs: TokenOutputs, loss: LossOutput) -> Finished:
    """Return the result of a micro-batch, outputs and loss detached from autograd."""
    seen = {name: value.detach() for name, value in vars(outputs).items() if value is not None}
    kept = LossOutput(
        loss=loss.loss.detach(),
        sums={name: value.detach() for name, value in loss.sums.items()},
        maxima={name: value.detach() for name, value in loss.maxima.items()},
        minima={name: value.detach() for name, value in loss.minima.items()},
        log_histograms=loss.log_histograms,
    )
    return Finished(micro, TokenOutputs(**seen), kept)


def collect(
    results: Sequence[Finished],
    batch: Rollout | Experience,
    *,
    head: Head,
    with_entropy: bool,
    combine: Callable[[Tensor], Tensor] = lambda full: full,
) -> TokenOutputs:
    """Return the outputs of all micro-batches, [B, S] float32 on the host, 0 off the loss mask.

    `with_entropy`: a policy's micro-batches have it beside the log-probs. `combine` makes a replica's outputs [n, B, S]
    from those of this rank, where a replica has several ranks.
    """
    names = ["values"] if head == "value" else ["logprobs", "entropy"][: 1 + with_entropy]
    full = torch.zeros(len(names), *batch.tokens.shape)
    for result in results:
        for out, name in zip(full, names, strict=True):
            scatter_back(getattr(result.outputs, name).cpu(), result.micro, out)
    full *= batch.loss_mask
    return TokenOutputs(**dict(zip(names, combine(full), strict=True)))


def reduce_losses(results: Sequence[Finished], ranks: Ranks) -> Metrics:
    """Return the loss metrics over micro-batches and `ranks`, those with different tokens; collective.

    Of a histogram there are quantiles, as actor/ratio_p50.
    """
    losses = [result.loss for result in results if result.loss is not None]
    sums = {name: torch.stack([loss.sums[name] for loss in losses]).sum() for name in losses[0].sums}
    maxima = {name: torch.stack([loss.maxima[name] for loss in losses]).max() for name in losses[0].maxima}
    negated = {name: -torch.stack([loss.minima[name] for loss in losses]).min() for name in losses[0].minima}
    histograms = {
        name: torch.stack([loss.log_histograms[name] for loss in losses]).sum(dim=0)
        for name in losses[0].log_histograms
    }
    # One copy to the host for all that is added: it is what waits for the device.
    parts = [*([torch.stack(list(sums.values())).double()] if sums else []), *histograms.values()]
    added = ranks.sum(torch.cat(parts)).tolist() if parts else []
    reduced: Metrics = dict(zip(sums, added, strict=False))
    for name, start in zip(histograms, range(len(sums), len(added), BINS), strict=True):
        counts = torch.tensor(added[start : start + BINS], dtype=torch.float64)
        points = points_of(counts, quantiles=QUANTILES)
        ratios = torch.tensor(list(points.values()), dtype=torch.float64).exp().tolist()
        reduced |= {f"{name}_{quantile}": ratio for quantile, ratio in zip(points, ratios, strict=True)}
    if extremes := maxima | negated:
        reduced |= zip(extremes, ranks.max(torch.stack(list(extremes.values())).double()).tolist(), strict=True)
    # The minimum of no tokens at all is infinite, and no number.
    minima = {name: -reduced.pop(name) for name in negated}
    return reduced | {name: value for name, value in minima.items() if value < math.inf}


def was_clipped(norm: float, limit: float) -> Metrics:
    """Return `grad_clipped_fraction`, 1 if a gradient of this norm was scaled down; empty without clipping (0)."""
    metrics: Metrics = {"grad_clipped_fraction": float(norm > limit)}
    return metrics if limit > 0.0 else {}


def check_norm(name: str, norm: float, metrics: Metrics) -> None:
    """Raise NonFiniteGradientError where the gradient norm of the role `name`, equal on all ranks, is not finite.

    metrics: of the update so far, for the error.
    """
    if not math.isfinite(norm):
        raise NonFiniteGradientError(
            f"{name}: the gradient norm is {norm}; weights and optimizer state are unchanged",
            norm=norm,
            metrics=metrics,
        )


def check_numbers(name: str, numbers: Mapping[str, int | float], *, trains: bool) -> int:
    """Return the optimizer's steps of a checkpoint's numbers, 0 for a model that does not train.

    Raises UserError: the numbers are not those of an engine; `name` is its role.
    """
    expected = [STEPS] if trains else []
    steps = numbers.get(STEPS, 0)
    if sorted(numbers) != expected or not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise UserError(
            f"{name}: the checkpoint's numbers of this model are {dict(numbers)}, must be whole numbers of {expected}: "
            "it is of another kind of model; set checkpoint.resume=never or to another checkpoint"
        )
    return steps
