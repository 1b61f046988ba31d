"""Inputs of advantage estimators: a batch's rewards, its prompts' groups, returns of token rewards.

Every [B, S] tensor is aligned to the token that it describes (see mega_rl.types); `mask` is the loss mask, [B, S] bool,
True on response tokens. What is off the mask is ignored on input and 0 on output. The response tokens of a row need not
be adjacent: between two turns are tokens that the policy did not sample, such as a tool's answer. They are not steps of
the policy, so the successor of a response token is the next response token of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import SumOverRanks, whiten
from mega_rl.types import Experience, RewardParts, over_trajectory

Advantages = tuple[Tensor, Tensor]  # (advantages, value targets), [B, S] float32 each; targets are 0 without a critic


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Rows of one prompt share `prompt_index` and are all on one rank.

    All rows of a trajectory have its reward.
    """

    experience: Experience  # its advantages and returns are blank
    rewards: Tensor  # [B] float32
    kl_penalty: Tensor | None  # [B, S] float32, coefficient times KL, to be taken off token rewards; None: without
    sum_over_ranks: SumOverRanks  # over data parallelism
    # [B] float32, of the greedy response to the row's prompt, NaN where that has failed; None: no estimator needs it
    greedy_rewards: Tensor | None = None
    reward_parts: RewardParts | None = None  # `rewards` is their weighted sum; None: rewards are single numbers
    turn_scores: Tensor | None = None  # [B, S] float32, parts of `rewards` at the last token of each turn; None: none
    turn: Tensor | None = None  # [B, S] int16, as in `Rollout`

    @property
    def mask(self) -> Tensor:
        """Return the loss mask, [B, S] bool."""
        return self.experience.loss_mask

    @property
    def groups(self) -> PromptGroups:
        """Return the rows by prompt."""
        return self.groups_where(torch.ones_like(self.rewards, dtype=torch.bool))

    def groups_where(self, chosen: Tensor) -> PromptGroups:
        """Return the groups of only the rows that are chosen, [B] bool."""
        return PromptGroups.of(self.experience.prompt_index, self.mask & chosen[:, None], self.experience.branch)

    @cached_property
    def forks(self) -> Forks | None:
        """Return which rows continue other rows; None: none does."""
        if self.turn is None or self.experience.branch is None:
            return None
        return Forks.of(self.mask, self.turn, self.experience.branch)

    def token_rewards(self, scores: Tensor) -> Tensor:
        """Return token rewards [B, S] of scores [B], where no row continues, less the KL penalty of each token."""
        own = scores if self.forks is None else torch.where(self.forks.continued(self.mask), 0.0, scores)
        return token_rewards(own, self.mask, self.kl_penalty)

    def turn_rewards(self) -> Tensor:
        """Return token rewards [B, S]: turns' scores where they end, the rest at the end."""
        if self.turn_scores is None:
            return self.token_rewards(self.rewards)
        of_turns = over_trajectory(self.turn_scores.double().sum(dim=1), self.experience.branch)
        return self.token_rewards(self.rewards - of_turns) + self.turn_scores * self.mask

    def returns(self, rewards: Tensor, *, gamma: float) -> Tensor:
        """Return [B, S] float32: discounted sums of token rewards [B, S] from each response token on."""
        returns, _ = gae(rewards, torch.zeros_like(rewards), self.mask, gamma=gamma, lam=1.0, forks=self.forks)
        return returns

    def whitened(self, x: Tensor) -> Tensor:
        """Return x [B, S] with mean 0 and variance 1 over the tokens of all ranks."""
        return whiten(x, self.mask, sum_over_ranks=self.sum_over_ranks)

    def on_responses(self, advantages: Tensor) -> Advantages:
        """Return each row's number, [B] floating, on all of its response tokens, without value targets."""
        return self.on_tokens(torch.where(self.mask, advantages.float()[:, None], 0.0))

    def on_tokens(self, advantages: Tensor) -> Advantages:
        """Return advantages [B, S] with value targets of 0, for an estimator that needs no critic."""
        return advantages, torch.zeros_like(advantages)


AdvantageEstimator = Callable[[AdvantageInputs], Advantages]


