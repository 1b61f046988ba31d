"""Sums over sequences against a loop over rows, packed and padded, with holes in masks and rows elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.statistics import Sequences
from mega_rl.data.packing import MicroBatch, pack, pad
from mega_rl.types import Experience, row_numbers
from tests.helpers.models import random_experience


def batch_with_holes() -> Experience:
    """Eight rows whose masks have gaps, as several turns have; the third has no response token at all."""
    batch = random_experience()
    batch.loss_mask &= torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    batch.loss_mask[2] = False
    batch.rows = row_numbers(batch.loss_mask)
    return batch


BATCH = batch_with_holes()
CHOSEN = (6, 1, 2, 4)
NAMES = ("rows", "advantages")


def micro_batch(form: str) -> MicroBatch:
    if form == "packed":
        return pack(BATCH, CHOSEN, field_names=NAMES, sequence_multiple=4, pad_to_multiple=8)
    return pad(BATCH, CHOSEN, field_names=NAMES, pad_to_multiple=8, min_shape=(6, 1))


def by_row(values: Tensor) -> list[float]:
    """The sum over each row's response tokens, 0 of rows that are elsewhere."""
    return [
        math.fsum(values[row][BATCH.loss_mask[row]].tolist()) if row in CHOSEN else 0.0
        for row in range(len(BATCH.tokens))
    ]


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_sums_are_those_of_a_loop(form: str) -> None:
    """Float64: 1e-14 is the order of the additions."""
    micro = micro_batch(form)
    sequences = Sequences(micro.fields["rows"], len(BATCH.tokens))
    advantages = micro.fields["advantages"].double()
    assert sequences.sum(advantages).tolist() == pytest.approx(by_row(BATCH.advantages.double()), abs=1e-14)
    assert sequences.sum(torch.ones_like(advantages)).tolist() == by_row(torch.ones(BATCH.tokens.shape))


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_every_token_gets_the_number_of_its_sequence(form: str) -> None:
    rows = micro_batch(form).fields["rows"]
    numbers = torch.arange(10.0, 18.0, requires_grad=True)
    spread = Sequences(rows, 8).spread(numbers)
    assert spread.shape == rows.shape
    assert all(value == (9.0 + row if row else 0.0) for value, row in zip(spread[0], rows[0], strict=True))
    (gradient,) = torch.autograd.grad(spread.sum(), numbers)
    assert gradient.tolist() == by_row(torch.ones(BATCH.tokens.shape))


def test_gradients_are_those_of_the_definition() -> None:
    """Finite differences, in float64, of a function that is not linear in the sums."""
    micro = micro_batch("packed")
    sequences = Sequences(micro.fields["rows"], 8)
    x = torch.randn(micro.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.autograd.gradcheck(
        lambda x: (sequences.spread(sequences.sum(x).exp()) * x).sum(), x.requires_grad_(), atol=1e-7
    )


def test_what_stands_elsewhere_touches_nothing() -> None:
    """A NaN on a prompt or in another sequence."""
    rows = torch.tensor([[0, 1, 1, 2, 0]])
    sequences = Sequences(rows, 3)
    x = torch.tensor([[math.nan, 1.0, 2.0, math.nan, math.inf]], requires_grad=True)
    sums = sequences.sum(x)
    assert sums[0] == 3.0
    assert sums[2] == 0.0
    (gradient,) = torch.autograd.grad(sums[0] * 2, x)
    assert gradient.tolist() == [[0.0, 2.0, 2.0, 0.0, 0.0]]
    assert sequences.spread(torch.tensor([5.0, math.nan, 7.0]))[0, :3].tolist() == [0.0, 5.0, 5.0]


def test_no_rows_have_no_sums() -> None:
    """A rank with fewer rows than the others has empty micro-batches, and nobody to add to."""
    sequences = Sequences(torch.zeros(1, 4, dtype=torch.int64), 0)
    assert sequences.sum(torch.ones(1, 4)).shape == (0,)
    assert sequences.spread(torch.zeros(0)).tolist() == [[0.0] * 4]


def test_sums_of_other_ranks_are_added() -> None:
    """Once for each sum, to the [n] numbers."""
    sequences = Sequences(torch.tensor([[1, 2, 2]]), 2, lambda sums: sums + 10.0)
    assert sequences.sum(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [11.0, 15.0]
