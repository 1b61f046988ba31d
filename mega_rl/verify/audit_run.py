"""Audit of a run with its data, its reward function, and the weights of its checkpoints.

The order of prompts is built anew from the config. Rewards are computed from the recorded tokens. Log-probs come from
transformers' model in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from mega_rl.config.choices import DATA, kind_of_run
from mega_rl.config.loader import load
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Scorer
from mega_rl.rewards.build import build_rewards
from mega_rl.rollout.tokens import hidden_tokens
from mega_rl.tracking import progress
from mega_rl.tracking.records.reader import Array, Record
from mega_rl.trainer.assemble.data import OwnRows, build_prompts, prompt_reader, read_tokens
from mega_rl.types import Prompt
from mega_rl.verify.audit import (
    Audit,
    Breach,
    audit_records,
    kept_tokens,
    name_of,
    read_steps,
    ticket_of,
    token_versions,
)
from mega_rl.verify.replay import find_weights, origin_of
from mega_rl.verify.replay_step import RecordedRows
from mega_rl.verify.rl.independent.networks import PolicyNetwork
from mega_rl.verify.rl.independent.records import SampledRow, ScoredSample

REWARD_ATOL = 1e-6  # relative above 1
# Nats: of each token in float32, of the mean of a version's tokens in bf16, which rounds each.
LOGPROB_ATOL, LOGPROB_MEAN_BF16 = 1e-3, 0.15
SCORING_S = 3600.0  # deadline of a step's next score


def audit_run(run: Path, work: Path, *, versions: int) -> Audit:
    """Return the audit of a run. Raises UserError.

    work: an empty folder. versions: most versions of the weights under which log-probs are computed again.
    """
    with progress.phase("reading the records"):
        steps = read_steps(run)
        audit = audit_records(steps)
    config = load(None, steps[-1].description.config)
    with ExitStack() as resources:
        _audit_source(audit, steps, config, _read_source(config, steps, resources))
    _audit_logprobs(audit, steps, config, work, versions)
    audit.breaches.sort(key=lambda breach: (breach.step, breach.ticket))
    return audit


def _audit_source(audit: Audit, steps: Sequence[Record], config: Config, source: DrawnFrom) -> None:
    """Compare the prompts and rewards of all steps with their source."""
    if source.ordered:
        tickets = sum(step.description.prompts for step in steps)
        audit.add("order", tickets, [one for step in steps for one in misplaced(step, source.prompts)])
    else:
        audit.unchecked.append("order: a success curriculum draws by rates that no record has")
    if source.scorer is None:
        audit.unchecked.append(f"rewards: reward.source={config.reward.source.name} is no function of a response")
        return
    with progress.phase("scoring the responses"):
        for step in steps:
            audit.add("rewards", len(step.tensors["rewards"]), misrewarded(step, source.prompts, source.scorer))


@dataclass(frozen=True)
class DrawnFrom:
    """Prompts of a run, and its reward function."""

    prompts: Mapping[int, Prompt]  # every recorded ticket's
    ordered: bool  # the prompts are those of the order, else those that the records name
    scorer: Scorer | None  # the run's reward function; None: another source of rewards


def _read_source(config: Config, steps: Sequence[Record], resources: ExitStack) -> DrawnFrom:
    """Read the run's data and rewards as the run did. Raises UserError."""
    folder, reward, data = origin_of(config, "actor"), config.reward, config.data
    tokens = read_tokens(folder, data.chat, config.rollout, skip_special_tokens=reward.skip_special_tokens)
    rewards = build_rewards(reward, resources=resources)
    columns = rewards.columns(data.answer_key, data.source_key)
    vocab_size = read_hf_config(folder).vocab_size
    reader = prompt_reader(kind_of_run(config), data, tokens, columns, vocab_size=vocab_size)
    make, rank = DATA.maker(config), SingleRank()
    own = make and OwnRows(make, data.source.name, config.trainer.seed, config.trainer.val_interval > 0)
    read = build_prompts(reader, {}, config.trainer, tokens, rewards, own, world=rank)
    resources.callback(read.order.close)
    scorer = None
    if rewards.source is not None and reward.source.name == "function":
        scorer = rewards.scorer(tokens.reader, replica=rank, everyone=rank, timeout_s=SCORING_S)
    named = {ticket: row for step in steps for ticket, row in _named(step).items()}
    if read.rates is None:
        drawn = read.order.take(0, max(named) + 1)
        return DrawnFrom({ticket: drawn[ticket] for ticket in named}, True, scorer)
    rows = {prompt.index: prompt for prompt in read.train}
    return DrawnFrom({ticket: rows[row] for ticket, row in named.items()}, False, scorer)


def _named(step: Record) -> dict[int, int]:
    """Return each ticket's row of the data, as the record has it."""
    return dict(zip(step.description.tickets, step.description.data_rows, strict=True))


