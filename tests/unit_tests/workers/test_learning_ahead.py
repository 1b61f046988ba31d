"""Learning curves eight steps ahead of a task that old samples spoil, with and without correction."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from mega_rl.algorithms.corrections import TIS
from mega_rl.algorithms.losses import Correction
from mega_rl.algorithms.policy_losses import PPO
from mega_rl.algorithms.statistics import Sequences
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import Rollout, TokenOutputs
from mega_rl.workers.models import PolicyLoss
from tests.helpers.fleet import LONGEST, STOP, VOCABULARY, StreamRun
from tests.helpers.selection import FULL

STEPS, PROMPTS, EPOCHS, RATE = 60, 24, 2, 4.0
SEEDS = range(6 if FULL else 1)
LARGE = torch.arange(VOCABULARY) > 3
# Responses of twelve tokens, of which few are large.
START = torch.where(LARGE, -2.0, 0.0).double().index_fill(0, torch.tensor([STOP]), -9.0)


def reward_of(rows: Rollout) -> Tensor:
    """[B]: 1 where half of the tokens are large, 0 where all or none are. So a policy of one distribution for all
    tokens is best at a place that steps by old samples run past."""
    large = ((rows.tokens > 3) & rows.loss_mask).sum(1) / rows.loss_mask.sum(1)
    return 1 - 2 * (large - 0.5).abs()


def expected_reward(weights: Tensor) -> float:
    p = float(weights.softmax(0)[LARGE].sum())
    shares = [math.comb(LONGEST, n) * p**n * (1 - p) ** (LONGEST - n) for n in range(LONGEST + 1)]
    return sum(share * (1 - 2 * abs(n / LONGEST - 0.5)) for n, share in enumerate(shares))


class LearningRun(StreamRun):
    """A run whose table of logits learns by the loss of the package."""

    def learn(self, seed: int, correction: Correction | None) -> list[float]:
        """Expected reward after each step."""
        self.flow.worker, self.policy.weights = replace(self.flow.worker, seed=seed), START.clone()
        curve, self.ages = list[float](), set[int]()
        loss = PolicyLoss(PPO(), None, "k3", correction=correction)
        self.stream.publish()
        for step in range(self.steps):
            rows = self.collector.take(step).samples.rollout
            assert rows.token_versions is not None
            self.ages |= set((step + 1 - rows.token_versions[rows.loss_mask]).tolist())
            mask, tokens, rewards = rows.loss_mask, rows.tokens.where(rows.loss_mask, 0), reward_of(rows)
            weights = self.policy.weights.requires_grad_()
            old = weights.detach().log_softmax(0)[tokens].float()
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for part in range(EPOCHS):
                own = mask & (torch.arange(len(mask)) % EPOCHS == part)[:, None]
                numbers = own.any(1).cumsum(0)[:, None] * own
                fields = {
                    **{"old_logprobs": old, "rollout_logprobs": rows.rollout_logprobs},
                    **{"advantages": advantages[:, None] * own, "token_weights": own / own.sum()},
                    "loss_weights": own / own.sum(),
                }
                logprobs = weights.log_softmax(0)[tokens].float()
                output = loss(TokenOutputs(logprobs=logprobs), fields, Sequences(numbers, int(own.any(1).sum())))
                (gradient,) = torch.autograd.grad(output.loss, weights)
                weights = (weights.detach() - RATE * gradient).requires_grad_()
            self.policy.weights = weights.detach()
            self.stream.publish()
            curve.append(expected_reward(self.policy.weights))
        return curve


def late_rewards(k: int, correction: Correction | None) -> list[float]:
    """Mean expected reward of the second half of a run, for each seed."""
    quantum = LONGEST // max(k, 1)
    runs = [LearningRun(k, SingleRank(), quantum=quantum, steps=STEPS, per_step=PROMPTS) for _ in SEEDS]
    late = [mean(run.learn(seed, correction)[STEPS // 2 :]) for seed, run in zip(SEEDS, runs, strict=True)]
    ages = set[int]().union(*(run.ages for run in runs))
    assert ages == {0} if k == 0 else max(ages) >= 4
    print(f"k={k} {correction}: {mean(late):.3f}, from {min(late):.3f} to {max(late):.3f}; ages {sorted(ages)}")
    return late


def test_corrected_run_ahead_learns_as_a_synchronous_one() -> None:
    """Within the band of synchronous runs; below it without, and also with weights of single tokens.

    Those leave out how likely the response's other tokens were, on which its reward depends.
    """
    synchronous, corrected = late_rewards(0, None), late_rewards(8, TIS(level="sequence"))
    assert min(synchronous) > 0.74
    assert min(corrected) > min(synchronous) - 0.02
    assert max(late_rewards(8, None)) < min(synchronous) - 0.1
    if FULL:
        assert max(late_rewards(8, TIS())) < min(synchronous) - 0.1
