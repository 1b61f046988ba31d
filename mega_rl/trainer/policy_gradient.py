"""Policy gradients: PPO with a critic, GRPO and its relatives without, distillation from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.algorithms.inputs import AdvantageEstimator, AdvantageInputs
from mega_rl.algorithms.kl import KLController
from mega_rl.algorithms.losses import Aggregation, loss_weights, token_and_sequence_counts
from mega_rl.algorithms.statistics import SumOverRanks
from mega_rl.data.minibatches import assign_rows, minibatch_prompt_blocks
from mega_rl.protocols import Learner, Ranks, TokenModel
from mega_rl.trainer.collect import Batch
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.rows import gather_column, last_turns, moved_rows, narrowed, own_rows
from mega_rl.trainer.step_metrics import experience_metrics, mean_metrics
from mega_rl.types import Experience, Metrics, Rewards, Rollout, TokenOutputs

Guard = Callable[[Rollout | Experience, TokenOutputs], Metrics]  # raises RolloutMismatchError
ModelOutputs = tuple[TokenOutputs, TokenOutputs, TokenOutputs]  # old log-probs, reference log-probs, values


class Evaluated(NamedTuple):
    """A step before its updates, as this rank has it: rows of its data-parallel replica."""

    batch: Batch
    outputs: ModelOutputs
    experience: Experience
    minibatches: Sequence[Experience]  # every epoch's, in order


@dataclass(frozen=True)
class PolicyGradientRules:
    """Choices of a policy gradient."""

    # Evaluate the actor before the updates. Otherwise the rollout engine's log-probs stand in: in steps of a single
    # on-policy update until the loss takes the log-probs of its forward, in other steps as the old policy.
    recompute_old_logprobs: bool = True
    filter_truncated: bool = False  # responses that length cut off do not train
    last_turn: bool = False  # only the last turn of each trajectory trains
    interval: int = 0  # the actor's updates between two calls of `publish` within a step; 0: none
    publish: Callable[[], Metrics] = dict  # sends the actor's weights; collective


@dataclass
class PolicyGradient:
    """Algorithm that turns rewards into advantages and updates critic and actor on mini-batches."""

    actor: Learner
    critic: Learner | None
    reference: TokenModel | None
    estimator: AdvantageEstimator
    minibatches: MinibatchPlan
    guard: Guard  # compares rollout log-probs with the actor's, before any weight changes
    reward_kl: KLController | None  # its penalty is in token rewards
    kl: KLController
    update_reference: Callable[[int], Metrics]  # given the steps done; collective
    rules: PolicyGradientRules
    stage: Stages
    log: StepLog

    def evaluate(self, batch: Batch, step: int) -> Evaluated:
        """Return log-probs, values, advantages and mini-batches of a batch; raises RolloutMismatchError."""
        ranks, rollout = self.minibatches.ranks, batch.rollout
        old = TokenOutputs(logprobs=rollout.rollout_logprobs)
        if self.rules.recompute_old_logprobs:
            with self.stage("old_logprobs"):
                old = self.actor.evaluate(rollout)
                self.log.add(self.guard(rollout, old))
        ref = self._outputs("ref_logprobs", self.reference, rollout)
        outputs = (old, ref, self._outputs("values", self.critic, rollout))
        with self.stage("advantages"):
            experience = build_experience(
                rollout, batch.rewards, outputs=outputs,
                estimator=self.estimator, reward_kl=self.reward_kl, greedy=batch.greedy, sum_over_ranks=ranks.sum,
                last_turn=self.rules.last_turn,
            )  # fmt: skip
            if self.rules.filter_truncated:
                experience = narrowed(experience, rollout.finished[:, None])
            has_reference, has_critic = self.reference is not None, self.critic is not None
            self.log.add(experience_metrics(experience, ranks, has_reference=has_reference, has_critic=has_critic))
            minibatches = list(self.minibatches.cut(experience, num_prompts=len(batch.samples.prompts), step=step))
        return Evaluated(batch, outputs, experience, minibatches)

    def update(self, evaluated: Evaluated, step: int) -> None:
        """Update critic and actor on each mini-batch, then KL coefficient and reference."""
        if self.critic is not None:
            with self.stage("update_critic"):
                updates = [self.critic.update(minibatch, step=step) for minibatch in evaluated.minibatches]
                self.log.add(mean_metrics(updates))
        # The first update compares the rollout's log-probs with its own forward if no forward came before.
        inspect = None if self.rules.recompute_old_logprobs else self.guard
        updates, size = list[Metrics](), self.rules.interval or max(len(evaluated.minibatches), 1)
        for first in range(0, len(evaluated.minibatches), size):
            if first:
                self.log.add(self.rules.publish())
            with self.stage("update_actor"):
                for minibatch in evaluated.minibatches[first : first + size]:
                    updates.append(self.actor.update(minibatch, step=step, inspect=inspect))
                    inspect = None
        with self.stage("update_actor"):
            self.log.add(mean_metrics(updates))
            self._update_kl(moved=any(update and not update.get("actor/skipped_steps") for update in updates))
            self.log.add(self.update_reference(step + 1))

    def _outputs(self, stage: str, model: TokenModel | None, rollout: Rollout) -> TokenOutputs:
        if model is None:
            return TokenOutputs()
        with self.stage(stage):
            return model.evaluate(rollout)

    def _update_kl(self, *, moved: bool) -> None:
        """Update the KL coefficient, unless the actor did not move or there is no reference."""
        if "kl/ref" not in self.log.metrics:
            return
        self.log.add({"kl/coef": self.kl.value})
        if moved:
            sequences = int(self.log.metrics["rollout/sequences"])
            self.kl.update(self.log.metrics["kl/ref"], num_sequences=sequences)


def build_experience(
    rollout: Rollout,
    rewards: Rewards,
    *,
    outputs: ModelOutputs,
    estimator: AdvantageEstimator,
    sum_over_ranks: SumOverRanks,
    reward_kl: KLController | None = None,
    greedy: Tensor | None = None,
    last_turn: bool = False,
) -> Experience:
    """Return the rollout with advantages and returns.

    outputs: empty for a role that the run lacks. greedy: [P] float32, rewards of greedy responses. last_turn: as in
    `PolicyGradientRules`; statistics count only what trains. Failed samples have no response token: every statistic is
    one of the samples that have an answer.
    """
    old, ref, critic = outputs
    assert old.logprobs is not None
    assert rollout.failed is None or not rollout.loss_mask[rollout.failed].any(), (
        "a failed sample has tokens that train"
    )
    experience = Experience.from_rows(
        rollout.tokens,
        loss_mask=rollout.loss_mask,
        prompt_lengths=rollout.prompt_lengths,
        lengths=rollout.lengths,
        prompt_index=rollout.prompt_index,
        sample_index=rollout.sample_index,
        rollout_logprobs=rollout.rollout_logprobs,
        old_logprobs=old.logprobs,
        ref_logprobs=old.logprobs if ref.logprobs is None else ref.logprobs,
        values=torch.zeros_like(old.logprobs) if critic.values is None else critic.values,
        routing=rollout.routing if old.routing is None else old.routing,
        branch=rollout.branch,
        unit=None if rollout.branch is None else (rollout.prompt_index << 32) + rollout.sample_index,
    )
    if last_turn:
        experience = narrowed(experience, last_turns(rollout.loss_mask, rollout.branch))
    penalty = None if reward_kl is None else reward_kl.penalty(experience.old_logprobs, experience.ref_logprobs)
    inputs = AdvantageInputs(
        experience, rewards.totals, penalty, sum_over_ranks,
        greedy_rewards=None if greedy is None else greedy[rollout.prompt_index],
        reward_parts=rewards.parts, turn_scores=rollout.turn_scores, turn=rollout.turn,
    )  # fmt: skip
    experience.advantages, experience.returns = estimator(inputs)
    return experience


@dataclass(frozen=True)
class MinibatchPlan:
    """Cut of the global batch into mini-batches, the same for every layout."""

    minibatch_size: int  # prompts, over all data-parallel ranks
    epochs: int
    aggregation: Aggregation
    max_response_tokens: int
    seed: int
    ranks: Ranks  # the data-parallel replicas

    def cut(self, experience: Experience, *, num_prompts: int, step: int) -> Iterator[Experience]:
        """Yield this rank's rows of each global mini-batch, balanced by tokens over the ranks.

        Which prompts make a mini-batch depends only on the seed, the step and the epoch. Loss weights hold the
        reciprocal of the mini-batch's global token and sequence counts, so a loss is a plain sum over tokens. Rows are
        numbered anew on the rank that trains them.
        """
        ranks = self.ranks
        index, lengths = gather_column(experience.prompt_index, ranks), gather_column(experience.lengths, ranks)
        units = None if experience.unit is None else gather_column(experience.unit, ranks)
        own = slice(*own_rows(experience.prompt_index.numel(), ranks))
        for epoch in range(self.epochs):
            for block in minibatch_prompt_blocks(num_prompts, self.minibatch_size, seed_key=(self.seed, step, epoch)):
                destinations = assign_rows(index, lengths, block=block, dp_size=ranks.size, units=units)[own]
                yield self._weigh(moved_rows(experience, destinations, ranks), num_prompts)

    def _weigh(self, minibatch: Experience, num_prompts: int) -> Experience:
        """Set the mini-batch's loss and token weights from global counts; returns it."""
        mask, index = minibatch.loss_mask, minibatch.prompt_index
        of_prompts = torch.zeros(num_prompts, dtype=torch.float64).index_add_(0, index, mask.sum(dim=1).double())
        own = token_and_sequence_counts(mask, minibatch.branch)
        counts = self.ranks.sum(torch.cat([own, of_prompts]))
        tokens, sequences = counts[:2].tolist()
        minibatch.loss_weights = loss_weights(
            mask,
            self.aggregation,
            global_tokens=tokens,
            global_sequences=sequences,
            max_response_tokens=self.max_response_tokens,
            branch=minibatch.branch,
            prompt_index=index,
            prompt_tokens=counts[2:],
        )
        minibatch.token_weights = mask.float() / max(tokens, 1.0)
        return minibatch
