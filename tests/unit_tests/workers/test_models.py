"""The model roles: which fields a loss reads, how metrics are named, and when a role learns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms import losses
from mega_rl.algorithms.kl import KLController, k2
from mega_rl.algorithms.losses import KLTerm, PolicyTokens, clipped_value_loss
from mega_rl.algorithms.policy_losses import PPO
from mega_rl.algorithms.statistics import Sequences
from mega_rl.errors import NonFiniteGradientError
from mega_rl.protocols import Inspect, LossOutput, TokenLoss
from mega_rl.types import Experience, Lesson, Metrics, TokenOutputs
from mega_rl.workers.models import LearningWorker, PolicyLoss, ValueLoss
from tests.helpers.models import random_experience

BATCH = random_experience()
FIELDS: dict[str, Tensor] = {name: value for name, value in BATCH.items() if value.dim() == 2}
SEQUENCES = Sequences(BATCH.rows, len(BATCH.tokens))
OBJECTIVE = PPO(clip_low=0.1, clip_high=0.4, dual_clip=3.0)
ENTROPY_COEF = 0.02
GENERATOR = torch.Generator().manual_seed(3)
LOGPROBS = FIELDS["old_logprobs"] + 0.5 * torch.randn(BATCH.tokens.shape, generator=GENERATOR)
ENTROPY = torch.rand(BATCH.tokens.shape, generator=GENERATOR)


class RecordingEngine:
    """An engine that learns nothing and remembers what it was asked."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or {}
        self.updates: list[tuple[Experience, TokenLoss, float]] = []
        self.outputs = TokenOutputs(logprobs=LOGPROBS)

    def forward(self, batch: Experience, *, with_entropy: bool = False) -> TokenOutputs:
        assert batch is BATCH
        return replace(self.outputs, entropy=ENTROPY) if with_entropy else self.outputs

    def train_minibatch(
        self,
        minibatch: Experience,
        loss: TokenLoss,
        *,
        lr: float,
        inspect: Inspect | None = None,
        lesson: Lesson | None = None,
    ) -> Metrics:
        self.updates.append((minibatch, loss, lr))
        return dict(self.metrics)


def learner(engine: RecordingEngine, **changes: Any) -> LearningWorker:
    settings: dict[str, Any] = {"loss": ValueLoss(value_clip=0.2), "learning_rate": lambda step: 0.1 * step} | changes
    return LearningWorker("critic", engine, **settings)  # type: ignore[arg-type]


def same(actual: LossOutput, expected: LossOutput) -> bool:
    """Whether two losses are the same numbers under the same names."""
    return (
        torch.equal(actual.loss, expected.loss)
        and {k: float(v) for k, v in actual.sums.items()} == {k: float(v) for k, v in expected.sums.items()}
        and {k: float(v) for k, v in actual.maxima.items()} == {k: float(v) for k, v in expected.maxima.items()}
    )


def policy_loss(kl: KLController | KLController | None) -> PolicyLoss:
    return PolicyLoss(OBJECTIVE, kl=kl, kl_estimator=k2, entropy_coef=ENTROPY_COEF)


def direct_policy_loss(kl_coef: float | None) -> LossOutput:
    tokens = PolicyTokens.of(
        LOGPROBS,
        old_logprobs=BATCH.old_logprobs,
        advantages=BATCH.advantages,
        loss_weights=BATCH.loss_weights,
        token_weights=BATCH.token_weights,
        sequences=SEQUENCES,
    )
    return losses.policy_loss(
        tokens,
        ENTROPY,
        objective=OBJECTIVE,
        entropy_coef=ENTROPY_COEF,
        kl=None if kl_coef is None else KLTerm(BATCH.ref_logprobs, kl_coef, k2),
    )


@pytest.mark.parametrize("kl_coef", [None, 0.3])
def test_the_policy_loss_reads_its_fields(kl_coef: float | None) -> None:
    """The reference's log-probs only with a KL term in the loss. Fields differ, so that none can stand for another."""
    assert len({float(FIELDS[name].sum()) for name in FIELDS if name != "token_weights"}) == len(FIELDS) - 1
    loss = policy_loss(None if kl_coef is None else KLController(kl_coef))
    actual = loss(TokenOutputs(logprobs=LOGPROBS, entropy=ENTROPY), FIELDS, SEQUENCES)
    assert same(actual, direct_policy_loss(kl_coef))
    assert ("actor/ref_kl" in actual.sums) == (kl_coef is not None)


