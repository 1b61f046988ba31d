"""Events around steps: hints, readable rollouts, records of every number, validation, checkpoints and exports."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mega_rl.algorithms.kl import KLController
from mega_rl.algorithms.losses import Correction, SampledTokens
from mega_rl.algorithms.statistics import Sequences
from mega_rl.config.schema import CheckpointConfig
from mega_rl.protocols import MetricsSink, Ranks
from mega_rl.tracking.metrics.records import to_json_value
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.trainer.rows import ReadResponse, Samples, columns_of
from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.trainer.validation import Evaluation, ScoredSamples, SetOutcome, named
from mega_rl.types import ENDS, Experience, JsonObject, Metrics, Rewards, Rollout, TokenOutputs, row_numbers

if TYPE_CHECKING:
    from mega_rl.checkpoint.store import RunCheckpoints

log = logging.getLogger(__name__)

IDLE_STEPS = 5  # in a row, before the hint
MASKED = "reward/masked_fraction"


def is_due(done: int, interval: int) -> bool:
    """Return whether an action with this interval is due after `done` steps; 0 is never."""
    return interval > 0 and done % interval == 0


@dataclass
class DumpRollouts(Event):
    """Write readable rollouts of the first, the last and every N-th step, and of validations."""

    sink: MetricsSink
    read: ReadResponse
    render: Callable[[Sequence[int]], str]  # with all special tokens
    stage: Stages
    steps: int  # length of the run
    interval: int  # steps; 0 writes none
    count: int  # samples of each dump

    def after(self, done: int, evaluated: Evaluated | None) -> None:
        if evaluated is not None and self.interval and (done in (1, self.steps) or is_due(done, self.interval)):
            rows = self._rows(done, evaluated.batch.samples, advantages=evaluated.experience.advantages)
            self.sink.dump_rollouts(done, rows)

    def validation(self, done: int, outcomes: Sequence[SetOutcome]) -> None:
        """Write samples of each set of held-out prompts."""
        if self.interval:
            rows = [{**row, "set": one.prompts.name} for one in outcomes for row in self._rows(done, one.samples)]
            self.sink.dump_rollouts(done, rows, validation=True)

    def _rows(
        self, done: int, samples: Samples | ScoredSamples, advantages: Tensor | None = None
    ) -> list[Mapping[str, Any]]:
        with self.stage("log"):
            return sample_rows(
                samples, self.read, render=self.render, step=done, count=self.count, advantages=advantages
            )  # fmt: skip


@dataclass
class Validate(Event):
    """Evaluate the policy on held-out prompts: before the first step, every N-th, and after the last."""

    evaluation: Evaluation
    dumps: DumpRollouts
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    interval: int  # steps; 0 never

    def after(self, done: int, evaluated: Evaluated | None) -> None:
        due = done == 0 if evaluated is None else done == self.steps or is_due(done, self.interval)
        if not (due and self.interval and self.evaluation.sets):
            return
        with self.stage("validate"):
            outcomes = self.evaluation.run(done)
        self.dumps.validation(done, outcomes)
        self.log.add(named(outcomes))


@dataclass
class SaveAndExport(Event):
    """Save and export when due; on a request to stop, save and end the run."""

    checkpoints: RunCheckpoints
    export: Callable[[int], Metrics]  # writes the actor as a Hugging Face checkpoint, given the steps done; collective
    state: Callable[[int], JsonObject]  # state of the loop's parts, given the steps done
    stop_requested: Callable[[], bool]  # collective
    settings: CheckpointConfig
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    start: int  # steps done when the run began

    def before(self, step: int) -> bool:
        """Save and export what is due, once the record of the steps is written: a kill loses none of them."""
        if step == self.start:
            return False
        stopping, last, settings = self.stop_requested(), step == self.steps, self.settings
        saves = stopping or (last and settings.save_final) or is_due(step, settings.save_interval)
        in_memory = not (stopping or last) and is_due(step, settings.memory.interval)
        exports = (last and settings.hf_final) or is_due(step, settings.hf_interval)
        if saves or in_memory or exports:
            with self.stage("checkpoint"):
                if saves or in_memory:
                    self.stage.hold("save")
                    state = self.state(step)
                if saves:
                    self.checkpoints.save(step, state, metrics=self.log.last)
                if in_memory:
                    self.checkpoints.save_in_memory(step, state)
                if exports:
                    self._export(step)
        self.log.add(self.checkpoints.poll())
        return stopping

    def finish(self, done: int) -> None:
        """Wait for the save in progress; export if the run was finished before it began."""
        with self.stage("checkpoint"):
            if self.start >= self.steps and self.settings.hf_final:
                self._export(self.start)
            self.checkpoints.finish()
        self.log.add(self.checkpoints.poll())

    def _export(self, done: int) -> None:
        self.stage.hold("export")
        self.log.add(self.export(done))


@dataclass
class Warn(Event):
    """Log a hint when `IDLE_STEPS` steps in a row with rewards had nothing to learn."""

    log: StepLog
    _idle: int = field(default=0, init=False)  # steps in a row

    def after(self, done: int, evaluated: Evaluated | None) -> None:
        numbers = self.log.metrics
        equal, masked = numbers.get(EQUAL_GROUPS, 0.0), numbers.get(MASKED, 0.0)
        no_advantage = "reward/mean" in numbers and numbers.get("advantage/abs_mean") == 0.0
        self._idle = self._idle + 1 if evaluated is not None and (equal == 1.0 or masked == 1.0 or no_advantage) else 0
        if self._idle == IDLE_STEPS:
            log.warning(
                "in each of %d steps no response was better than another to its prompt: there is nothing to learn "
                "from (%s=%.3g, %s=%.3g, rollout/filtered_fraction=%.3g); look at rollouts/ and the reward function, "
                "raise rollout.n, rollout.temperature or rollout.max_new_tokens, or take other prompts",
                *(IDLE_STEPS, EQUAL_GROUPS, equal, MASKED, masked, numbers.get("rollout/filtered_fraction", 0.0)),
            )


# Columns of a mini-batch that travel to the rank that sampled its rows.
_WEIGHTED = (
    "tokens", "prompt_lengths", "lengths", "prompt_index", "sample_index", "branch", "token_weights", "loss_weights",
)  # fmt: skip


def sample_rows(
    samples: Samples | ScoredSamples,
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
    rewards read, by `read`, with the words of tools; `conversation` has the turns of an agent's row and what it read
    between them. `advantage_mean` is over the policy's tokens.
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
        if rollout.branch is not None:
            known["branch"] = int(rollout.branch[row])
        if rollout.turn is not None:
            known["conversation"] = _conversation(rollout, row, render)
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
                "end": ENDS[int(rollout.end[row])],
                "weight_version": int(rollout.weight_version[row]),
                **known,
            }
        )
    return rows


def _conversation(rollout: Rollout, row: int, render: Callable[[Sequence[int]], str]) -> list[tuple[int, str]]:
    """Return (turn, text) of the parts after a row's prompt; turn 0: the policy read it."""
    assert rollout.turn is not None
    places = range(int(rollout.prompt_lengths[row]), int(rollout.lengths[row]))
    ids, turns = rollout.tokens[row].tolist(), rollout.turn[row].tolist()
    return [(turn, render([ids[place] for place in own])) for turn, own in groupby(places, key=turns.__getitem__)]


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
    reward_kl: KLController | None = None
    correction: Correction | None = None
    on_policy: bool = False

    def __call__(self, step: Evaluated) -> dict[str, Tensor]:
        """Return the columns, [B] or [B, S, ...]; collective."""
        rollout, experience = step.batch.samples.rollout, step.experience
        old, ref, critic = step.outputs
        assert old.logprobs is not None
        columns = columns_of(rollout) | {"tokens": rollout.tokens.to(torch.int32)}
        columns.pop("scores", None)  # the rewards have them
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
            sequences=Sequences(row_numbers(mask, experience.branch), len(mask)),
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
    epochs, seen = [torch.full((count,), -1)], set[tuple[int, ...]]()
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


def _keys(rows: Rollout | Experience) -> list[tuple[int, ...]]:
    columns = (rows.prompt_index, rows.sample_index, rows.branch)
    return list(zip(*(column.tolist() for column in columns if column is not None), strict=True))
