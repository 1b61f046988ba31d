"""Scores of turns, returns over turns and turns that train, against plain loops in float64, with gradients."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_rl.agents.trajectory import Trajectory, Turn, rows_of, score_fault
from mega_rl.algorithms.advantages import ESTIMATORS, AdvantageKind
from mega_rl.algorithms.inputs import gae
from mega_rl.algorithms.losses import AGGREGATIONS, clipped_value_loss
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.policy_gradient import MinibatchPlan, build_experience
from mega_rl.types import Experience, Prompt, Rewards, Rollout, TokenOutputs
from tests.unit_tests.agents.test_trajectory import turn

PROMPTS = [Prompt(7, (3, 4), "a", ""), Prompt(8, (5,), "b", "")]
# Of each sample: (its turns, their scores, its own score). Tokens are distinct, so that each has a gradient.
SAMPLES: list[tuple[list[tuple[int, ...]], list[float | None], float | None]] = [
    ([(11, 12, 13), (14,), (15, 16)], [0.5, None, -1.0], 2.0),
    ([(21, 22)], [None], 0.25),
    ([(31,), (32, 33, 34, 35)], [None, 3.0], None),
    ([(41, 42), (43, 44), (45,)], [1.0, 1.0, 1.0], -1.5),
]


def trajectories(kind: str) -> list[Trajectory]:
    """Four samples whose turns have tokens that were read between them.

    kind: "row"; "rows", each turn in another context; "forks", each after the first turn; "chain", each after the last.
    """
    made = []
    for place, (turns, scores, score) in enumerate(SAMPLES):
        one = Trajectory(PROMPTS[place // 2], place // 2, place % 2, limit=30)
        for number, (ids, own) in enumerate(zip(turns, scores, strict=True)):
            if number and kind == "rows":
                one.open((3, 4, *range(60, 60 + number)))
            elif number and kind == "forks":
                one.fork(one.branches[0], 1)
            elif number and kind == "chain":
                one.fork(one.branch, len(one.branch.parts))
            if number:
                one.give((50, 51)[:number])
            one.branch.parts.append(turn(ids))
            one.turns[-1].score = own
        one.score = score
        made.append(one)
    return made


def rollout(kind: str) -> Rollout:
    return rows_of(trajectories(kind), version=3, with_branches=kind != "row", with_scores=True)


def values_of(rows: Rollout) -> Tensor:
    """Values of a critic, by token; what stands at tokens that were only read must not matter."""
    return torch.where(rows.loss_mask, torch.sin(rows.tokens.double()).float(), 1e6)


def minibatch(kind: str, estimator: AdvantageKind, *, last_turn: bool = False, per: str = "token-mean") -> Experience:
    rows = rollout(kind)
    assert rows.scores is not None
    outputs = (TokenOutputs(logprobs=rows.rollout_logprobs), TokenOutputs(), TokenOutputs(values=values_of(rows)))
    made = build_experience(
        rows, Rewards(rows.scores), outputs=outputs, estimator=estimator, sum_over_ranks=lambda x: x,
        last_turn=last_turn,
    )  # fmt: skip
    (cut,) = MinibatchPlan(2, 1, AGGREGATIONS[per], 30, 0, SingleRank()).cut(made, num_prompts=2, step=0)
    return cut


def by_token(batch: Experience, numbers: Tensor) -> dict[int, float]:
    assert not numbers[~batch.loss_mask].any()
    return {int(t): float(x) for t, x in zip(batch.tokens[batch.loss_mask], numbers[batch.loss_mask], strict=True)}


def test_scores_of_turns_stand_at_their_last_tokens() -> None:
    for kind in ("row", "rows", "forks"):
        rows = rollout(kind)
        assert rows.scores is not None
        assert rows.turn_scores is not None
        first = torch.ones(4, dtype=torch.bool) if rows.branch is None else rows.branch == 0
        assert rows.scores[first].tolist() == [1.5, 0.25, 3.0, 1.5]  # the trajectory's and those of its turns, once
        placed = {int(t): float(x) for t, x in zip(rows.tokens.flatten(), rows.turn_scores.flatten(), strict=True) if x}
        assert placed == {13: 0.5, 16: -1.0, 35: 3.0, 42: 1.0, 44: 1.0, 45: 1.0}


def test_a_turn_of_a_wrong_score_is_a_fault() -> None:
    one, *_ = trajectories("row")
    assert score_fault(one, is_read=True) == ""
    assert score_fault(one, is_read=False) == "set a score, which needs reward.source=environment"
    one.turns[1].score = float("inf")
    assert score_fault(one, is_read=True) == "set the score inf; legal: a finite number"
    one.score, one.turns[1].score, one.turns[0].score = 3e38, 3e38, None
    assert score_fault(one, is_read=True) == "set the score 6e+38; legal: a finite number"


Numbers = dict[int, float]


def value_of(token: int) -> float:
    return float(torch.sin(torch.tensor(float(token), dtype=torch.float64)))


def expected(sampled: list[Trajectory], gamma: float, lam: float, *, per_turn: bool) -> tuple[Numbers, Numbers]:
    """Advantages and returns by token, over each trajectory's tree in float64; token ids are distinct."""
    advantages, returns = {}, {}
    for one in sampled:
        after: dict[int, dict[int, bool]] = {token: {} for own in one.turns for token in own.token_ids}
        for branch in one.branches:
            place, last = 0, None
            for part in branch.parts:
                ids = part.token_ids if isinstance(part, Turn) else part
                for token in ids if isinstance(part, Turn) else ():
                    if last is not None:
                        after[last[0]][token] = place > last[1] + 1  # a step from one turn to the next
                    last, place = (token, place), place + 1
                place += 0 if isinstance(part, Turn) else len(ids)
        scores = {own.token_ids[-1]: own.score or 0.0 for own in one.turns}

        def advantage(token: int, after=after, scores=scores, score=one.score) -> float:  # type: ignore[no-untyped-def]
            total = scores.get(token, 0.0) + (0.0 if after[token] else score or 0.0) - value_of(token)
            for child, is_step in after[token].items():
                counts = is_step or not per_turn
                total += (gamma if counts else 1.0) * value_of(child) / len(after[token])
                total += (gamma * lam if counts else 1.0) * advantage(child) / len(after[token])
            return total

        advantages |= {token: advantage(token) for token in after}
        returns |= {token: advantages[token] + value_of(token) for token in after}
    return advantages, returns


