"""Readable rows of rollouts, and records of every number of a step before its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.kl import RewardKL
from mega_rl.algorithms.losses import Correction, SampledTokens
from mega_rl.algorithms.statistics import Sequences
from mega_rl.protocols import Ranks
from mega_rl.tracking.metrics.records import to_json_value
from mega_rl.trainer.loop import Event, Stages
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.trainer.rows import ReadResponse, Samples
from mega_rl.types import Experience, JsonObject, Rewards, Rollout, TokenOutputs, row_numbers

# Columns of a record that sampling gave, with those that not every rollout has; token ids go as int32.
_SAMPLED = (
    "prompt_index", "sample_index", "prompt_lengths", "lengths", "finished", "weight_version", "loss_mask",
    "rollout_logprobs", "failed", "token_versions", "routing",
)  # fmt: skip
# Columns of a mini-batch that travel to the rank that sampled its rows.
_WEIGHTED = (
    "tokens", "prompt_lengths", "lengths", "prompt_index", "sample_index", "token_weights", "loss_weights",
)  # fmt: skip


def sample_rows(
    samples: Samples,
    read: ReadResponse,
    *,
    render: Callable[[Sequence[int]], str],
    step: int,
    count: int,
    advantages: Tensor | None = None,
) -> list[JsonObject]:
    """Return some rollouts of this rank as readable rows: whole groups, about `count` rows.

    advantages: [B, S] float32, 0 off the mask, None for rollouts that do not train. `prompt` is the user's text;
    `rendered_prompt` is the text of the token ids by `render`, which shows special tokens; `response` is the text that
    rewards read, by `read`, with the words of tools. `advantage_mean` is over the policy's tokens.
    """
    rollout, rows = samples.rollout, list[JsonObject]()
    for row in group_rows(rollout.prompt_index.tolist(), count):
        prompt = samples.prompts[int(rollout.prompt_index[row])]
        start, tokens = int(rollout.prompt_lengths[row]), int(rollout.loss_mask[row].sum())
        known: dict[str, object] = {}
        if advantages is not None:
            known["advantage_mean"] = float(advantages[row].sum()) / max(tokens, 1)
        if rollout.token_versions is not None:  # versions are 0 off the mask
            newest = max(int(rollout.token_versions[row].max()), int(rollout.weight_version[row]))
            known["newest_weight_version"] = newest
        if rollout.failed is not None:
            known["failed"] = bool(rollout.failed[row])
        rows.append(
            {
                "step": step,
                "prompt_index": int(rollout.prompt_index[row]),
                "sample_index": int(rollout.sample_index[row]),
                "prompt": prompt.text,
                "rendered_prompt": render(rollout.tokens[row, :start].tolist()),
                "response": read(rollout, row)[1],
                "answer": prompt.answer,
                "prompt_tokens": start,
                "response_tokens": tokens,
                **_rewards_of(samples.rewards, row),
                "finished": bool(rollout.finished[row]),
                "weight_version": int(rollout.weight_version[row]),
                **known,
            }
        )
    return rows


def group_rows(prompt_index: Sequence[int], count: int) -> list[int]:
    """Return row numbers, ascending: all samples of prompts that are spread over the batch."""
    samples: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_index):
        samples.setdefault(prompt, []).append(row)
    groups = list(samples.values())
    taken = min(len(groups), max(count // max(map(len, groups), default=1), min(count, 1)))
    return sorted(row for position in range(taken) for row in groups[position * len(groups) // taken])


def _rewards_of(rewards: Rewards, row: int) -> dict[str, float | None]:
    """Return a row's reward and its parts, as "reward_correct"; empty for a run without rewards."""
    if not rewards.scored:
        return {}
    names = () if rewards.parts is None else rewards.parts.names
    columns = zip(("reward", *(f"reward_{name}" for name in names)), rewards.columns()[row].tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in columns}


@dataclass(frozen=True)
class StepColumns:
    """Tensors of a step by the names of `records.reader.TENSORS`: this replica's rows, on the host.

    policy: evaluates log-probs and entropies before the update; None: neither is recorded.
    from_sampler: the step's old log-probs are the sampler's, so that the policy's own are recorded, too.
    on_policy: the loss uses the log-probs of its forward as the old ones.
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
        columns = {name: column for name in _SAMPLED if (column := getattr(rollout, name)) is not None}
        columns["tokens"] = rollout.tokens.to(torch.int32)
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
        rewards, batch = step.batch.samples.rewards, step.batch
        columns |= {"rewards": rewards.totals, "shaped_rewards": batch.rewards.totals}
        if rewards.parts is not None:
            columns["reward_parts"] = rewards.parts.values
        if batch.greedy is not None:
            columns["greedy_rewards"] = batch.greedy[batch.rollout.prompt_index]
        columns |= _weights(rollout, step.minibatches, self.ranks)
        if self.correction is not None:
            columns["correction_weights"] = self._correction(experience, columns)
        return {name: column.detach().to("cpu").contiguous() for name, column in columns.items()}

    def _correction(self, experience: Experience, columns: Mapping[str, Tensor]) -> Tensor:
        """Return [B, S] float32, weights of token losses for the policy before the first update."""
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
            samples, self.read, render=self.render,
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


def _weights(own: Rollout, minibatches: Sequence[Experience], ranks: Ranks) -> dict[str, Tensor]:
    """Return each epoch's mini-batch of this rank's rows, and their weights in the first epoch."""
    width = own.tokens.size(1)
    place = {key: row for row, key in enumerate(_keys(own))}
    count = len(place)
    columns = {
        "token_weights": torch.zeros(count, width),
        "loss_weights": torch.zeros(count, width),
    }
    epochs, seen = [torch.full((count,), -1)], set[tuple[int, int]]()
    for number, minibatch in enumerate(minibatches):
        bare: Experience = Experience.from_rows(**{name: getattr(minibatch, name) for name in _WEIGHTED})
        everywhere = ranks.gather_rows(bare)
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


def _keys(rows: Rollout | Experience) -> list[tuple[int, int]]:
    """Return (prompt, sample) of each row."""
    return list(zip(rows.prompt_index.tolist(), rows.sample_index.tolist(), strict=True))
