"""The independent trainer: PPO and GRPO, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.verify.rl.independent import formulas
from mega_rl.verify.rl.independent.advantages import ADVANTAGES, Responses, value_targets
from mega_rl.verify.rl.independent.formulas import Row
from mega_rl.verify.rl.independent.losses import CORRECTIONS, LOSSES, ResponseTokens
from mega_rl.verify.rl.independent.networks import CriticNetwork, PolicyNetwork, TrainedNetwork, moved, of_response
from mega_rl.verify.rl.independent.records import Figures, LockstepSettings, ScoredSample, StepBatch


@dataclass(frozen=True)
class EvaluatedSample:
    """A sample with the step's numbers for its tokens before any update; [n] float64 each."""

    sample: ScoredSample
    old: Tensor
    ref: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class IndependentTrainer:
    """Policy and perhaps critic from the start weights, with a reference; steps count from 0."""

    def __init__(self, path: Path, settings: LockstepSettings, *, reference: Path | None = None) -> None:
        self._settings, self._kl_coef = settings, settings.kl_coef
        self.policy = PolicyNetwork(path)
        self._actor_role = TrainedNetwork("actor", self.policy, settings)
        has_reference = settings.kl_placement != "none" or settings.advantage.name == "distillation"
        self._reference = PolicyNetwork(reference or path) if has_reference else None
        self._critic = CriticNetwork(path) if settings.advantage.name == "gae" else None
        self._critic_role = None if self._critic is None else TrainedNetwork("critic", self._critic, settings)

    def weights(self) -> dict[str, Mapping[str, Tensor]]:
        """Return copies of the weights of now, by role and Hugging Face name."""
        networks = {"actor": self.policy, "critic": self._critic}
        return {role: network.weights() for role, network in networks.items() if network is not None}

    def step(self, step: int, batch: StepBatch) -> Iterator[Figures]:
        """Make the updates of a step; yields the figures of each, the critic's first."""
        own = batch.samples
        rows = self._evaluate([sample.last_turn() for sample in own] if self._settings.last_turn else own)
        if self._settings.overlong_filter:  # DAPO, arXiv:2503.14476, section 3.4: in advantages, but in no loss
            rows = [row for row in rows if row.sample.sampled[-1] in self._settings.stop_tokens]
        minibatches = [[row for row in rows if row.sample.prompt in prompts] for prompts in batch.minibatches]
        if self._critic is not None:
            for update, minibatch in enumerate(minibatches):
                yield self._update_critic(minibatch, (step, update))
        if step >= self._settings.critic_warmup_steps:
            for update, minibatch in enumerate(minibatches):
                yield self._update_actor(minibatch, (step, update))
            if self._reference is not None:
                old, ref = torch.cat([row.old for row in rows]), torch.cat([row.ref for row in rows])
                kl = float(formulas.kl_estimate("k3", old, ref).mean())
                self._kl_coef = formulas.adapted_coefficient(self._kl_coef, kl, len(batch.samples), self._settings)
        interval = self._settings.reference_interval
        if self._reference is not None and interval > 0 and (step + 1) % interval == 0:
            moved(self._reference, self.policy, self._settings.reference_rate)

    def _evaluate(self, samples: Sequence[ScoredSample]) -> list[EvaluatedSample]:
        """Return the samples with log-probs, values, advantages and returns by the weights of now."""
        temperature = self._settings.temperature
        with torch.no_grad():
            if self._settings.old_is_rollout:
                old = [_row(sample.rollout_logprobs) for sample in samples]
            else:
                old = [self.policy.logprobs(sample, temperature) for sample in samples]
            ref = old
            if self._reference is not None:
                ref = [self._reference.logprobs(sample, temperature) for sample in samples]
            values = [torch.zeros_like(row) for row in old]
            if self._critic is not None:
                values = [self._critic.values(sample) for sample in samples]
        responses = self._responses(samples, old, ref, values)
        formula, _ = ADVANTAGES[self._settings.advantage.name]
        advantages = [_row(row) for row in formula(responses, self._settings.advantage)]
        returns = values
        if self._critic is not None:
            returns = [_row(row) for row in value_targets(responses, self._settings.advantage)]
        return [EvaluatedSample(*row) for row in zip(samples, old, ref, values, advantages, returns, strict=True)]

    def _responses(
        self, samples: Sequence[ScoredSample], old: list[Tensor], ref: list[Tensor], values: list[Tensor]
    ) -> Responses:
        """Return the samples with rewards and token rewards, which include the KL if placed there."""
        coef = self._kl_coef if self._settings.kl_placement == "reward" else 0.0
        penalty = self._settings.overlong_penalty
        rewards, of_tokens, of_turns, parts = Row(), list[Row](), list[Row](), list[Mapping[str, float]]()
        for sample, logprobs, references in zip(samples, old, ref, strict=True):
            punishment = formulas.overlong_punishment(sample.longest, self._settings)
            reward = sample.reward + penalty * punishment
            rewards.append(reward)
            parts.append({**sample.parts, "overlong": punishment})
            models = (logprobs.tolist(), references.tolist(), coef)
            of_tokens.append(formulas.token_rewards(sample, reward, *models))
            scores = sample.turn_scores or [0.0] * sample.length
            rest = formulas.token_rewards(sample, reward - sum(scores) - sample.earlier_scores, *models)
            of_turns.append([r + score for r, score in zip(rest, scores, strict=True)])
        part_weights = {**self._settings.part_weights, "overlong": penalty}
        numbers = [[row.tolist() for row in rows] for rows in (old, ref, values)]
        return Responses(
            samples,
            rewards,
            of_tokens,
            of_turns,
            *(numbers[0], numbers[1], numbers[2]),
            parts=parts,
            part_weights=part_weights,
        )

    def _update_critic(self, rows: list[EvaluatedSample], place: tuple[int, int]) -> Figures:
        """Make one step of the critic, whose loss is always the mean over tokens."""
        assert self._critic is not None
        assert self._critic_role is not None
        critic, settings = self._critic, self._settings
        weight = 1 / max(sum(row.sample.length for row in rows), 1)

        def terms(i: int) -> Tensor:
            row = rows[i]
            now = critic.values(row.sample)
            return weight * formulas.value_term(now, row.values, row.returns, settings.value_clip)

        return self._critic_role.update(
            [row.sample for row in rows],
            terms,
            lr=formulas.learning_rate(place[0], settings.critic_lr, settings.steps, settings),
            place=place,
            tokens={"values": [row.values for row in rows], "returns": [row.returns for row in rows]},
        )

    def _update_actor(self, rows: list[EvaluatedSample], place: tuple[int, int]) -> Figures:
        """Make one step of the policy."""
        settings = self._settings
        loss_of, correction = LOSSES[settings.loss.name][0], CORRECTIONS[settings.correction.name][0]
        weights = formulas.aggregation_weights([(row.sample.prompt, row.sample.length) for row in rows], settings)
        drift_coef = settings.loss.numbers.get("drift_coef", 0.0)
        with torch.no_grad():
            reads = self._reference if settings.loss.name == "distillation" else None
            teacher = [None if reads is None else reads.logits(row.sample) for row in rows]

        def terms(i: int) -> Tensor:
            row = rows[i]
            logits = self.policy.logits(row.sample)
            logprobs, entropy = of_response(logits, row.sample, settings.temperature)
            sampler = _row(row.sample.rollout_logprobs)
            read = (logits, teacher[i], settings.temperature)
            tokens = ResponseTokens(logprobs, row.old, sampler, row.advantages, *read)
            loss = correction(tokens, settings.correction) * loss_of(tokens, settings.loss)
            loss = loss - settings.entropy_coef * entropy + drift_coef * (logprobs - sampler) ** 2 / 2
            if settings.kl_placement == "loss":
                loss = loss + self._kl_coef * formulas.kl_term(settings.kl_estimator, logprobs, row.ref, tokens.ratio)
            return weights[i] * loss

        warmup = settings.critic_warmup_steps
        return self._actor_role.update(
            [row.sample for row in rows],
            terms,
            lr=formulas.learning_rate(place[0] - warmup, settings.lr, settings.steps - warmup, settings),
            place=place,
            tokens={
                "old_logprobs": [row.old for row in rows],
                "ref_logprobs": [row.ref for row in rows],
                "advantages": [row.advantages for row in rows],
            },
        )


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
