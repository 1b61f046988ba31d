"""Cutting a batch into micro-batches, joining their results, and the checks of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import BINS, QUANTILES, Sequences, identity, points_of
from mega_rl.converters.plan.sharding import Head
from mega_rl.data.minibatches import minimum_microbatches, plan_microbatches, rows_of_units
from mega_rl.data.packing import MicroBatch, cut, pack, pad, scatter_back
from mega_rl.errors import NonFiniteGradientError, RunError, UserError
from mega_rl.parallel.accelerator.base import send
from mega_rl.protocols import LossOutput, Ranks, TokenLoss
from mega_rl.tracking import progress
from mega_rl.types import TRAINED_TOKENS, Experience, Metrics, Rollout, TokenOutputs

# Tokens that micro-batches may grow by to be of one shape. A shape that travels costs each message a wait of the host,
# some tenths of a millisecond of the tens that a stage computes.
SHAPE_PADDING = 0.05
STEPS = "optimizer_steps"  # the number of an engine's state

# (the model's outputs on a micro-batch, its fields) -> share of the loss
MicrobatchLoss = Callable[[TokenOutputs, Mapping[str, Tensor]], LossOutput]


@dataclass(frozen=True)
class Batching:
    """Settings of micro-batches: packed up to a token budget, or padded in fixed numbers.

    Under context parallelism every rank makes the same whole micro-batches and keeps its part of each.
    """

    packing: bool
    max_tokens: int  # packed: tokens per micro-batch, padding inside it counted; of all context-parallel ranks together
    micro_batch_size: int  # padded: sequences per micro-batch
    pad_to_multiple: int = 1  # tokens; 2 * cp with context parallelism, times tp under sequence parallelism
    count_multiple: int = 1  # micro-batches; the pipeline size under the interleaved schedule
    same_shapes: bool = False  # if little padding does it; a pipeline wants it: shapes then need not travel
    cp_rank: int = 0
    cp_size: int = 1

    def split(self, batch: Rollout | Experience, *, data_parallel: Ranks) -> list[MicroBatch]:
        """Return the batch as micro-batches on the host, equally many on every data-parallel rank.

        A rank with less work than the others ends with empty micro-batches, which cost next to nothing. `batch` is the
        same on all ranks of a replica, and each context-parallel one gets its part of every micro-batch.
        """
        lengths: list[int] = batch.lengths.tolist()
        multiple = self.sequence_multiple
        if self.packing:
            lengths = [-(-length // multiple) * multiple for length in lengths]
        units = rows_of_units(len(lengths), getattr(batch, "unit", None))
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        if len(units) < len(lengths) and self.packing and max(sizes) > self.max_tokens:
            raise RunError(
                f"rows of one pair or trajectory have {max(sizes)} tokens, and train in one micro-batch: raise "
                f"trainer.microbatch.max_tokens={self.max_tokens}"
            )
        per_micro = max(self.micro_batch_size // max(map(len, units), default=1), 1)  # units of a padded micro-batch
        needed = minimum_microbatches(sizes, self.max_tokens) if self.packing else -(-len(units) // per_micro)
        count = int(data_parallel.max(torch.tensor(max(needed, 1))))
        count = -(-count // self.count_multiple) * self.count_multiple
        if self.packing:
            parts = plan_microbatches(sizes, max_tokens=self.max_tokens, count=count)
        else:
            order = sorted(range(len(units)), key=lambda unit: -sizes[unit])
            parts = [order[i * per_micro : (i + 1) * per_micro] for i in range(count)]
        plan = [sorted(row for number in part for row in units[number]) for part in parts]
        shape = self._common_shape(lengths, plan)
        if self.packing:
            make = partial(pack, sequence_multiple=multiple, min_tokens=shape[1])
        else:
            make = partial(pad, min_shape=shape)
        names = token_fields(batch)
        micros = [make(batch, rows, field_names=names, pad_to_multiple=self.pad_to_multiple) for rows in plan]
        return [cut(micro, cp_rank=self.cp_rank, cp_size=self.cp_size) for micro in micros]

    def _common_shape(self, lengths: Sequence[int], plan: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return (rows, tokens) to pad micro-batches to; (1, 1) where that adds too much."""
        if not self.same_shapes:
            return 1, 1
        if self.packing:
            shapes = [(1, sum(lengths[row] for row in rows)) for rows in plan]
        else:
            shapes = [(len(rows), max((lengths[row] for row in rows), default=0)) for rows in plan]
        rows, tokens = (max(sizes) for sizes in zip(*shapes, strict=True))
        padded, needed = len(plan) * rows * tokens, sum(rows * tokens for rows, tokens in shapes)
        return (rows, tokens) if 1 <= padded <= (1.0 + SHAPE_PADDING) * needed else (1, 1)

    @property
    def sequence_multiple(self) -> int:
        """Tokens of which the length of each packed sequence is rounded up to a multiple."""
        return 2 * self.cp_size if self.cp_size > 1 else 1


def token_fields(batch: Rollout | Experience) -> list[str]:
    """Return the names of the per-token tensors of a batch, tokens excepted."""
    fields = batch.items()  # type: ignore[union-attr]
    return [name for name, value in fields if isinstance(value, Tensor) and value.dim() == 2 and name != "tokens"]


def to_device(micros: list[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches one after the other on `device`, and report them as progress.

    What the host reads of them stays on the host: where sequences begin, and the columns that a rank holds.
    """
    for number, micro in enumerate(micros):
        progress.report(number, len(micros), unit="micro-batches")
        yield replace(
            micro,
            tokens=send(micro.tokens, device),
            position_ids=send(micro.position_ids, device),
            targets=send(micro.targets, device),
            fields={name: send(value, device) for name, value in micro.fields.items()},
            hidden=None if micro.hidden is None else send(micro.hidden, device),
        )


def microbatch_loss(
    loss: TokenLoss, minibatch: Experience, *, sum_over_context: Callable[[Tensor], Tensor] = identity
) -> MicrobatchLoss:
    """Return `loss` as a function of the micro-batches of `minibatch`, this rank's rows on the host.

    Each share of the loss counts its tokens on the loss mask, `trained_tokens`.

    sum_over_context: differentiable sum over the ranks that have the same rows and other tokens of them.
    """
    numbers = minibatch.rows.amax(dim=1) if len(minibatch.rows) else minibatch.rows.flatten()
    numbers = numbers[numbers > 0]
    own = len(numbers.unique()) == len(numbers) or minibatch.branch is not None  # rows of a trajectory share its number
    assert own, "rows are numbered on another rank: two have one number"
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
    """Return all micro-batches' outputs, [B, S] float32 on the host, 0 off the mask.

    `with_entropy`: a policy's micro-batches have it too. `combine` makes a replica's outputs [n, B, S]
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


def check_norm(name: str, norm: float, metrics: Metrics) -> None:
    """Raise NonFiniteGradientError for a gradient norm, equal on all ranks, that is not finite.

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