@dataclass(frozen=True)
class PromptGroups:
    """Rows by prompt. A row without response tokens (failed sample) is in no group or sum.

    The members of a group are trajectories: of several rows of one, only the first counts.
    """

    index: Tensor  # [B] int64, number of the row's group: 0 .. num_groups-1
    num_groups: int
    answered: Tensor  # [B] bool, rows of trajectories with a response token
    counted: Tensor  # [B] bool, the first row of each of these

    @classmethod
    def of(cls, group_ids: Tensor, mask: Tensor, branch: Tensor | None = None) -> PromptGroups:
        """Return the groups of rows with equal `group_ids` [B] int64; mask [B, S] bool.

        All samples of a prompt are on this rank: the rollout role shares prompts over data-parallel ranks, not samples.
        """
        ids, index = torch.unique(group_ids, return_inverse=True)
        answered = over_trajectory(mask.sum(dim=1), branch) > 0
        counted = answered if branch is None else answered & (branch == 0)
        return cls(index=index, num_groups=len(ids), answered=answered, counted=counted)

    def sum(self, x: Tensor) -> Tensor:
        """Return [B] float64, the sum of x [B] over the answered trajectories of each row's group."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return totals.index_add(0, self.index, torch.where(self.counted, x.double(), 0.0))[self.index]

    @property
    def counts(self) -> Tensor:
        """Return [B] float64: the number of answered trajectories in each row's group, at least 1."""
        return self.sum(self.counted).clamp(min=1)

    def centred(self, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return [B] float64: each row's reward minus its group's mean; 0 for rows without a group.

        rewards [B] float32; weights [B] of the mean, integers above 0; None: equal ones. A group whose rewards are all
        equal, hence also a group of one, gives exactly 0, which no later division can blow up: float64 holds sums of
        equal float32 numbers without rounding while the group's weights sum to less than 2^29.
        """
        rewards, weights = rewards.double(), torch.ones_like(rewards) if weights is None else weights
        mean = self.sum(weights * rewards) / self.sum(weights)
        return torch.where(self.answered, rewards - mean, 0.0)


@dataclass(frozen=True)
class Forks:
    """Rows that continue another row of their trajectory, F of them, after a token that trains there.

    The token's successors are the next response token of its own row and the first ones of the F rows.
    """

    rows: Tensor  # [F] int64
    parents: Tensor  # [F] int64, the continued rows
    steps: Tensor  # [F] int64, number of the last shared token among the parent's response tokens
    touches: Tensor  # [F] bool, nothing was read between that token and the row's first
    branch: Tensor  # [B] int64; a parent's is below its child's

    @classmethod
    def of(cls, mask: Tensor, turn: Tensor, branch: Tensor) -> Forks | None:
        """Return the forks of rows; None: there are none. mask [B, S] bool; turn [B, S], as in `Rollout`."""
        keys = (((branch == 0).cumsum(0) - 1)[:, None] << 16) + turn.long()  # of turns
        last = mask.clone()
        last[:, :-1] &= ~mask[:, 1:] | (turn[:, 1:] != turn[:, :-1])
        places = torch.arange(mask.size(1), device=mask.device)
        first = torch.where(mask, places, mask.size(1)).amin(dim=1)
        before = torch.where((turn > 0) & (places < first[:, None]), places, -1).amax(dim=1)
        rows = ((before >= 0) & mask.any(dim=1)).nonzero()[:, 0]
        ends = {int(keys[row, place]): (int(row), int(place)) for row, place in last.nonzero()} if len(rows) else {}
        shared = [ends.get(int(key)) for key in keys[rows, before[rows]]]
        known = [place for place, end in enumerate(shared) if end is not None]
        if not known:
            return None
        parents, columns = torch.tensor([end for end in shared if end is not None], device=mask.device).unbind(1)
        rows, steps = rows[known], mask.cumsum(dim=1)[parents, columns] - 1
        return cls(rows, parents, steps, before[rows] + 1 == first[rows], branch)

    def continued(self, mask: Tensor) -> Tensor:
        """Return [B] bool: rows whose last response token has a successor in another row."""
        at_end = self.steps == mask.sum(dim=1)[self.parents] - 1
        return torch.zeros_like(mask[:, 0]).index_fill(0, self.parents[at_end], value=True)

    def add(self, x: Tensor, numbers: Tensor) -> None:
        """Add numbers [F] to x [B, S] at the last shared tokens; columns of x are response tokens."""
        x.index_put_((self.parents, self.steps), numbers.to(x.dtype), accumulate=True)

    def discounted_sums(self, x: Tensor, decay: Tensor, into: Tensor) -> Tensor:
        """Return the sums of `discounted_sums` with those of later rows; into [F]: decay from parent to row."""
        x, sums = x.clone(), torch.zeros_like(x)
        for number in reversed(range(int(self.branch.max()) + 1)):
            own = self.branch == number
            sums[own] = discounted_sums(x[own], decay[own])
            self.add(x, torch.where(own[self.rows], into * sums[self.rows, 0], 0.0))
        return sums


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *,
    gamma: float, lam: float | Tensor, per_turn: bool = False, forks: Forks | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (advantages, returns) of generalized advantage estimation.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    rewards of tokens, values [B, S] float32; lam of all rows or [B, 1] float64. t counts the response tokens of a row,
    so tokens between two turns neither discount nor have a value. V_t is the value just before token t
    is emitted; after the last response token both V and A are 0: a response ends the episode, also one cut off by
    length. per_turn: gamma and lam count at the last token of a turn and are 1 before it; a turn is a run of response
    tokens. forks: the last shared token has the mean of its successors' V and A.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    order = response_order(mask)
    discount = torch.tensor(gamma, dtype=torch.float32, device=mask.device).expand(mask.shape)
    decay = torch.as_tensor(gamma * lam, dtype=torch.float64, device=mask.device).expand(mask.shape)
    active = mask.gather(1, order)
    rewards, values = (torch.where(active, x.float().gather(1, order), 0.0) for x in (rewards, values))
    into = None if forks is None else [one[forks.parents, forks.steps] for one in (discount, decay)]
    if per_turn:
        ends = turn_ends(mask).gather(1, order)
        discount, decay = (torch.where(ends, one, 1.0) for one in (discount, decay))
        into = None if forks is None or into is None else [torch.where(forks.touches, 1.0, one) for one in into]
    later = torch.zeros_like(values)
    later[:, :-1] = discount[:, :-1] * values[:, 1:]
    if forks is None or into is None:
        deltas = torch.where(active, rewards + later - values, 0.0)
        advantages = discounted_sums(deltas, decay)
    else:
        successors = torch.zeros_like(values)
        successors[:, :-1] += active[:, 1:]
        forks.add(successors, torch.ones_like(forks.rows))
        share = 1 / successors.clamp(min=1)
        forks.add(later, into[0] * values[forks.rows, 0])
        deltas = torch.where(active, rewards + share * later - values, 0.0)
        advantages = forks.discounted_sums(deltas, decay * share, into[1] * share[forks.parents, forks.steps])
    blank = torch.zeros_like(advantages)
    return blank.scatter(1, order, advantages), blank.scatter(1, order, advantages + values)


def discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Return y_t = x_t + decay_t * y_{t+1} in each row, [B, S] as x.

    decay: float64 that broadcasts to x. It takes ceil(log2 S) vector steps: after step k of the doubling scan each
    token holds the sum of its next 2^k.
    Padding a row further adds exact zeros, so the result does not depend on S.
    """
    span, length, decay = 1, x.shape[1], decay.expand(x.shape)
    while span < length:
        later, further = torch.zeros_like(x), torch.zeros_like(decay)
        later[:, :-span], further[:, :-span] = x[:, span:], decay[:, span:]
        x, decay = x + decay.to(x.dtype) * later, decay * further
        span *= 2
    return x


def turn_ends(mask: Tensor) -> Tensor:
    """Return [B, S] bool: the last token of each run of response tokens."""
    ends = mask.clone()
    ends[:, :-1] &= ~mask[:, 1:]
    return ends


def response_order(mask: Tensor) -> Tensor:
    """Return [B, S] int64: each row's columns, response tokens first, otherwise in their order.

    `x.gather(1, order)` puts the response tokens of a row next to each other, `zeros.scatter(1, order, y)` puts them
    back.
    """
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return torch.argsort(~mask, dim=1, stable=True)


def last_response_token(mask: Tensor) -> Tensor:
    """Return [B, S] bool, True on each row's last response token, if there is one."""
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def token_rewards(rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Return token rewards: the score on the last response token, minus each token's KL penalty.

        r_t = score * [t is the last response token] - kl_penalty_t

    The score of a row without response tokens is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl_penalty is not None:
        out = out - torch.where(mask, kl_penalty, 0.0)
    return out


def length_adaptive_lambda(mask: Tensor, *, alpha: float) -> Tensor:
    """Return [B, 1] float64: the lambda whose TD-error weights sum to alpha times the row's length.

        lambda = 1 - 1 / (alpha * l), at least 0      since sum of lambda^t over t = 0, 1, ... is 1 / (1 - lambda)

    l is the number of the row's response tokens. A constant lambda of 0.95 forgets the score within some 60 tokens.
    Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, where alpha is 0.05.
    """
    lengths = mask.sum(dim=1, keepdim=True).double().clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)
