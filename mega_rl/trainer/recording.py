"""Records of complete steps: every number that a step computed before its updates, by row and token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.corrections import Correction, SampledTokens
from mega_rl.algorithms.kl import RewardKL
from mega_rl.algorithms.sequences import Sequences
from mega_rl.protocols import Ranks
from mega_rl.tracking.metrics.records import to_json_value
from mega_rl.trainer.collect import Batch
from mega_rl.trainer.dumps import ReadResponse, sample_rows
from mega_rl.trainer.loop import Event, Stages
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.types import Experience, JsonObject, Rollout, TokenOutputs, row_numbers


@dataclass(frozen=True)
class StepColumns:
    """The tensors of a step by the names of `records.format.TENSORS`, of this replica's rows, on the host.

    policy: evaluates log-probs and entropies before the update; None: neither is recorded beside the old log-probs.
    from_sampler: the step's old log-probs are the sampler's, so that the policy's own are recorded, too.
    on_policy: the loss takes those of its own forward for old ones.
    """

    ranks: Ranks  # the data-parallel replicas
    policy: Callable[[Rollout], TokenOutputs] | None = None
    from_sampler: bool = False
    reward_kl: RewardKL | None = None
    correction: Correction | None = None
    on_policy: bool = False

    def __call__(self, step: Evaluated) -> dict[str, Tensor]:
        """Return the columns, [B] or [B, S, ...]; collective."""
        rollout, experience = step.batch.samples.rollout, step.experience
        old, ref, critic = step.outputs
        assert old.logprobs is not None
        columns = _sampled(rollout)
        if self.policy is not None:
            outputs = self.policy(rollout)
            assert outputs.logprobs is not None
            assert outputs.entropy is not None
            columns |= {"policy_logprobs": outputs.logprobs} if self.from_sampler else {}
            columns["entropy"] = outputs.entropy
        columns |= {"old_logprobs": old.logprobs, "advantages": experience.advantages}
        columns["train_mask"] = experience.loss_mask
        if ref.logprobs is not None:
            columns["ref_logprobs"] = ref.logprobs
        if critic.values is not None:
            columns |= {"values": critic.values, "returns": experience.returns}
        if self.reward_kl is not None:
            reference = old.logprobs if ref.logprobs is None else ref.logprobs
            columns["kl_penalty"] = self.reward_kl.penalty(old.logprobs, reference) * rollout.loss_mask
        columns |= _rewards(step.batch) | _weights(rollout, step.minibatches, self.ranks)
        if self.correction is not None:
            columns["correction_weights"] = self._correction(experience, columns)
        return {name: column.detach().to("cpu").contiguous() for name, column in columns.items()}

    def _correction(self, experience: Experience, columns: Mapping[str, Tensor]) -> Tensor:
        """Return [B, S] float32: weights of token losses in the first update, whose policy is the one before it."""
        assert self.correction is not None
        mask = experience.loss_mask
        policy = columns.get("policy_logprobs", columns["old_logprobs"]) * mask
        tokens = SampledTokens(
            policy,
            policy if self.on_policy else experience.old_logprobs,
            experience.rollout_logprobs,
            advantages=experience.advantages,
            token_weights=columns["token_weights"],
            sequences=Sequences(row_numbers(mask), len(mask)),
        )
        return self.correction(tokens)[0] * mask


@dataclass
class StepRecorder(Event):
    """Record every `interval`-th step, from the first on."""

    interval: int
    columns: StepColumns
    read: ReadResponse
    render: Callable[[Sequence[int]], str]  # with all special tokens
    # (step counted from 0, the evaluated batch, its columns, its rows for people); collective
    write: Callable[[int, Evaluated, Mapping[str, Tensor], Sequence[JsonObject]], None]
    stage: Stages
    writes_texts: bool = True  # whether this rank's rows for people are written

    def evaluated(self, step: int, evaluated: Evaluated) -> None:
        if step % self.interval:
            return
        with self.stage("log"):
            if self.columns.policy is not None:
                self.stage.hold("old_logprobs")
            columns = self.columns(evaluated)
            self.write(step, evaluated, columns, self._rows(step, evaluated) if self.writes_texts else [])

    def _rows(self, step: int, evaluated: Evaluated) -> list[JsonObject]:
        """Return every row as dumps of rollouts show it, with the text of each token."""
        samples, texts = evaluated.batch.samples, dict[int, str]()
        rollout = samples.rollout
        shown = sample_rows(
            rollout, samples.rewards, samples.prompts, self.read, render=self.render,
            step=step + 1, count=len(rollout.tokens), advantages=evaluated.experience.advantages,
        )  # fmt: skip
        rows: list[JsonObject] = []
        for number, row in enumerate(shown):
            ids = rollout.tokens[number, : int(rollout.lengths[number])].tolist()
            texts |= {token: self.render([token]) for token in set(ids) - texts.keys()}
            plain = {key: to_json_value(value) if isinstance(value, float) else value for key, value in row.items()}
            index = samples.prompts[int(rollout.prompt_index[number])].index
            rows.append({**plain, "data_row": index, "token_texts": [texts[token] for token in ids]})
        return rows


def _sampled(rollout: Rollout) -> dict[str, Tensor]:
    """Return what sampling gave; token ids as int32."""
    names = ("prompt_index", "sample_index", "prompt_lengths", "lengths", "finished", "weight_version", "loss_mask")
    optional = {name: getattr(rollout, name) for name in ("failed", "token_versions", "routing")}
    return {
        **{name: getattr(rollout, name) for name in (*names, "rollout_logprobs")},
        **{name: column for name, column in optional.items() if column is not None},
        "tokens": rollout.tokens.to(torch.int32),
    }


def _rewards(batch: Batch) -> dict[str, Tensor]:
    """Return the rewards, their components, the shaped rewards and those of greedy responses."""
    rewards = batch.samples.rewards
    columns = {"rewards": rewards.totals, "shaped_rewards": batch.rewards.totals}
    if rewards.parts is not None:
        columns["reward_parts"] = rewards.parts.values
    if batch.greedy is not None:
        columns["greedy_rewards"] = batch.greedy[batch.rollout.prompt_index]
    return columns


def _weights(own: Rollout, minibatches: Sequence[Experience], ranks: Ranks) -> dict[str, Tensor]:
    """Return each epoch's mini-batches, and the first one's weights, at this rank's rows, which others may train.

    A row that no mini-batch has is of mini-batch -1. Collective.
    """
    width = own.tokens.size(1)
    place = {key: row for row, key in enumerate(_keys(own))}
    count = len(place)
    columns = {
        "token_weights": torch.zeros(count, width),
        "loss_weights": torch.zeros(count, width),
    }
    epochs, seen = [torch.full((count,), -1)], set[tuple[int, int]]()
    for number, minibatch in enumerate(minibatches):
        everywhere = ranks.gather_rows(_weights_alone(minibatch))
        keys = _keys(everywhere)
        if seen.intersection(keys):  # the next epoch: every rank sees the same rows
            epochs.append(torch.full((count,), -1))
            seen.clear()
        seen.update(keys)
        theirs, mine = [i for i, key in enumerate(keys) if key in place], [place[key] for key in keys if key in place]
        epochs[-1][mine] = number
        if len(epochs) > 1:
            continue
        for name in ("token_weights", "loss_weights"):
            weights = getattr(everywhere, name)[theirs][:, :width]
            columns[name][mine, : weights.size(1)] = weights
    later = {"epoch_minibatches": torch.stack(epochs, dim=1)} if len(epochs) > 1 else {}
    return {"minibatch": epochs[0], **columns, **later}


def _weights_alone(minibatch: Experience) -> Experience:
    """Return a mini-batch without what need not travel."""
    bare: Experience = Experience.from_rows(
        minibatch.tokens,
        prompt_lengths=minibatch.prompt_lengths,
        lengths=minibatch.lengths,
        prompt_index=minibatch.prompt_index,
        sample_index=minibatch.sample_index,
        token_weights=minibatch.token_weights,
        loss_weights=minibatch.loss_weights,
    )
    return bare


def _keys(rows: Rollout | Experience) -> list[tuple[int, int]]:
    """Return (prompt, sample) of each row."""
    return list(zip(rows.prompt_index.tolist(), rows.sample_index.tolist(), strict=True))
