"""Rows of trajectories, and training that counts trajectories rather than rows, against a float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega_rl.agents.trajectory import LimitReached, Trajectory, Turn, rows_of
from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.policy_losses import LOSSES
from mega_rl.algorithms.statistics import Sequences
from mega_rl.config.schema.rollout import OverlongConfig
from mega_rl.data.minibatches import assign_rows
from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.score import ResponseReader, answered
from mega_rl.trainer.policy_gradient import MinibatchPlan, build_experience
from mega_rl.trainer.rows import Samples, check_rows, shaped_rewards, share_out
from mega_rl.trainer.step_metrics import rollout_metrics
from mega_rl.types import Experience, Prompt, Rewards, Rollout, TokenOutputs
from mega_rl.workers.models import PolicyLoss

PROMPTS = [Prompt(7, (3, 4), "a", ""), Prompt(8, (5,), "b", "")]
TURNS = [(11, 12, 1), (13, 1), (14, 15, 16)]  # token 1 ends a turn; every token once, so that it has one gradient
REWARDS = [1.0, 0.25, 0.0, 1.0]  # of two samples of each prompt
OLD = {token: -0.1 * (token % 7) - 0.3 for token in range(100)}


def turn(ids: tuple[int, ...]) -> Turn:
    return Turn(ids, tuple(OLD[token] for token in ids), (), ids[-1] == 1)


def trajectories(kind: str) -> list[Trajectory]:
    """Four samples; the second has TURNS: in one row, in three that were opened anew, or in a fork."""
    made = [Trajectory(PROMPTS[i // 2], i // 2, i % 2, limit=16) for i in range(4)]
    for number, one in enumerate(made):
        if number != 1:
            one.branch.parts.append(turn((20 + number, 30 + number)[: 1 + number % 2]))
            continue
        for place, ids in enumerate(TURNS):
            if kind == "three rows" and place:
                one.open((3, 4, 99, *range(40, 40 + place)))
            elif kind == "fork" and place:
                one.fork(one.branches[0], 1)
            if place:
                one.give((50 + place,))
            one.branch.parts.append(turn(ids))
    return made


def rollout(kind: str) -> Rollout:
    return rows_of(trajectories(kind), version=3, with_failed=False, with_branches=kind != "one row")


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("one row", [[0, 0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3]]),
        ("three rows", [[0, 0, 1, 1, 1], [0] * 5 + [2, 2], [0] * 6 + [3, 3, 3]]),
        ("fork", [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0, 2, 2], [0, 0, 1, 1, 1, 0, 3, 3, 3]]),
    ],
)
def test_every_token_names_its_turn(kind: str, turns: list[list[int]]) -> None:
    """Also where the turn trains in another row, or another turn follows at once."""
    rows = rollout(kind)
    assert rows.turn is not None
    own = [row for row in range(len(rows.tokens)) if (rows.prompt_index[row], rows.sample_index[row]) == (0, 1)]
    assert [rows.turn[row, : rows.lengths[row]].tolist() for row in own] == turns
    one = Trajectory(PROMPTS[0], 0, 0, limit=16)
    one.branch.parts += [turn((11, 12)), turn((13, 1))]
    rows = rows_of([one], version=3, with_failed=False, with_branches=False)
    assert rows.turn is not None
    assert rows.turn.tolist() == [[0, 0, 1, 1, 2, 2]]


def test_a_row_has_the_experts_that_its_turns_had() -> None:
    """Of each input those of the first turn that knows them, in a fork, too; never of a row's last token."""
    one = Trajectory(PROMPTS[0], 0, 0, limit=16)

    def take(number: int) -> None:
        """Sample two tokens; the experts of an input are its position and the turn's number."""
        inputs = len(one.branch.token_ids) + 1
        places = torch.stack([torch.arange(inputs), torch.full((inputs,), number)], dim=-1)
        own = turn((20 + number, 1))
        one.branch.add(replace(own, routing=None if number == 2 else places[:, None].short()))

    for number in (1, 2, 3):
        one.give((40 + number,)) if number > 1 else None
        take(number)
    one.fork(one.branches[0], 1)
    one.give((50,))
    take(4)
    one.give((51,))  # read, and behind the last turn
    rows = rows_of([one], version=3, with_branches=True, routed=(1, 2))
    assert rows.routing is not None
    assert rows.routing.dtype == torch.int16
    first = [[[place, 1]] for place in range(3)]
    rest = [[[place, 3]] for place in range(3, 9)], [[[place, 4]] for place in range(3, 6)]
    unknown = [[[-1, -1]]]
    assert rows.routing.tolist() == [first + rest[0] + unknown, first + rest[1] + unknown * 4]
    kept = [part.routing for part in one.branches[0].parts if isinstance(part, Turn) and part.routing is not None]
    assert [len(each) for each in kept] == [3, 6]  # no experts twice
    assert rollout("fork").routing is None