def misplaced(step: Record, prompts: Mapping[int, Prompt]) -> Iterator[Breach]:
    """Yield tickets with another prompt than the order's; prompts: by ticket."""
    tensors, number = step.tensors, step.description.step
    for ticket, row in _named(step).items():
        if row != prompts[ticket].index:
            what = f"is row {row} of the data, and the order says row {prompts[ticket].index}"
            yield Breach("order", number, ticket, what)
    if "branch" in tensors:  # a program may open a conversation of its own
        return
    for row, length in enumerate(tensors["prompt_lengths"].tolist()):
        ticket = ticket_of(step, row)
        if tuple(tensors["tokens"][row, :length].tolist()) != prompts[ticket].token_ids:
            what = f"{name_of(step, row)} answers other tokens than row {prompts[ticket].index} of the data has"
            yield Breach("order", number, ticket, what)


def misrewarded(step: Record, prompts: Mapping[int, Prompt], scorer: Scorer) -> Iterator[Breach]:
    """Yield responses with another reward than the run's function gives; prompts: by ticket."""
    own = [prompts[ticket] for ticket in step.description.tickets]
    scored = scorer.score(RecordedRows(step, SingleRank()).samples().rollout, own).totals.numpy()
    recorded = step.tensors["rewards"]
    equal = np.isclose(recorded, scored, rtol=REWARD_ATOL, atol=REWARD_ATOL, equal_nan=True)
    for row in np.flatnonzero(~equal).tolist():
        what = f"{name_of(step, row)} has the reward {recorded[row]:g}, the run's function gives {scored[row]:g}"
        yield Breach("rewards", step.description.step, ticket_of(step, row), what)


def _audit_logprobs(audit: Audit, steps: Sequence[Record], config: Config, work: Path, most: int) -> None:
    """Compare log-probs under at most `most` versions whose weights are at hand, taken at random."""
    used = sorted({int(v) for step in steps for v in np.unique(token_versions(step)[step.tensors["loss_mask"]])})
    begun = {step.description.weight_version: step for step in steps}
    at_random = [version for version in Random(0).sample(used, len(used)) if version in begun]
    # The mark of a run that never kept a cache exempts nothing; a resumed run may have another setting.
    keeps = any(
        kept_tokens(one).any() and load(None, one.description.config).rollout.sglang.sync.in_flight == "keep"
        for one in steps
    )
    if kept := keeps * sum(int((step.tensors["loss_mask"] & kept_tokens(step)).sum()) for step in steps):
        why = "sampled on KV cache that rollout.sglang.sync.in_flight=keep kept over an update, which no weights give"
        audit.unchecked.append(f"logprobs: {kept} tokens {why}")
    done = 0
    for version in at_random:
        if done == most:
            break
        try:
            weights = Path(find_weights(begun[version], config, work / str(version))["actor"])
        except UserError:  # neither the record nor a checkpoint has them
            continue
        if read_hf_config(weights).quantization is not None:  # transformers decodes them to another dtype
            continue
        done += 1
        policy = _Sampler(weights, config)
        with progress.phase(f"log-probs of version {version}"):
            for step in steps:
                own = step.tensors["loss_mask"] & (token_versions(step) == version) & ~(kept_tokens(step) & keeps)
                audit.add("logprobs", int(own.sum()), improbable(step, own, policy, config))
    if done < len(used):
        audit.unchecked.append(
            f"logprobs: {len(used) - done} of {len(used)} versions: no weights, quantised ones, or beyond --versions"
        )


def improbable(step: Record, own: Array, policy: PolicyNetwork, config: Config) -> list[Breach]:
    """Return tokens with other log-probs than a policy gives.

    own: [N, S] bool, tokens of the policy's version.
    """
    tensors, rows = step.tensors, np.flatnonzero(own.any(axis=1))
    gaps = np.zeros(own.shape)
    for row in rows.tolist():
        ids, places = tensors["tokens"][row, : int(tensors["lengths"][row])].tolist(), np.flatnonzero(own[row])
        read = [SampledRow(ids, int(tensors["prompt_lengths"][row]), places.tolist())]
        with torch.no_grad():
            right = policy.logprobs(ScoredSample(read, 0, 0.0, ()), config.rollout.temperature)
        gaps[row, places] = np.abs(right.numpy() - tensors["rollout_logprobs"][row, places])
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    in_fp32 = {config.model.dtype, config.rollout.dtype} <= {"fp32", "auto"}
    beyond = gaps > LOGPROB_ATOL if in_fp32 else (gaps > 0) & (gaps[own].sum() > LOGPROB_MEAN_BF16 * own.sum())
    limit = f"at most {LOGPROB_ATOL:g}" if in_fp32 else f"the mean is at most {LOGPROB_MEAN_BF16:g}"
    return [
        Breach(
            "logprobs", step.description.step, ticket_of(step, row),
            f"{name_of(step, row)}: token {gaps[row].argmax()} is {gaps[row].max():.3g} nats off the weights of its "
            f"version; {limit}",
        )
        for row in np.flatnonzero(beyond.any(axis=1)).tolist()
    ]  # fmt: skip


class _Sampler(PolicyNetwork):
    """Transformers' model that never says what the run's sampler may not say."""

    def __init__(self, path: Path, config: Config) -> None:
        super().__init__(path)
        hidden = () if config.rollout.backend == "none" else hidden_tokens(path, config.rollout.stop_token_ids)
        self._unsaid = [
            token for first, end in hidden for token in range(first, min(end, self._model.config.vocab_size))
        ]
