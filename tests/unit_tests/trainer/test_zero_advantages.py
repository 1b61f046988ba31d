"""Without the rows of advantage 0 a mini-batch has the same gradient, over fewer micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.trainer.policy_gradient import LEFT_OUT, MinibatchPlan, PolicyGradientRules
from mega_rl.trainer.rows import rows_with_advantages
from mega_rl.types import Experience
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.fakes import FakeRanks
from tests.helpers.loops import FakeRun
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.trainer.zero_advantages_on_ranks import (
    ALL_ZERO,
    CASES,
    LEFT,
    experience,
    losses,
    run_cases,
)

pytestmark = pytest.mark.timeout(300)

RELATIVE_TOLERANCE = 1e-5  # fp32 sums of a few hundred terms in another order
# Means over the tokens of a mini-batch, whose tokens are others; what is weighed as the loss stays.
WEIGHED_AS_THE_LOSS = ("actor/loss", "actor/policy_loss", "actor/grad_norm", "grad_norm", "loss")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every case of every rank, by name."""
    checkpoint = str(write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True))
    of_ranks = {size: run_ranks(size, run_cases, size, checkpoint) for size in (1, 2)}
    return {name: [ranks[name] for ranks in of_ranks[size]] for name, (size, _, _) in CASES.items()}


@pytest.mark.parametrize("loss", losses())
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_all_rows(results: dict[str, Any], case: str, loss: str) -> None:
    (whole, left), *_ = (of_rank[loss] for of_rank in results[case])
    for name in WEIGHED_AS_THE_LOSS:
        if name in whole["metrics"]:
            expected = pytest.approx(whole["metrics"][name], rel=RELATIVE_TOLERANCE, abs=1e-7)
            assert left["metrics"][name] == expected, name
    if loss == ALL_ZERO:
        assert (left["rows"], left["metrics"]["grad_norm"]) == (1, 0.0)
        return
    assert whole["metrics"]["grad_norm"] > 1e-3
    if "gradients" in left:
        distance, name = worst_difference(left["gradients"], whole["gradients"])
        assert distance <= RELATIVE_TOLERANCE, name


@pytest.mark.parametrize("case", CASES)
def test_rows_are_left_out_and_spread_anew(results: dict[str, Any], case: str) -> None:
    of_ranks = [of_rank["ppo"] for of_rank in results[case]]
    whole, left = of_ranks[0]
    assert (whole["rows"], left["rows"]) == (8, LEFT)
    assert [result["own_rows"] for _, result in of_ranks] == [LEFT // len(of_ranks)] * len(of_ranks)
    assert left["metrics"]["num_microbatches"] < whole["metrics"]["num_microbatches"]


def only(batch: Experience) -> tuple[Experience, float]:
    """Return the rows that are left of a mini-batch of one rank, and the share of the others."""
    plan = MinibatchPlan(
        4, epochs=1, aggregation=AGGREGATIONS["token-mean"], max_response_tokens=24, seed=0, ranks=FakeRanks()
    )
    (minibatch,) = plan.cut(batch, num_prompts=4, step=0)
    return rows_with_advantages(minibatch, FakeRanks())


def test_means_are_over_the_tokens_that_are_left() -> None:
    """Weights of means sum to 1; those of the loss are as they were."""
    batch = experience((0, 1))
    left, share = only(batch)
    mask = left.loss_mask
    assert share == 0.5
    assert float(left.token_weights.sum()) == pytest.approx(1.0, rel=1e-6)
    assert torch.allclose(left.token_weights[mask], 1.0 / mask.sum())
    assert torch.allclose(left.loss_weights[mask], 1.0 / batch.loss_mask.sum())
    assert left.rows.max() == len(left)  # numbered anew


@pytest.mark.parametrize("first_step", [0, 9])
def test_the_actor_gets_only_rows_with_advantages(first_step: int) -> None:
    """The share is a metric of updates, so a step that does not train has none."""
    run = FakeRun(grpo=True, rules=PolicyGradientRules(skip_zero_advantages=True))
    run.sync.publish()
    update, rows = run.actor.update, list[int]()

    def watched(minibatch: Experience, *, step: int, inspect: Any = None) -> dict[str, float]:
        rows.append(len(minibatch.lengths))
        assert (minibatch.advantages != 0).any(dim=1).all()
        return {} if step < first_step else dict(update(minibatch, step=step, inspect=inspect))

    run.actor.update = watched
    metrics = run.step(2)
    assert sum(rows) < 8
    assert metrics.get(LEFT_OUT) == (None if first_step else 1 - sum(rows) / 8)