def rewards(rows: Rollout) -> Rewards:
    return Rewards(
        torch.tensor([REWARDS[2 * p + s] for p, s in zip(rows.prompt_index, rows.sample_index, strict=True)])
    )


def minibatch(kind: str, aggregation: str, estimator: str = "grpo") -> Experience:
    rows = rollout(kind)
    outputs = (TokenOutputs(logprobs=rows.rollout_logprobs), TokenOutputs(), TokenOutputs())
    made = build_experience(
        rows, rewards(rows), outputs=outputs, estimator=ESTIMATORS[estimator](), sum_over_ranks=lambda x: x
    )
    plan = MinibatchPlan(2, 1, AGGREGATIONS[aggregation], 16, 0, SingleRank())
    (cut,) = plan.cut(made, num_prompts=2, step=0)
    return cut


def gradient(kind: str, aggregation: str, loss: str, estimator: str = "grpo") -> dict[int, float]:
    """Gradient by each sampled token's log-prob, of a policy that has moved since; the tokens are distinct but 1."""
    batch = minibatch(kind, aggregation, estimator)
    shift = 0.05 * torch.sin(batch.tokens.double())
    logprobs = ((batch.old_logprobs + shift.float()) * batch.loss_mask).requires_grad_()
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "token_weights", "loss_weights")
    kind_of_loss = PolicyLoss(LOSSES[loss](), kl=None, kl_estimator=KL_ESTIMATORS["k3"])
    count = int(batch.rows.max())
    out = kind_of_loss(
        TokenOutputs(logprobs=logprobs), {n: getattr(batch, n) for n in names}, Sequences(batch.rows, count)
    )
    (by_token,) = torch.autograd.grad(out.loss, logprobs)
    own: dict[int, float] = {}
    for token, number, trains in zip(
        batch.tokens.flatten(), by_token.flatten(), batch.loss_mask.flatten(), strict=True
    ):
        if trains:
            own[int(token)] = own.get(int(token), 0.0) + float(number)
        else:
            assert number == 0.0
    return own


def reference(aggregation: str, loss: str) -> dict[int, float]:
    """The same in float64, sample by sample: GRPO, PPO or GSPO with their default clips."""
    settings = LOSSES[loss]()
    samples = [[t for t in one.turns for t in t.token_ids] for one in trajectories("one row")]
    logprobs = [torch.tensor([OLD[t] for t in ids], dtype=torch.float64) for ids in samples]
    policies = [
        (old + 0.05 * torch.sin(torch.tensor(ids).double())).requires_grad_()
        for old, ids in zip(logprobs, samples, strict=True)
    ]
    total, count = torch.zeros((), dtype=torch.float64), sum(map(len, samples))
    for group in ((0, 1), (2, 3)):
        scores = torch.tensor([REWARDS[i] for i in group], dtype=torch.float64)
        for i in group:
            advantage = (REWARDS[i] - scores.mean()) / (scores.std() + 1e-6)
            gap = policies[i] - logprobs[i]
            ratio = gap.mean().exp().expand(len(gap)) if loss == "gspo" else gap.exp()
            near = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            tokens = -torch.minimum(ratio * advantage, near * advantage)
            weight = {"token-mean": 1 / count, "seq-mean-token-mean": 1 / (4 * len(gap)), "seq-mean-token-sum": 1 / 4}
            weight["prompt-mean"] = 1 / (2 * sum(len(samples[k]) for k in group))
            total = total + weight[aggregation] * tokens.sum()
    own: dict[int, float] = {}
    for ids, numbers in zip(samples, torch.autograd.grad(total, policies), strict=True):
        for token, number in zip(ids, numbers.tolist(), strict=True):
            own[token] = own.get(token, 0.0) + number
    return own