@pytest.mark.parametrize("kind", ["row", "rows", "forks", "chain"])
@pytest.mark.parametrize("per", ["token", "turn"])
def test_returns_over_turns(per: str, kind: str) -> None:
    """Advantages, targets, and gradients of both losses; tokens that were read count nothing."""
    estimator = ESTIMATORS["gae"](gamma=0.7, gae_lambda=0.6, whiten=False, discount_per=per)
    batch = minibatch(kind, estimator)
    advantages, returns = expected(trajectories(kind), 0.7, 0.6, per_turn=per == "turn")
    assert by_token(batch, batch.advantages) == pytest.approx(advantages, abs=1e-6)
    assert by_token(batch, batch.returns) == pytest.approx(returns, abs=1e-6)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss = -((logprobs - batch.old_logprobs).exp() * batch.advantages * batch.loss_weights).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert by_token(batch, gradient) == pytest.approx({t: -a / 18 for t, a in advantages.items()}, abs=1e-7)
    values = batch.values.clone().requires_grad_()
    critic = clipped_value_loss(
        values, old_values=batch.values, returns=batch.returns, token_weights=batch.token_weights, value_clip=0.0
    )
    (gradient,) = torch.autograd.grad(critic.loss, values)
    assert by_token(batch, gradient) == pytest.approx({t: -a / 18 for t, a in advantages.items()}, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), length=st.integers(1, 37), density=st.sampled_from([0.2, 0.6, 0.9, 1.0]))
