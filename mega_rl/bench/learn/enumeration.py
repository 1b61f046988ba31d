"""Exact figures of a policy, by enumeration of every response."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from mega_rl.bench.learn.task import LearningTask
from mega_rl.protocols import TokenModel
from mega_rl.trainer.policy_gradient import PolicyGradient
from mega_rl.types import Rollout


def closed_form_distance(models: PolicyGradient, rows: Rollout, rewards: Tensor, *, beta: float) -> float:
    """Return KL(pi || pi*) in nats, the mean over prompts, of pi*(y) ~ ref(y) exp(r(y) / beta).

    rows, rewards: of `enumerate_responses`. pi and ref are evaluated by the trainer's own actor and reference.
    Source of the closed form: Korbak et al. 2022, arXiv:2205.11275, eq. 4.
    """
    assert models.reference is not None, "the closed form is relative to a reference"
    policy = sequence_logprobs(models.actor, rows).view_as(rewards)
    reference = sequence_logprobs(models.reference, rows).view_as(rewards)
    optimum = (reference + rewards / beta).log_softmax(-1)
    return float((policy.exp() * (policy - optimum)).sum(-1).mean())


def expected_reward(models: PolicyGradient, rows: Rollout, rewards: Tensor) -> float:
    """Return the expected reward of the actor, the mean over prompts; rows, rewards: of `enumerate_responses`."""
    policy = sequence_logprobs(models.actor, rows).view_as(rewards)
    return float((policy.exp() * rewards).sum(-1).mean())


def enumerate_responses(task: LearningTask, *, length: int) -> tuple[Rollout, Tensor]:
    """Return a row for every response of `length` tokens to every prompt, and rewards, [prompts, responses] float64.

    Prompts are of one length.
    """
    responses = ["".join(characters) for characters in product(task.vocabulary, repeat=length)]
    ids = {character: i for i, character in enumerate(task.vocabulary)}
    tokens = torch.tensor([[ids[c] for c in prompt + response] for prompt, _ in task.prompts for response in responses])
    lengths = torch.full((len(tokens),), tokens.size(1))
    rows = Rollout.from_rows(tokens, prompt_lengths=lengths - length, lengths=lengths)
    rewards = [
        [task.reward(prompt, response, *filter(None, [answer])) for response in responses]
        for prompt, answer in task.prompts
    ]
    return rows, torch.tensor(rewards, dtype=torch.float64)


def sequence_logprobs(model: TokenModel, rows: Rollout) -> Tensor:
    """Return the log-prob of every row's response, [B] float64."""
    logprobs = model.evaluate(rows).logprobs
    assert logprobs is not None
    return logprobs.double().sum(-1)
