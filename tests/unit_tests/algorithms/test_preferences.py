"""Losses of given answers against their equations in float64, and rows that keep together.

1e-6: float32 sums of a dozen numbers of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.preferences import DPO, IPO, KTO, ORPO, RewardModel, SimPO, preference_loss
from mega_rl.algorithms.statistics import Sequences
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.given import example_rows
from mega_rl.types import Given, LossOutput, Prompt, row_numbers

LENGTHS = (1, 5, 3, 2, 4, 4)
ROWS, WIDTH = len(LENGTHS), max(LENGTHS) + 2
MASK = torch.tensor([[2 <= place < 2 + length for place in range(WIDTH)] for length in LENGTHS])
Equation = Callable[[float, float, float, float, int, int, float], float]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def odds(logprob: float) -> float:
    return logprob - math.log(1 - math.exp(logprob))


# (log p chosen, log p rejected, log q of both, their tokens, margin) -> loss of the pair
EQUATIONS: dict[str, tuple[Any, Equation]] = {
    "dpo": (DPO(0.3), lambda c, r, rc, rr, m, n, margin: -log_sigmoid(0.3 * (c - rc - r + rr))),
    "smoothed": (
        DPO(0.3, label_smoothing=0.2),
        lambda c, r, rc, rr, m, n, margin: (
            -0.8 * log_sigmoid(0.3 * (c - rc - r + rr)) - 0.2 * log_sigmoid(-0.3 * (c - rc - r + rr))
        ),
    ),
    "ipo": (IPO(0.5), lambda c, r, rc, rr, m, n, margin: (c - rc - r + rr - 1.0) ** 2),
    "simpo": (SimPO(2.0, 0.5), lambda c, r, rc, rr, m, n, margin: -log_sigmoid(2 * c / m - 2 * r / n - 0.5)),
    "orpo": (ORPO(0.4), lambda c, r, rc, rr, m, n, margin: -c / m - 0.4 * log_sigmoid(odds(c / m) - odds(r / n))),
    "rm": (
        RewardModel(0.1),
        lambda c, r, rc, rr, m, n, margin: -log_sigmoid(c - r - margin) + 0.1 * (c + r) ** 2,
    ),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, those of the reference, and worths, [ROWS, WIDTH]; what is off the mask must not count."""
    torch.manual_seed(0)
    logprobs, refs = -torch.rand(2, ROWS, WIDTH) - 0.1
    logprobs[~MASK] = torch.nan
    worth = torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0])[:, None] * MASK
    return logprobs, refs, worth


def loss_of(
    kind: Any, logprobs: Tensor, refs: Tensor, worth: Tensor, baseline: float = 0.0, rows: Any = slice(None)
) -> LossOutput:
    """The loss on some rows of a mini-batch."""
    weights = MASK / (ROWS * MASK.sum(dim=1, keepdim=True))
    given = {"ref_logprobs": refs, "worth": worth, "baseline": baseline * MASK, "loss_weights": weights}
    sequences = Sequences(row_numbers(MASK)[rows], ROWS)
    return preference_loss(kind, logprobs[rows], **{name: x[rows] for name, x in given.items()}, sequences=sequences)


@pytest.mark.parametrize("name", EQUATIONS)
def test_losses_of_pairs_follow_their_equations(name: str) -> None:
    kind, equation = EQUATIONS[name]
    logprobs, refs, worth = inputs()
    logprobs.requires_grad_()
    out = loss_of(kind, logprobs, refs, worth)
    sums = [float(row[mask].double().sum()) for row, mask in zip(logprobs.detach(), MASK, strict=True)]
    of_ref = [float(row[mask].double().sum()) for row, mask in zip(refs, MASK, strict=True)]
    chosen, rejected = slice(0, None, 2), slice(1, None, 2)
    numbers = [sums[chosen], sums[rejected], of_ref[chosen], of_ref[rejected], LENGTHS[chosen], LENGTHS[rejected]]
    pairs = list(zip(*numbers, (0.5, 0.0, 1.0), strict=True))

    def mean(shift: float = 0.0) -> float:
        return math.fsum(equation(c + shift, *others) for c, *others in pairs) / len(pairs)

    assert float(out.loss) == pytest.approx(mean(), abs=1e-6)
    out.loss.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[~MASK].any()
    tokens = [float(logprobs.grad[row][MASK[row]].sum()) / LENGTHS[row] for row in range(0, ROWS, 2)]
    assert math.fsum(tokens) == pytest.approx((mean(1e-5) - mean(-1e-5)) / 2e-5, abs=1e-5)


def test_kto_weighs_desired_and_other_answers() -> None:
    logprobs, refs, _ = inputs()
    signs = torch.tensor([1.0, -1, 1, 1, -1, 1])
    out = loss_of(KTO(0.4, 1.5, 0.7), logprobs, refs, signs[:, None] * MASK, baseline=0.25)
    expected = 0.0
    for row, sign in enumerate(signs.tolist()):
        ratio = float((logprobs[row] - refs[row])[MASK[row]].double().sum())
        expected += (1.5 if sign > 0 else 0.7) * (1 - math.exp(log_sigmoid(sign * 0.4 * (ratio - 0.25)))) / ROWS
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_pairs_of_other_microbatches_do_not_count() -> None:
    parts = [float(loss_of(DPO(), *inputs(), rows=rows).loss) for rows in ([0, 1], [2, 3, 4, 5])]
    assert math.fsum(parts) == pytest.approx(float(loss_of(DPO(), *inputs()).loss), abs=1e-6)


PAIRS = [
    Prompt(0, (3, 4), "", None, given=(Given((3, 4, 5, 6), ((2, 4),)), Given((3, 4, 7), ((2, 3),))), worth=0.5),
    Prompt(1, (8,), "", None, given=(Given((8, 9), ((1, 2),)), Given((8, 9, 9, 9, 1), ((1, 3), (4, 5))))),
]


def test_rows_of_pairs_are_neighbours_and_share_a_unit() -> None:
    rows = example_rows(PAIRS, SingleRank())
    assert rows.lengths.tolist() == [4, 3, 2, 5]
    assert rows.unit is not None
    assert rows.unit.tolist() == rows.prompt_index.tolist() == [0, 0, 1, 1]
    trained = [row[mask].tolist() for row, mask in zip(rows.tokens, rows.loss_mask, strict=True)]
    assert trained == [[5, 6], [7], [9], [9, 9, 1]]
    assert rows.advantages[0].tolist() == [0, 0, 0.5, 0.5, 0]


def test_score_is_that_of_the_last_token() -> None:
    """The output aligned to a token is that of the position before it: the place behind each row's last token."""
    rows = example_rows(PAIRS, SingleRank(), scores=True)
    assert [row.nonzero().flatten().tolist() for row in rows.loss_mask] == [[4], [3], [2], [5]]
    assert rows.lengths.tolist() == [5, 4, 3, 6]


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_stay_in_one_microbatch(packing: bool) -> None:
    from mega_rl.engines.microbatches import Batching

    rows = example_rows(PAIRS * 3, SingleRank())
    micros = Batching(packing, max_tokens=14, micro_batch_size=2).split(rows, data_parallel=SingleRank())
    assert len(micros) > 2
    assert sorted(row for micro in micros for row in micro.rows) == list(range(12))
    for micro in micros:
        assert {row ^ 1 for row in micro.rows} == set(micro.rows)
