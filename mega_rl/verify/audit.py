"""Audit of a run's samples from its records: tickets, groups, tokens, ages, and what was dropped.

The rules trust nothing that the trainer computes behind sampling. `audit_run` adds what needs data and weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.tracking.records.reader import FOLDER, REDRAWN, Array, Record, read_record, records
from mega_rl.trainer.rows import group_means
from mega_rl.verify.replay_step import RecordedRows

# What each rule says, in the order of the page.
RULES: Mapping[str, str] = {
    "order": "a ticket's prompt is the one that the order of the data says",
    "once": "a ticket trains once or is dropped once",
    "skipped": "a ticket before a trained one trains or is dropped",
    "complete": "a group has each of its samples once",
    "tokens": "a token that the policy sampled trains at most once an epoch",
    "stale": "a token is at most trainer.async_steps steps old, and none is newer than the trainer",
    "versions": "a row's version is its oldest token's, and the trainer's, which never falls, is its step's",
    "logprobs": "a token has the log-prob that the weights of its version give it",
    "rewards": "a response has the reward that the run's function gives it for its prompt",
}


@dataclass(frozen=True)
class Breach:
    """A number in a record that breaks a rule."""

    rule: str
    step: int
    ticket: int
    what: str  # the value, and what the rule asks for


@dataclass(frozen=True)
class Bias:
    """Means of dropped groups minus those of trained ones, with half their 95 % intervals."""

    reason: str
    groups: int
    tokens: float  # response tokens of a sample, dropped minus trained
    tokens_within: float
    reward: float
    reward_within: float


@dataclass
class Audit:
    """Outcome of an audit."""

    steps: list[int]  # steps with a record
    checked: dict[str, int] = field(default_factory=dict)  # rule -> how many it looked at
    breaches: list[Breach] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # things no rule could look at, and why
    bias: list[Bias] = field(default_factory=list)

    def add(self, rule: str, count: int, breaches: Iterable[Breach]) -> None:
        """Add what a rule has looked at and found."""
        self.checked[rule] = self.checked.get(rule, 0) + count
        self.breaches += breaches


def read_steps(run: Path) -> list[Record]:
    """Return the records of a run by step. Raises UserError for none, or for damaged ones."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder of a run (trainer.run_dir)")
    steps = [read_record(folder) for folder in records(run / FOLDER)]
    if not steps:
        raise UserError(f"{run}: has no records, which an audit reads; set metrics.records.interval=1")
    for step in steps:
        known, places = step.description, step.tensors["prompt_index"]
        if known.weight_version < 0:
            raise UserError(f"{step.folder}: names no tickets: an earlier release wrote it, which no audit reads")
        if {len(known.tickets), len(known.data_rows)} != {known.prompts} or not (
            (places >= 0) & (places < known.prompts)
        ).all():
            raise UserError(f"{step.folder}: its tickets are not those of its {known.prompts} prompts; it is damaged")
    return steps


def audit_records(steps: Sequence[Record]) -> Audit:
    """Return the breaches of the rules that need only records."""
    audit = Audit([step.description.step for step in steps])
    tickets = sum(step.description.prompts for step in steps)
    ahead = int(steps[-1].description.config["trainer"]["async_steps"])
    audit.add("once", tickets, repeated(steps))
    audit.add("skipped", tickets, skipped(steps, ahead))
    newest, begun = -1, begun_versions(steps)
    for step in steps:
        audit.add("complete", step.description.prompts, incomplete(step))
        audit.add("tokens", int(step.tensors["train_mask"].sum()), trained_again(step))
        audit.add("stale", int(step.tensors["loss_mask"].sum()), stale(step, ahead, begun))
        audit.add("versions", len(step.tensors["lengths"]), wrong_versions(step, newest, begun))
        newest = max(newest, step.description.weight_version)
    first, last = audit.steps[0], audit.steps[-1]
    if missing := last - len(steps):
        where = f"{first - 1} before step {first}, {missing - first + 1} between the records"
        audit.unchecked.append(f"{missing} of {last} steps have no record ({where}): metrics.records.interval, max_mib")
    audit.bias = list(biases(steps))
    return audit


def token_versions(step: Record) -> Array:
    """Return [N, S] int64, version of the weights that sampled each token; undefined off the mask."""
    rows = np.broadcast_to(step.tensors["weight_version"][:, None], step.tensors["tokens"].shape)
    return step.tensors.get("token_versions", rows)


def kept_tokens(step: Record) -> Array:
    """Return [N, S] bool, tokens whose log-probs no version's weights give."""
    return step.tensors.get("kept", np.zeros_like(step.tensors["loss_mask"]))


def ticket_of(step: Record, row: int) -> int:
    """Return the ticket of a row's prompt."""
    return step.description.tickets[int(step.tensors["prompt_index"][row])]


def name_of(step: Record, row: int) -> str:
    """Return a row's name among those of its ticket."""
    branch = int(step.tensors["branch"][row]) if "branch" in step.tensors else 0
    return f"sample {int(step.tensors['sample_index'][row])}" + (f", row {branch}" if branch else "")


