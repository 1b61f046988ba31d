"""A sample without an answer changes no number but the count of such samples, from metrics to gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.advantages.groups import GRPO
from mega_rl.algorithms.advantages.returns import GAE
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS, Aggregation
from mega_rl.trainer.dumps import sample_rows
from mega_rl.trainer.experience import MinibatchPlan, build_experience
from mega_rl.trainer.step_metrics import experience_metrics, rollout_metrics
from mega_rl.types import Experience, Prompt, Rewards, Rollout, TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakeRanks
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.rollouts import make_rollout
from tests.unit_tests.trainer.test_loop import read_ids

OVER_GROUPS: list[AdvantageEstimator] = [GRPO(), GRPO(std="none")]
WITH_CRITIC = GAE(gamma=0.99, gae_lambda=0.9)
PROMPTS = [Prompt(index=i, token_ids=(2, 3), text=f"p{i}", answer="a") for i in range(8)]
lengths_and_failures = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=12).filter(
    lambda rows: not all(failed for _, failed in rows)
)


def with_failures(rows: list[tuple[int, bool]]) -> tuple[Rollout, torch.Tensor]:
    """(rollout in which the marked rows have failed, rewards as the reward role gives them)."""
    rollout = make_rollout([0 if failed else length for length, failed in rows], samples=3)
    rollout.failed = torch.tensor([failed for _, failed in rows])
    rewards = torch.rand(len(rows), generator=torch.Generator().manual_seed(1))
    return rollout, rewards.masked_fill(rollout.failed, 0.0)


def answered(rollout: Rollout, rewards: torch.Tensor) -> tuple[Rollout, torch.Tensor]:
    """The same without the failed rows, as an engine gives it in which none can fail."""
    assert rollout.failed is not None
    kept = (~rollout.failed).nonzero().flatten()
    without: Rollout = rollout[kept]  # type: ignore[index]
    without.failed = None
    return without, rewards[kept]


def experience_of(rollout: Rollout, rewards: torch.Tensor, estimator: AdvantageEstimator) -> Experience:
    return build_experience(
        rollout,
        Rewards(rewards),
        old=TokenOutputs(logprobs=rollout.rollout_logprobs),
        ref=TokenOutputs(),
        critic=TokenOutputs(values=0.3 * rollout.rollout_logprobs),
        estimator=estimator,
        sum_over_ranks=FakeRanks().sum,
    )


@settings(max_examples=60, deadline=None)
@given(rows=lengths_and_failures)
@pytest.mark.parametrize("estimator", [*OVER_GROUPS, WITH_CRITIC])
def test_the_others_learn_as_if_it_were_not_there(estimator: AdvantageEstimator, rows: list[tuple[int, bool]]) -> None:
    """Advantages of all other rows, and all metrics; the failed rows have none.

    Sums of float64 have more zeros in them, which moves their order: that may show in a float32's last bit.
    """
    rollout, rewards = with_failures(rows)
    actual = experience_of(rollout, rewards, estimator)
    expected = experience_of(*answered(rollout, rewards), estimator)
    assert rollout.failed is not None
    torch.testing.assert_close(actual.advantages[~rollout.failed], expected.advantages, rtol=2e-7, atol=1e-7)
    assert torch.equal(actual.returns[~rollout.failed], expected.returns)
    assert not actual.advantages[rollout.failed].any()
    of_all, of_answered = (
        experience_metrics(experience, FakeRanks(), has_reference=True, has_critic=True)
        for experience in (actual, expected)
    )
    assert of_all == pytest.approx(of_answered, rel=1e-6, abs=1e-7)
    metrics = rollout_metrics(rollout, Rewards(rewards), FakeRanks())
    assert metrics.pop("rollout/failed_samples") == float(rollout.failed.sum())
    kept, of_kept = answered(rollout, rewards)
    assert metrics == pytest.approx(rollout_metrics(kept, Rewards(of_kept), FakeRanks()), rel=1e-12, abs=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values())
def test_it_has_no_share_in_a_mini_batch(aggregation: Aggregation) -> None:
    rollout, rewards = with_failures([(3, False), (2, True), (4, False), (1, False), (5, True), (2, False)])
    plan = MinibatchPlan(minibatch_size=2, epochs=1, aggregation=aggregation, max_response_tokens=5, seed=0)

    def weights(rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        experience = experience_of(rollout, rewards, OVER_GROUPS[0])
        (batch,) = plan.cut(experience, num_prompts=2, step=0, ranks=FakeRanks())
        return batch.loss_weights[batch.loss_mask.any(dim=1)]

    assert torch.equal(weights(rollout, rewards), weights(*answered(rollout, rewards)))


def test_tokens_of_a_failed_sample_are_our_own_bug() -> None:
    rollout, rewards = with_failures([(3, False), (2, False)])
    rollout.failed = torch.tensor([False, True])
    with pytest.raises(AssertionError, match="a failed sample has tokens"):
        experience_of(rollout, rewards, WITH_CRITIC)


def test_a_dump_says_which_samples_failed() -> None:
    rollout, rewards = with_failures([(3, False), (2, True)])
    rows = sample_rows(rollout, Rewards(rewards), PROMPTS, read_ids, render=str, step=1, count=2)
    assert [row["failed"] for row in rows] == [False, True]
    assert rows[1]["response"] == ""
    assert (
        "failed"
        not in sample_rows(make_rollout([1]), Rewards(rewards[:1]), PROMPTS, read_ids, render=str, step=1, count=1)[0]
    )


def with_empty_rows(batch: Experience) -> Experience:
    """The batch with rows 1, 4 and 5 (all of one micro-batch, perhaps) cut down to their prompts."""
    for row in (1, 4, 5):
        batch.lengths[row] = batch.prompt_lengths[row]
        batch.loss_mask[row] = False
    inside = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    batch.tokens *= inside
    tokens = batch.loss_mask.sum()
    for name in ("loss_weights", "token_weights"):
        setattr(batch, name, batch.loss_mask.float() / tokens)
    return batch


CASES = {"packed": ("lm", True), "padded": ("lm", False), "values": ("value", True)}


def train(rank: int, checkpoint: str) -> dict[str, Any]:
    """What is said of tokens, and loss and gradient, with rows without response and with these rows left out."""
    from mega_rl.config.schema import MicrobatchConfig, TrainerConfig
    from tests.helpers.engines import make_config, own_rows, running_engine
    from tests.unit_tests.distributed.engine_cases import losses

    actual: dict[str, Any] = {}
    for name, (head, packing) in CASES.items():
        microbatch = MicrobatchConfig(packing=packing, max_tokens=32, size=1)
        trainer = TrainerConfig(timeout_s=60.0, microbatch=microbatch)
        with running_engine(make_config(Path(checkpoint), layout="dp2", trainer=trainer), head=head) as engine:
            whole = own_rows(with_empty_rows(random_experience()), engine)
            for kind, rows in (("all", whole), ("answered", whole[whole.loss_mask.any(dim=1).nonzero().flatten()])):
                said = next(value for value in vars(engine.forward(rows)).values() if value is not None)
                metrics = engine.train_minibatch(rows, losses(head), lr=0.0)
                metrics.pop("num_microbatches")
                off = float((said * ~rows.loss_mask).abs().sum())
                actual[f"{name} {kind}"] = {"said": said[rows.loss_mask], "off": off, "metrics": metrics}
    return actual


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    results: list[dict[str, Any]] = run_ranks(2, train, str(checkpoint), timeout_s=240)
    return results


@pytest.mark.parametrize("case", list(CASES))
def test_engines_train_on_rows_without_response(trained: list[dict[str, Any]], case: str) -> None:
    """As without them: micro-batches are cut differently, so sums differ by float32 rounding.

    Rank 1 has rows 4 and 5 without response: padded, each is a micro-batch in which no token trains.
    """
    for rank in trained:
        actual, expected = (rank[f"{case} {kind}"] for kind in ("all", "answered"))
        assert actual["off"] == 0.0
        torch.testing.assert_close(actual["said"], expected["said"], rtol=0, atol=1e-5)
        assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)
        assert actual["metrics"][next(name for name in actual["metrics"] if name.endswith("grad_norm"))] > 1e-3
