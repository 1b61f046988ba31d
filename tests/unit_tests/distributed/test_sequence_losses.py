"""A loss that reads whole sequences does not depend on how they are packed, cut, or spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.losses.aggregation import sequence_mean_token_mean
from mega_rl.algorithms.sequences import Sequences
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.fakes import FakeRanks
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.sequence_losses_on_ranks import (
    CASES,
    WITHOUT_TEACHER,
    SequenceRatioLoss,
    losses_of,
    run_cases,
)

pytestmark = pytest.mark.timeout(300)

# As in test_engine_parity: fp32 sums of a few hundred terms in another order.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, by name; one launch for each number of ranks."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)
    return run_ranks(1, run_cases, 1, str(checkpoint))[0] | run_ranks(2, run_cases, 2, str(checkpoint))[0]


COMPARED = [(case, loss) for case in CASES if case != "1" for loss in losses_of(case)]


@pytest.mark.parametrize(("case", "loss"), COMPARED)
def test_layouts_and_cuts_agree(results: dict[str, Any], case: str, loss: str) -> None:
    """Every metric of the loss, the gradient norm, and every gradient."""
    one, other = results["1"][loss], results[case][loss]
    assert other["metrics"].keys() == one["metrics"].keys()
    for name in one["metrics"].keys() - {"num_microbatches"}:
        expected = pytest.approx(one["metrics"][name], rel=RELATIVE_TOLERANCE, abs=1e-7)
        assert other["metrics"][name] == expected, name
    if "gradients" in other:
        distance, name = worst_difference(other["gradients"], one["gradients"])
        assert distance <= RELATIVE_TOLERANCE, name


def test_the_cases_are_different(results: dict[str, Any]) -> None:
    """Micro-batches are several where they should be, ratios are not 1, and losses cut some tokens off and not all."""
    counts = {name: result["ratio"]["metrics"]["num_microbatches"] for name, result in results.items()}
    assert min(counts["1"], counts["padded"], counts["cp2"]) >= 2.0
    assert counts["packed, one sequence"] >= 5.0
    one = {loss: result["metrics"] for loss, result in results["1"].items()}
    assert abs(one["ratio"]["actor/ratio"] - 1.0) > 0.1
    names = ("clip_fraction_low", "capped_fraction", "masked_fraction", "covariance_fraction")
    shares = {(loss, name): one[loss].get(f"actor/{name}") for loss in WITHOUT_TEACHER for name in names}
    shares |= {(loss, ""): one[loss]["actor/correction_masked_fraction"] for loss in CORRECTIONS if loss != "tis"}
    shares["tis", ""] = one["tis"]["actor/tis_truncated_fraction"]
    shares = {place: share for place, share in shares.items() if share is not None}
    assert len(shares) == 9 + len(CORRECTIONS)
    assert all(0.0 < share < 1.0 for share in shares.values()), shares
    norms = [metrics["grad_norm"] for metrics in one.values()]
    assert len({round(norm, 4) for norm in norms}) == len(norms)  # no two losses are the same


def test_a_copied_number_of_a_row_is_our_own_bug() -> None:
    """Rows that come from several ranks and keep their numbers would be one sequence."""
    from mega_rl.engines.outcome import microbatch_loss

    batch = random_experience()
    batch.rows[3] = batch.rows[0]
    with pytest.raises(AssertionError, match="numbered on another rank"):
        microbatch_loss(SequenceRatioLoss(), batch)


def test_the_reference_is_the_loss_of_a_loop() -> None:
    """Row by row in float64, at a uniform model's log-probs."""
    plan = MinibatchPlan(4, 1, sequence_mean_token_mean, max_response_tokens=24, seed=0, ranks=FakeRanks())
    (batch,) = plan.cut(random_experience(), num_prompts=4, step=0)
    logprobs = torch.full(batch.tokens.shape, -3.0)
    fields = {name: value for name, value in batch.items() if value is not None and value.dim() == 2}
    actual = SequenceRatioLoss()(TokenOutputs(logprobs), fields, Sequences(batch.rows, len(batch.rows)))
    total = 0.0
    for row in range(len(batch.rows)):
        mask = batch.loss_mask[row]
        ratio = float((logprobs - batch.old_logprobs)[row, mask].double().mean().exp())
        total -= ratio * float(batch.advantages[row, mask].double().mean()) / len(batch.rows)
    assert float(actual.loss) == pytest.approx(total, rel=1e-6)