def ends_of(step: Record) -> Iterator[tuple[int, str]]:
    """Yield each ticket of a step with what became of it; one that was drawn again comes once more."""
    yield from ((ticket, "trained") for ticket in step.description.tickets)
    dropped = (group for group in step.description.dropped if group.reason != REDRAWN)
    yield from ((group.ticket, f"dropped ({group.reason})") for group in dropped)


def repeated(steps: Sequence[Record]) -> Iterator[Breach]:
    """Yield tickets with two ends."""
    seen: dict[int, tuple[int, str]] = {}
    for step in steps:
        number = step.description.step
        for ticket, end in ends_of(step):
            if ticket in seen:
                before, was = seen[ticket]
                yield Breach("once", number, ticket, f"is {end} in step {number} and was {was} in step {before}")
            seen.setdefault(ticket, (number, end))


def skipped(steps: Sequence[Record], ahead: int) -> Iterator[Breach]:
    """Yield tickets without an end, though a later one trained `ahead` steps ago."""
    for part in _without_gaps(steps):
        first, seen = part[0], {ticket for step in part for ticket, _ in ends_of(step)}
        # Before the first record another step may have taken any ticket up to those in progress then.
        known = 0
        if first.description.step > 1:
            own = [ticket for ticket, _ in ends_of(first)]
            known = max(own) + 1 + ahead * first.description.prompts if ahead else min(own)
        for step in part:
            if step.description.step + ahead > part[-1].description.step:
                break
            latest = max(step.description.tickets)
            for ticket in sorted(set(range(known, latest)) - seen):
                number = step.description.step
                yield Breach("skipped", number, ticket, f"has no end, and ticket {latest} trained in step {number}")
            known = max(known, latest)


def _without_gaps(steps: Sequence[Record]) -> list[list[Record]]:
    parts: list[list[Record]] = []
    for step in steps:
        if not parts or parts[-1][-1].description.step + 1 != step.description.step:
            parts.append([])
        parts[-1].append(step)
    return parts


def incomplete(step: Record) -> Iterator[Breach]:
    """Yield groups that lack a sample or have one twice."""
    index, sample = step.tensors["prompt_index"], step.tensors["sample_index"]
    first = step.tensors.get("branch", 0 * index) == 0
    count = int(step.description.config["rollout"]["n"])
    for place, ticket in enumerate(step.description.tickets):
        own = sorted(sample[first & (index == place)].tolist())
        if own != list(range(count)):
            yield Breach("complete", step.description.step, ticket, f"has the samples {own}, not 0 to {count - 1}")


def trained_again(step: Record) -> Iterator[Breach]:
    """Yield tokens that train though the policy read them, or in two rows or mini-batches."""
    tensors, number = step.tensors, step.description.step
    trained, epochs = tensors["train_mask"], int(step.description.config["algorithm"]["epochs"])
    for row, place in np.argwhere(trained & ~tensors["loss_mask"]).tolist():
        what = f"{name_of(step, row)}: token {place} trains, which the policy read"
        yield Breach("tokens", number, ticket_of(step, row), what)
    cuts = tensors.get("epoch_minibatches", tensors["minibatch"][:, None])
    if cuts.shape[1] > epochs:
        row = int((cuts[:, epochs:] >= 0).any(axis=1).argmax())
        what = f"{name_of(step, row)} is in mini-batches of {cuts.shape[1]} epochs, not of {epochs}"
        yield Breach("tokens", number, ticket_of(step, row), what)
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(tensors["prompt_index"].tolist(), tensors["sample_index"].tolist(), strict=True)):
        rows.setdefault(key, []).append(row)
    for a, b in (pair for own in rows.values() for pair in combinations(own, 2)):
        both = trained[a] & trained[b] & np.logical_and.accumulate(tensors["tokens"][a] == tensors["tokens"][b])
        if "turn" in tensors:
            both &= tensors["turn"][a] == tensors["turn"][b]
        if both.any():
            what = f"token {int(both.argmax())} of {name_of(step, a)} trains in {name_of(step, b)}, too"
            yield Breach("tokens", number, ticket_of(step, a), what)


def listed_versions(step: Record) -> Iterator[tuple[int, int]]:
    """Yield steps, from the record's own backwards, and the version that it says they began with."""
    known = step.description
    for before, version in enumerate(reversed(known.begun or range(known.weight_version + 1))):
        if version:
            yield known.step - before, version


def begun_versions(steps: Sequence[Record]) -> dict[int, int]:
    """Return the version that each step began with, by its own record or a later one's."""
    begun = {number: version for step in steps for number, version in listed_versions(step)}
    return begun | {step.description.step: step.description.weight_version for step in steps}