def test_an_update_with_its_own_old_logprobs_measures_the_policys_kl() -> None:
    """Not the rollout engine's, which stand in as old log-probs until then. Two micro-batches add up to the whole."""
    outputs = TokenOutputs(logprobs=LOGPROBS.clone().requires_grad_(), entropy=ENTROPY)
    loss = replace(policy_loss(KLController(0.3)), on_policy=True)
    sums = loss(outputs, FIELDS | {"old_logprobs": BATCH.ref_logprobs}, SEQUENCES).sums
    mask = BATCH.token_weights > 0
    gap = (LOGPROBS - BATCH.ref_logprobs)[mask].double()
    bounded = ((-gap).exp() - 1 + gap).clamp(max=10)
    assert float(sums["kl/ref"]) == pytest.approx(float((BATCH.token_weights[mask] * bounded).sum()), rel=1e-5)
    assert float(sums["kl/ref_k1"]) == pytest.approx(float((BATCH.token_weights[mask] * gap).sum()), rel=1e-5)
    assert float(sums["kl/ref"]) > 0.05
    assert not any(value.requires_grad for value in sums.values())
    halves = [
        loss(
            TokenOutputs(logprobs=LOGPROBS[rows], entropy=ENTROPY[rows]),
            {k: v[rows] for k, v in FIELDS.items()},
            replace(SEQUENCES, rows=BATCH.rows[rows]),
        ).sums
        for rows in (slice(0, 1), slice(1, None))
    ]
    assert sum(float(half["kl/ref"]) for half in halves) == pytest.approx(float(sums["kl/ref"]), rel=1e-5)
    assert "kl/ref" not in policy_loss(KLController(0.3))(outputs, FIELDS, SEQUENCES).sums
    assert "kl/ref" not in replace(loss, kl=None)(outputs, FIELDS, SEQUENCES).sums


def test_the_entropy_is_asked_for_where_the_bonus_counts() -> None:
    """Without a bonus the metric is the sampled tokens' mean -log p, and the loss is what it is with an entropy."""
    loss = policy_loss(None)
    assert loss.needs_entropy
    assert not ValueLoss(value_clip=0.2).needs_entropy
    free = replace(loss, entropy_coef=0.0)
    assert not free.needs_entropy
    actual = free(TokenOutputs(logprobs=LOGPROBS), FIELDS, SEQUENCES)
    assert float(actual.sums["actor/entropy"]) == pytest.approx(-float((BATCH.token_weights * LOGPROBS).sum()))
    assert torch.equal(actual.loss, free(TokenOutputs(logprobs=LOGPROBS, entropy=ENTROPY), FIELDS, SEQUENCES).loss)


def test_the_value_loss_reads_its_fields() -> None:
    """Old values are the experience's, weights those of tokens, whatever a policy's loss weighs."""
    values, fields = BATCH.values + ENTROPY, FIELDS | {"loss_weights": 3 * BATCH.token_weights}
    expected = clipped_value_loss(
        values,
        old_values=BATCH.values,
        returns=BATCH.returns,
        token_weights=BATCH.token_weights,
        value_clip=0.2,
    )
    assert same(ValueLoss(value_clip=0.2)(TokenOutputs(values=values), fields, SEQUENCES), expected)


def test_the_critic_may_learn_first() -> None:
    """Before `first_step` the actor stands still: no metrics, and the engine is not asked."""
    engine = RecordingEngine({"grad_norm": 1.0})
    worker = learner(engine, first_step=3)
    assert [bool(worker.update(BATCH, step=step)) for step in range(5)] == [False, False, False, True, True]
    assert [rate for _, _, rate in engine.updates] == pytest.approx([0.0, 0.1])  # counted from its own first step


class OverflowingEngine(RecordingEngine):
    """An engine whose gradients are finite or not, update by update."""

    def __init__(self, norms: list[float]) -> None:
        super().__init__({"grad_norm": 1.0, "critic/loss": 2.0})
        self.norms = norms

    def train_minibatch(self, *args: Any, **kwargs: Any) -> Metrics:
        norm = self.norms.pop(0)
        if math.isfinite(norm):
            return super().train_minibatch(*args, **kwargs)
        raise NonFiniteGradientError("overflow", norm=norm, metrics={"critic/loss": norm, "critic/error_max": 3.0})


def test_an_update_without_a_token_is_a_skipped_step() -> None:
    """It is no failure: the count of gradients in a row that are not finite neither grows nor begins anew."""
    worker = learner(RecordingEngine({"trained_tokens": 0.0}), max_skipped_steps=0)
    for step in range(3):
        assert worker.update(BATCH, step=step) == {"critic/trained_tokens": 0.0, "critic/skipped_steps": 1.0}


def test_steps_without_a_finite_gradient_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Two in a row are allowed here, and each finite gradient begins the count anew."""
    worker = learner(OverflowingEngine([math.nan, math.inf, 1.0, math.inf, math.nan, 1.0]), max_skipped_steps=2)
    updates = [worker.update(BATCH, step=step) for step in range(6)]
    assert [update["critic/skipped_steps"] for update in updates] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert updates[0] == {"critic/error_max": 3.0, "critic/skipped_steps": 1.0}  # what is a number
    assert caplog.messages[1] == (
        "critic, step 2: the gradient norm is inf; this optimizer step is skipped, number 2 in a row "
        "(optim.max_skipped_steps=2)"
    )


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (0, "critic, step 1: the gradient norm is nan; optim.max_skipped_steps=0 allows no more. No weight"),
        (2, "critic, step 3: the gradient norm is nan in 3 optimizer steps in a row; optim.max_skipped_steps=2"),
    ],
)
def test_too_many_skipped_steps_in_a_row_end_the_run(allowed: int, expected: str) -> None:
    worker = learner(OverflowingEngine([math.nan] * (allowed + 1)), max_skipped_steps=allowed)
    for step in range(allowed):
        worker.update(BATCH, step=step)
    with pytest.raises(NonFiniteGradientError) as error:
        worker.update(BATCH, step=allowed)
    assert str(error.value).startswith(expected)
    assert "lower optim.lr or optim.critic_lr" in str(error.value)