def test_discounts_count_turns(seed: int, length: int, density: float) -> None:
    """Any mask with holes, against the recursion in float64; one turn is not discounted at all."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, length, generator=g) < density
    rewards, values = torch.randn(2, 3, length, generator=g)
    advantages, returns = gae(rewards, values.masked_fill(~mask, 1e6), mask, gamma=0.8, lam=0.7, per_turn=True)
    wanted = torch.zeros(3, length, dtype=torch.float64)
    for row in range(3):
        later, following = 0.0, 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            ends = t + 1 == length or not mask[row, t + 1]
            error = float(rewards[row, t]) + (0.8 if ends else 1.0) * following - float(values[row, t])
            later = error + (0.8 * 0.7 if ends else 1.0) * later
            wanted[row, t], following = later, float(values[row, t])
    torch.testing.assert_close(advantages.double(), wanted, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(returns.double(), torch.where(mask, wanted + values, 0.0), rtol=1e-5, atol=3e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), per_turn=st.booleans())
def test_values_flow_back_through_any_tree(seed: int, per_turn: bool) -> None:
    """Forks of forks, other contexts, turns with nothing between them, branches that end in a fork."""
    dice, token, sampled = random.Random(seed), 10, []
    for place in range(3):
        one = Trajectory(PROMPTS[place // 2], place // 2, place % 2, limit=500)
        for _ in range(dice.randrange(1, 9)):
            old = dice.choice(one.branches)
            kind = dice.random()
            if kind < 0.4 and old.parts:
                one.fork(old, dice.randrange(1, len(old.parts) + 1))
            elif kind < 0.5:
                one.open((3,))
            if dice.random() < 0.5:
                one.give((5, 6)[: dice.randrange(1, 3)])
            ids = tuple(range(token, token := token + dice.randrange(1, 4)))
            one.branch.parts.append(turn(ids))
            one.turns[-1].score = dice.choice([None, dice.uniform(-1, 1)])
        one.score = dice.uniform(-1, 1)
        sampled.append(one)
    rows = rows_of(sampled, version=3, with_branches=True, with_scores=True)
    assert rows.scores is not None
    outputs = (TokenOutputs(logprobs=rows.rollout_logprobs), TokenOutputs(), TokenOutputs(values=values_of(rows)))
    kind = ESTIMATORS["gae"](gamma=0.9, gae_lambda=0.8, whiten=False, discount_per="turn" if per_turn else "token")
    made = build_experience(rows, Rewards(rows.scores), outputs=outputs, estimator=kind, sum_over_ranks=lambda x: x)
    advantages, returns = expected(sampled, 0.9, 0.8, per_turn=per_turn)
    assert by_token(made, made.advantages) == pytest.approx(advantages, abs=1e-5)
    assert by_token(made, made.returns) == pytest.approx(returns, abs=1e-5)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rows_that_continue_are_as_one_row(estimator: str) -> None:
    chain, row = (minibatch(kind, ESTIMATORS[estimator]()) for kind in ("chain", "row"))
    assert by_token(chain, chain.advantages) == pytest.approx(by_token(row, row.advantages), abs=1e-6)


def test_whitened_returns_read_scores_of_turns() -> None:
    batch = minibatch("row", ESTIMATORS["reinforce_plus_plus"](gamma=0.9))
    every = {}
    for turns, scores, score in SAMPLES:
        later = score or 0.0
        for ids, own in reversed([*zip(turns, scores, strict=True)]):
            for token in reversed(ids):
                later = later * (1.0 if token == turns[-1][-1] else 0.9) + (own or 0.0) * (token == ids[-1])
                every[token] = later
    numbers = torch.tensor([*every.values()], dtype=torch.float64)
    white = (numbers - numbers.mean()) / (numbers.var(correction=0) + 1e-8).sqrt()
    assert by_token(batch, batch.advantages) == pytest.approx(dict(zip(every, white.tolist(), strict=True)), abs=1e-5)


@pytest.mark.parametrize("kind", ["row", "rows", "forks"])
def test_groups_compare_sums_of_scores(kind: str) -> None:
    batch = minibatch(kind, ESTIMATORS["grpo"](std="none"))
    wanted = [0.625, -0.625, 0.75, -0.75]
    tokens = {t: number for (turns, *_), number in zip(SAMPLES, wanted, strict=True) for ids in turns for t in ids}
    assert by_token(batch, batch.advantages) == pytest.approx(tokens, abs=1e-6)


@pytest.mark.parametrize("kind", ["row", "rows", "forks"])
@pytest.mark.parametrize("per", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"])
def test_last_turns_train(per: str, kind: str) -> None:
    """Groups compare whole trajectories; every denominator counts what trains, and only that has a gradient."""
    batch = minibatch(kind, ESTIMATORS["grpo"](std="batch"), last_turn=True, per=per)
    last = [turns[-1] for turns, *_ in SAMPLES]
    centred = torch.tensor([0.625, -0.625, 0.75, -0.75], dtype=torch.float64)
    numbers = centred / (centred.std() + 1e-6)
    tokens, wanted = sum(map(len, last)), {}
    for place, ids in enumerate(last):
        of_prompt = sum(len(last[k]) for k in range(4) if k // 2 == place // 2)
        weight = {"token-mean": 1 / tokens, "seq-mean-token-mean": 1 / (4 * len(ids)), "seq-mean-token-sum": 1 / 4}
        weight["prompt-mean"] = 1 / (2 * of_prompt)
        wanted |= dict.fromkeys(ids, -float(numbers[place]) * weight[per])
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss = -((logprobs - batch.old_logprobs).exp() * batch.advantages * batch.loss_weights).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert by_token(batch, gradient) == pytest.approx(wanted, abs=1e-7)
    assert batch.token_weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name not in ("gae", "gdpo", "remax")])
def test_last_turns_of_every_layout_of_rows_get_the_same(estimator: str) -> None:
    kind = ESTIMATORS[estimator]
    batches = [minibatch(rows, kind(), last_turn=True) for rows in ("row", "rows", "forks")]
    whole, *others = [by_token(batch, batch.advantages) for batch in batches]
    for other in others:
        assert other == pytest.approx(whole, abs=1e-6)
    assert set(whole) == {token for turns, *_ in SAMPLES for token in turns[-1]}


def test_only_agents_have_turns() -> None:
    (line,) = check(load(None, ["algorithm.train_turns=last"]), world_size=1)
    assert line.startswith("algorithm.train_turns=last has no effect: it needs turns")
    given = ["algorithm.advantage=gae", "algorithm.advantage.discount_per=turn"]
    (line,) = check(load(None, [*given, "model.critic_path=c"]), world_size=1)
    assert line.startswith("algorithm.advantage.discount_per=turn has no effect: it needs turns")