def stale(step: Record, ahead: int, begun: Mapping[int, int]) -> Iterator[Breach]:
    """Yield rows with a token that is too old, or newer than the trainer; begun: versions by step."""
    current, first = step.description.weight_version, begun.get(step.description.step - ahead, 0)
    versions = np.where(step.tensors["loss_mask"], token_versions(step), current)
    for row in np.flatnonzero((versions < first).any(axis=1)).tolist():
        what = f"{name_of(step, row)}: token {versions[row].argmin()} is of version {versions[row].min()}"
        why = f"{what}, and step {step.description.step - ahead} began with {first}"
        yield Breach("stale", step.description.step, ticket_of(step, row), why)
    for row in np.flatnonzero((versions > current).any(axis=1)).tolist():
        what = f"{name_of(step, row)}: token {versions[row].argmax()} is of version {versions[row].max()}"
        yield Breach("stale", step.description.step, ticket_of(step, row), f"{what}, and the trainer had {current}")


def wrong_versions(step: Record, before: int, begun: Mapping[int, int]) -> Iterator[Breach]:
    """Yield rows whose version is not their oldest token's, and wrong versions of the trainer.

    before: its largest at earlier steps. begun: versions by step.
    """
    known, mask, rows = step.description, step.tensors["loss_mask"], step.tensors["weight_version"]
    if known.weight_version < before:
        what = f"the trainer has version {known.weight_version}, and had {before} in an earlier step"
        yield Breach("versions", known.step, known.tickets[0], what)
    for number, version in listed_versions(step):
        if version != begun[number]:
            what = f"counts version {version} as the first of step {number}, which began with {begun[number]}"
            yield Breach("versions", known.step, known.tickets[0], what)
    oldest = np.where(mask, token_versions(step), np.iinfo(np.int64).max).min(axis=1)
    for row in np.flatnonzero(mask.any(axis=1) & (oldest != rows)).tolist():
        what = f"{name_of(step, row)} is called of version {rows[row]}, its oldest token is of {oldest[row]}"
        yield Breach("versions", known.step, ticket_of(step, row), what)


def biases(steps: Sequence[Record]) -> Iterator[Bias]:
    """Yield for each reason how dropped groups differ from those that trained."""
    samples, rank = (RecordedRows(step, SingleRank()).samples() for step in steps), SingleRank()
    kept = np.concatenate([group_means(one, rank).numpy() for one in samples])
    groups = [group for step in steps for group in step.description.dropped]
    for reason in sorted({group.reason for group in groups}):
        own = [group for group in groups if group.reason == reason]
        means = np.array([(group.tokens, group.reward) for group in own], dtype=np.float64)
        differences = [_difference(means[:, column], kept[:, column]) for column in range(2)]
        yield Bias(reason, len(own), *differences[0], *differences[1])


def _difference(dropped: Array, kept: Array) -> tuple[float, float]:
    """Return the difference of two means, and half its 95 % interval; NaN for too few."""
    dropped, kept = dropped[~np.isnan(dropped)], kept[~np.isnan(kept)]
    if not len(dropped) or not len(kept):
        return math.nan, math.nan
    within = math.nan
    if len(dropped) > 1 and len(kept) > 1:
        within = 1.96 * math.sqrt(dropped.var(ddof=1) / len(dropped) + kept.var(ddof=1) / len(kept))
    return float(dropped.mean() - kept.mean()), within


MOST_SHOWN = 20  # breaches on a page


def lines_of(audit: Audit, run: str) -> list[str]:
    """Return an audit as the lines of one page; run: its name."""
    first, last = audit.steps[0], audit.steps[-1]
    lines = [f"audit of {run}: {len(audit.steps)} recorded steps, {first} to {last}", ""]
    lines.append(f"{'rule':<9} {'checked breaches':>18}  a breach is what breaks this")
    counts = {rule: sum(breach.rule == rule for breach in audit.breaches) for rule in RULES}
    for rule, words in RULES.items():
        known = audit.checked.get(rule)
        numbers = "not checked" if known is None else f"{known:>9} {counts[rule]:>8}"
        lines.append(f"{rule:<9} {numbers:>18}  {words}")
    lines += ["", "dropped groups minus those that trained, means with 95 % intervals:"]
    for bias in audit.bias:
        tokens, reward = _interval(bias.tokens, bias.tokens_within), _interval(bias.reward, bias.reward_within)
        lines.append(f"  {bias.reason}: {bias.groups} groups, response tokens {tokens}, reward {reward}")
    lines += [] if audit.bias else ["  none"]
    lines += ["", *(f"not checked: {what}" for what in audit.unchecked)]
    for breach in audit.breaches[:MOST_SHOWN]:
        lines.append(f"step {breach.step}, ticket {breach.ticket}: {breach.what} ({breach.rule}: {RULES[breach.rule]})")
    if (more := len(audit.breaches) - MOST_SHOWN) > 0:
        lines.append(f"and {more} more: --json shows all")
    verdict = f"{len(audit.breaches)} breaches" if audit.breaches else "no breach"
    return [*lines, verdict]


def _interval(mean: float, within: float) -> str:
    return f"{mean:+.3g}" + ("" if math.isnan(within) else f" ({mean - within:+.3g} to {mean + within:+.3g})")
