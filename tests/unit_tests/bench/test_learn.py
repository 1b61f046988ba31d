"""Learning tasks: the arithmetic of bands and closed forms, noise, and a short run."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mega_rl
from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.returns import GAE
from mega_rl.algorithms.losses.objectives import PPO, PolicyTokens
from mega_rl.algorithms.sequences import Sequences
from mega_rl.algorithms.statistics import identity
from mega_rl.bench.learn import run
from mega_rl.bench.learn.enumeration import closed_form_distance, enumerate_responses, expected_reward
from mega_rl.bench.learn.neighbours_advantage import NeighboursAdvantage
from mega_rl.bench.learn.noise import mix_with_uniform
from mega_rl.bench.learn.results import ConfidenceBand, Curve, band, judge, summarize
from mega_rl.bench.learn.task import Beats, LearningTask, Reaches
from mega_rl.bench.learn.tasks import TASKS
from mega_rl.bench.learn.tasks.bandit import BANDIT
from mega_rl.bench.learn.tasks.delayed_credit import LENGTH, LETTERS, POLICY_LAMBDA, STATES
from mega_rl.bench.learn.tasks.off_policy import NOISE, SAFE_REWARD, TOKENS
from mega_rl.bench.learn.tasks.reused_batch import ARMS, NO_CLIP, NUM_ROWS, best_arm
from mega_rl.bench.learn.tasks.sorting import HELD_OUT, TRAIN
from mega_rl.errors import UserError
from mega_rl.rollout.embedded.engine import HFRolloutEngine
from mega_rl.types import Experience, Rollout, TokenOutputs
from mega_rl.workers.rollout import RolloutWorker
from tests.unit_tests.bench.tiny_task import TINY


class Table:
    """Model with a fixed log-prob for every row of an enumeration."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        self.logprobs = torch.tensor(probabilities).log().flatten()

    def evaluate(self, rows: Rollout) -> TokenOutputs:
        return TokenOutputs(logprobs=self.logprobs[:, None] * rows.loss_mask)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_band_is_students_interval() -> None:
    # By hand: mean 3, s^2 = 10 / 4, s / sqrt(5) = sqrt(0.5), times t(4) = 2.776.
    result = band([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.high - 3.0 == pytest.approx(2.776 * math.sqrt(0.5))
    assert 3.0 - result.low == pytest.approx(2.776 * math.sqrt(0.5))
    assert band([2.0]) == ConfidenceBand(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("better", "statement", "holds"),
    [
        ("higher", Reaches("a", 0.9), True),
        ("higher", Reaches("a", 0.95), False),  # the mean reaches it, the band does not
        ("higher", Beats("a", "b"), True),
        ("higher", Beats("a", "c"), False),  # bands overlap
        ("lower", Reaches("b", 0.8), True),
        ("lower", Reaches("b", 0.7), False),
        ("lower", Beats("b", "a"), True),
        ("lower", Beats("c", "a"), False),
    ],
)
def test_statements_are_about_whole_bands(better: str, statement: Reaches | Beats, holds: bool) -> None:
    finals = {
        "a": ConfidenceBand(0.95, 0.9, 1.0),
        "b": ConfidenceBand(0.7, 0.6, 0.8),
        "c": ConfidenceBand(0.85, 0.8, 0.91),
    }
    assert judge(replace(TINY, better=better), statement, finals).holds is holds


def test_the_distance_to_the_closed_form_is_that_of_the_formula() -> None:
    rows, rewards = enumerate_responses(TINY, length=1)
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    beta, reference = 0.5, [[0.3, 0.7], [0.5, 0.5]]
    weights = [[0.3 * math.exp(2), 0.7], [0.5, 0.5 * math.exp(2)]]
    optimum = [[weight / sum(row) for weight in row] for row in weights]
    policy = [[0.6, 0.4], [0.1, 0.9]]
    expected = sum(
        p * math.log(p / q) for row, best in zip(policy, optimum, strict=True) for p, q in zip(row, best, strict=True)
    )
    trainer: Any = SimpleNamespace(actor=Table(policy), reference=Table(reference))
    # Log-probs are float32: 1e-6 is ten times their rounding.
    assert closed_form_distance(trainer, rows, rewards, beta=beta) == pytest.approx(expected / 2, abs=1e-6)
    assert expected_reward(trainer, rows, rewards) == pytest.approx((0.6 + 0.9) / 2, abs=1e-6)
    trainer.actor = Table(optimum)
    assert closed_form_distance(trainer, rows, rewards, beta=beta) == pytest.approx(0.0, abs=1e-6)


def test_two_tokens_are_enumerated_with_every_prompt() -> None:
    rows, rewards = enumerate_responses(TASKS["off_policy"], length=2)
    assert rows.tokens.shape == (4 * 256, 3)
    assert rows.loss_mask.sum() == 2 * 4 * 256
    assert rewards.shape == (4, 256)
    assert len({tuple(row) for row in rows.tokens.tolist()}) == 1024


def test_a_result_has_the_bands_of_every_point() -> None:
    runs = [Curve(seed, ((10, float(seed)), (20, 1.0)), 0.0) for seed in range(2)]
    result = summarize(TINY, {"right": runs, "wrong": runs})
    assert [(step, point.mean) for step, point in result.variants[0].bands] == [(10, 0.5), (20, 1.0)]


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_statements_are_about_variants_that_always_run() -> None:
    for task in TASKS.values():
        always = {variant.name for variant in task.variants if not variant.ablation}
        for statement in task.statements:
            named = {statement.variant} | ({statement.other} if isinstance(statement, Beats) else set())
            assert named <= always, task.name


def test_random_tokens_make_the_precise_response_the_worse_one() -> None:
    reward = TASKS["off_policy"].reward
    best = max(reward("a", "c" + token) for token in TOKENS)
    noisy = (1 - NOISE) * best + NOISE * sum(reward("a", "c" + token) for token in TOKENS) / len(TOKENS)
    assert noisy < SAFE_REWARD < best == 1.0


def test_half_of_the_first_letters_are_good_and_other_tokens_do_not_matter() -> None:
    reward = TASKS["delayed_credit"].reward
    good = {state: {letter for letter in LETTERS if reward(state, letter + "1") == 1.0} for state in STATES}
    assert {state: len(letters) for state, letters in good.items()} == {"0": 8, "1": 8}
    assert good["0"] != good["1"]
    assert reward("0", "a" + "p" * (LENGTH - 1)) == 1.0
    assert reward("0", "p" + "a" * (LENGTH - 1)) == reward("0", "0") == 0.0


@pytest.mark.parametrize(("critic", "expected"), [(False, 0.0337), (True, 13.86)])
def test_values_multiply_the_signal_of_the_first_token(critic: bool, expected: float) -> None:
    # By hand, rewards 0 and 1 in equal shares, lambda 0.9, 48 tokens: without values A_t = lambda^(47 - t) R, whose
    # deviation over all tokens is 0.210, so first tokens differ by 0.9^47 / 0.210. With exact values A_0 = R - 0.5 is
    # all there is: 1 / sqrt(0.25 / 48). The tolerance is the rounding of 0.0337.
    tokens, one = torch.ones(2, LENGTH + 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    experience = Experience.from_rows(tokens, prompt_lengths=one, lengths=one * (LENGTH + 1), prompt_index=0 * one)
    rewards = torch.tensor([1.0, 0.0])
    if critic:
        values = torch.where(experience.loss_mask, rewards[:, None], 0.0)
        values[torch.arange(2), experience.loss_mask.int().argmax(dim=1)] = 0.5
        experience = replace(experience, values=values)
    advantages, _ = GAE(policy_lambda=POLICY_LAMBDA)(AdvantageInputs(experience, rewards, None, identity))
    first = advantages[experience.loss_mask].view(2, LENGTH)[:, 0]
    assert float(first[0] - first[1]) == pytest.approx(expected, rel=2e-3)


def test_pairs_that_are_held_out_are_not_in_training() -> None:
    train, held_out = {prompt for prompt, _ in TRAIN}, {prompt for prompt, _ in HELD_OUT}
    assert (len(train), len(held_out), len(train | held_out)) == (80, 20, 100)
    reward = TASKS["sorting"].reward
    assert dict(TRAIN + HELD_OUT)["73="] == "37"
    assert [reward("73=", text, "37", "stop") for text in ("37", "33", "73")] == pytest.approx([1.0, 0.6, 0.2])
    assert [reward("73=", text, "37", "stop") for text in ("3", "3+", "377")] == [0.0, 0.0, 0.0]
    assert reward("73=", "37", "37", "length") == 0.0


def test_the_wrong_estimator_gives_every_row_the_advantage_of_the_next() -> None:
    one = torch.ones(4, dtype=torch.int64)
    tokens = torch.ones(4, 3, dtype=torch.int64)
    index = torch.tensor([0, 0, 1, 1])
    experience = Experience.from_rows(tokens, prompt_lengths=one, lengths=3 * one, prompt_index=index)
    inputs = AdvantageInputs(experience, torch.tensor([1.0, 0.0, 0.0, 1.0]), None, identity)
    advantages, _ = NeighboursAdvantage()(inputs)
    # Two rewards of 0 and 1 are sqrt(1/2) deviations apart from their mean.
    expected = torch.tensor([-1.0, -1.0, 1.0, 1.0]) * math.sqrt(0.5)
    torch.testing.assert_close(advantages[:, 1], expected, atol=1e-5, rtol=0)


def test_every_arm_pays_on_exactly_its_share_of_the_rows() -> None:
    task = TASKS["reused_batch"]
    states = sorted({prompt for prompt, _ in task.prompts})
    assert len({best_arm(state) for state in states}) == len(states)
    _, rewards = enumerate_responses(task, length=1)
    assert rewards.shape == (len(states) * NUM_ROWS, len(ARMS))
    for state, paid in zip(states, rewards.view(len(states), NUM_ROWS, len(ARMS)).mean(1), strict=True):
        assert paid.tolist() == [0.9 if arm == best_arm(state) else 0.4 for arm in ARMS]
    other = dict(zip(task.prompts, rewards.tolist(), strict=True))
    assert len({tuple(paid) for paid in other.values()}) > 100, "rows differ in which arms pay"


def updated_policy(loss: PPO, advantages: Tensor) -> Tensor:
    """Return a policy of one state, [arms], uniform before 32 updates with Adam on a batch with each arm once."""
    logits = torch.zeros(len(advantages), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    old = logits.detach().log_softmax(0)
    weights = torch.full_like(advantages, 1 / len(advantages))
    sequences = Sequences(torch.arange(1, len(advantages) + 1), len(advantages))
    for _ in range(32):
        tokens = PolicyTokens.of(
            logits.log_softmax(0),
            old_logprobs=old,
            advantages=advantages,
            token_weights=weights,
            loss_weights=weights,
            sequences=sequences,
        )
        optimizer.zero_grad()
        (weights * loss(tokens)[0]).sum().backward()
        optimizer.step()
    return logits.detach().softmax(0)


def test_without_a_clip_many_updates_give_all_mass_to_the_best_of_the_batch() -> None:
    # One arm is the best of the batch by a little. The unclipped objective, linear in the policy, is largest where it
    # has all mass. The clipped one is flat for every arm above average once its ratio is 1.2: the seven others keep up
    # with the best, and the mass of eight arms that go down is theirs, 1/8 at most for each.
    advantages = torch.tensor([-0.4] * 8 + [0.4] * 7 + [0.5])
    unclipped, clipped = updated_policy(PPO(**NO_CLIP), advantages), updated_policy(PPO(), advantages)
    assert unclipped[-1] > 0.98
    torch.testing.assert_close(clipped[8:], torch.full((8,), 1 / 8), atol=0.01, rtol=0)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_settings_of_every_variant_are_legal(task: LearningTask) -> None:
    for variant in task.variants:
        mega_rl.load_config(None, {**run.SHARED, **task.settings, **variant.settings})


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    """The bandit by a trainer with the KL penalty, and by one without, one seed and few steps."""
    few = replace(BANDIT, settings={**BANDIT.settings, "trainer.steps": 30})
    right = next(variant for variant in BANDIT.variants if not variant.ablation)
    wrong = replace(right, settings={**right.settings, "algorithm.kl.coef": 0.0})
    return {name: run.run_variant(few, variant, seed=0) for name, variant in (("right", right), ("wrong", wrong))}


def test_the_penalty_leads_the_bandit_to_the_closed_form(curves: dict[str, Curve]) -> None:
    right, wrong = (dict(curves[name].points) for name in ("right", "wrong"))
    assert list(right) == [10, 20, 30]
    assert right[30] < 0.3 * right[10]
    assert right[30] < 0.3 * wrong[30]


def test_the_sampler_draws_the_share_of_noise_and_reports_the_mixtures_logprobs() -> None:
    class Head(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    head = Head()
    engine = HFRolloutEngine.__new__(HFRolloutEngine)
    engine._model = SimpleNamespace(get_output_embeddings=lambda: head)  # type: ignore[assignment]
    mix_with_uniform(RolloutWorker(engine, None, None, n=1, seed=0), share=0.25)  # type: ignore[arg-type]
    probabilities = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
    mixture = head(probabilities.log()).softmax(-1)
    torch.testing.assert_close(mixture, 0.75 * probabilities + 0.25 / 4)
    with pytest.raises(UserError, match="only the embedded engine"):
        mix_with_uniform(SimpleNamespace(), share=0.25)  # type: ignore[arg-type]