@pytest.mark.parametrize("kind", ["one row", "three rows", "fork"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"])
def test_gradients_count_trajectories(aggregation: str, loss: str, kind: str) -> None:
    """Rows of one trajectory are one member of its group and of every mean; float32 against float64, 1e-6."""
    expected, actual = reference(aggregation, loss), gradient(kind, aggregation, loss)
    assert actual.keys() == expected.keys()
    assert [actual[token] for token in expected] == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("estimator", ["rloo", "opo", "pass_at_k", "reinforce_plus_plus_baseline"])
def test_estimators_count_trajectories(estimator: str) -> None:
    whole, parts = (gradient(kind, "token-mean", "ppo", estimator) for kind in ("one row", "three rows"))
    if estimator == "reinforce_plus_plus_baseline":  # returns from each row's own end: only the group's mean is shared
        assert whole.keys() == parts.keys()
    else:
        assert list(parts.values()) == pytest.approx(list(whole.values()), rel=1e-5, abs=1e-7)


def test_rows_hold_what_was_sampled_and_read() -> None:
    rows = rollout("fork")
    assert rows.branch.tolist() == [0, 0, 1, 2, 0, 0]
    assert rows.tokens[2, : rows.lengths[2]].tolist() == [3, 4, 11, 12, 1, 51, 13, 1]
    assert rows.loss_mask[2, : rows.lengths[2]].tolist() == [False] * 6 + [True] * 2  # the shared turn trains once
    assert rows.loss_mask[1].sum() == 3
    assert (rows.rollout_logprobs[~rows.loss_mask] == 0).all()
    assert rows.weight_version.tolist() == [3] * 6
    check_rows(rows, PROMPTS, SingleRank(), samples=2)
    rows.branch[3] = 1
    with pytest.raises(RunError, match="row 3 is not next to the row before it of sample 1 of prompt 0"):
        check_rows(rows, PROMPTS, SingleRank(), samples=2)


def test_metrics_and_punishments_count_trajectories() -> None:
    """Two of four are cut off; three rows are one sample, whose tokens are those that were sampled."""
    whole, parts = (
        rollout_metrics(rows, rewards(rows), SingleRank()) for rows in map(rollout, ("one row", "three rows"))
    )
    same = {name for name in whole if "/tokens" not in name and "repeated" not in name}
    assert {name: parts[name] for name in same} == {name: whole[name] for name in same}
    assert whole["rollout/truncated_fraction"] == 1.0
    for kind in ("one row", "three rows"):
        rows = rollout(kind)
        _, metrics = shaped_rewards(
            rows, rewards(rows), SingleRank(), OverlongConfig(filter=True, buffer_tokens=8), max_response_tokens=16
        )
        assert metrics["rollout/filtered_fraction"] == 1.0


def test_responses_are_read_once_for_each_trajectory() -> None:
    reader = ResponseReader(lambda ids: " ".join(map(str, ids)), stop_ids=(1,))
    rows = rollout("fork")
    assert answered(rows) == [0, 1, 4, 5]
    (_, response), *_ = reader.texts(rows, [1], PROMPTS)
    assert (response.text, response.turns, response.num_tokens) == (
        "11 12\n13\n14 15 16",
        ("11 12", "13", "14 15 16"),
        8,
    )
    assert reader.written(rows, 3)[0] == response.text  # votes read what rewards read
    assert "51" in response.transcript


def test_rows_of_a_trajectory_stay_together() -> None:
    batch = minibatch("three rows", "token-mean")
    assert batch.rows.amax(dim=1).tolist() == [1, 2, 2, 2, 3, 4]
    assert batch.unit is not None
    ranks = assign_rows(batch.prompt_index, batch.lengths, block=[0, 1], dp_size=2, units=batch.unit)
    assert len(set(ranks[1:4].tolist())) == 1
    rows = rollout("three rows")
    chosen = share_out(Samples(PROMPTS, rows, rewards(rows), torch.arange(2)), SingleRank())
    assert torch.equal(chosen.rollout.tokens, rows.tokens)
    assert chosen.rewards.totals.tolist() == rewards(rows).totals.tolist()


def test_what_does_not_fit_ends_a_trajectory_for_its_length() -> None:
    """A tool call that a stop token ended is no end of the task; what was given last is left out of the row."""
    one, other = (Trajectory(PROMPTS[0], 0, sample, limit=5) for sample in range(2))
    for each in (one, other):
        each.add([9, 1], [-0.5, -0.5], stopped=True)
    with pytest.raises(LimitReached):
        one.give([7, 8, 9])
    with pytest.raises(TypeError, match="token ids"):
        other.give(["7"])  # type: ignore[list-item]
    other.give([7, 8])
    rows = rows_of([one, other], version=1, with_failed=False, with_branches=False)
    assert rows.end.tolist() == [1, 0]
    assert rows.tokens.tolist() == [[3, 4, 9, 1]] * 2
