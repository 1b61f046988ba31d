"""Learning from given answers: rows as batches, likelihood and preferences as algorithm, losses on held-out rows.

A row is a sequence with its answer. Rows of a pair share prompt and unit, so that they train in one micro-batch. Fields
of `Experience` that sampling fills carry what these losses read: `advantages` a row's worth (margin of a pair, sign of
a labelled answer), `returns` the baseline of KTO, both on every token that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import Sequences
from mega_rl.data.order import StepOrder
from mega_rl.parallel.comm import share
from mega_rl.protocols import Learner, Ranks, TokenLoss, TokenModel
from mega_rl.trainer.events import is_due
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.trainer.rows import gather_column
from mega_rl.trainer.step_metrics import mean_metrics
from mega_rl.trainer.validation import parts_of
from mega_rl.types import Experience, Given, JsonObject, Metrics, Prompt, PromptSet


class Examples(NamedTuple):
    """Rows with given answers."""

    prompts: Sequence[Prompt]  # the global batch, into which `rows.prompt_index` points
    rows: Experience  # this data-parallel rank's


def example_rows(prompts: Sequence[Prompt], ranks: Ranks, *, scores: bool = False) -> Experience:
    """Return this rank's share of the prompts as rows, one for each answer, in order.

    scores: each row gets one more token 0, the only one on the mask: the output aligned to it is that of the row's last
    token (see `mega_rl.types`), and nothing before it sees the token that stands there.
    """
    own = [(place, number) for place in share(len(prompts), ranks) for number in range(len(prompts[place].given))]
    answers = [prompts[place].given[number] for place, number in own]
    lengths = torch.tensor([len(one.token_ids) + scores for one in answers], dtype=torch.int64)
    tokens = torch.zeros(len(own), max(lengths.tolist(), default=1), dtype=torch.int64)
    mask, worth = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape)
    for row, one in enumerate(answers):
        tokens[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        for first, end in [(len(one.token_ids), len(one.token_ids) + 1)] if scores else one.spans:
            mask[row, first:end] = True
        worth[row] = prompts[own[row][0]].worth * mask[row]
    index = torch.tensor([place for place, _ in own], dtype=torch.int64)
    prompt_lengths = lengths - 1 if scores else torch.tensor([one.spans[0][0] for one in answers], dtype=torch.int64)
    is_paired = any(len(prompt.given) > 1 for prompt in prompts)
    return Experience.from_rows(
        tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        loss_mask=mask,
        prompt_index=index,
        sample_index=torch.tensor([number for _, number in own], dtype=torch.int64),
        advantages=worth,
        unit=index.clone() if is_paired else None,
    )


@dataclass(frozen=True)
class ExampleSource:
    """Batch source of rows with given answers, in the order of the data section."""

    order: StepOrder
    ranks: Ranks  # the data-parallel replicas
    scores: bool  # rows for a score of their last token
    stage: Stages
    log: StepLog

    def take(self, step: int) -> Examples:
        """Return the rows of a step; collective."""
        with self.stage("rows"):
            prompts = self.order.batch(step)
            self.log.add(self.order.metrics(self.drawn_after(step + 1)) | self.order.waits())
            return self.rows(prompts)

    def rows(self, prompts: Sequence[Prompt]) -> Examples:
        """Return the prompts with this rank's share of their rows."""
        return Examples(prompts, example_rows(prompts, self.ranks, scores=self.scores))

    def numbers(self, done: int) -> JsonObject:
        """Return the rows drawn when `done` steps are done, for a checkpoint."""
        return {"prompts_drawn": self.drawn_after(done)}

    def resume(self, numbers: JsonObject) -> None:
        """Do nothing: the order is a function of the step."""

    def drawn_after(self, done: int) -> int:
        """Return the number of rows drawn when `done` steps are done."""
        return self.order.drawn_after(done)


Reference = Callable[[Examples], Tensor]  # [B, S] float32, whose sum over a row is the log-prob of its answer


def reference_logprobs(model: TokenModel, batch: Examples) -> Tensor:
    """Return the log-probs of a batch by the frozen copy; collective."""
    logprobs = model.evaluate(batch.rows).logprobs
    assert logprobs is not None, "a reference gives log-probs"
    return logprobs


@dataclass
class ReferenceOnce:
    """Reference log-probs of every row, computed before the first step; then the model leaves its device."""

    model: TokenModel
    prompts: Sequence[Prompt]  # all that the run may draw, held-out ones among them
    source: ExampleSource
    chunk: int  # prompts that are evaluated together
    release: Callable[[], object]
    sums: dict[tuple[Given, ...], list[float]] = field(default_factory=dict, init=False)

    def __call__(self, batch: Examples) -> Tensor:
        if not self.sums:
            for part in parts_of(len(self.prompts), most=self.chunk):
                self._remember(self.source.rows(self.prompts[part.start : part.stop]))
            self.release()
        rows = batch.rows
        logprobs = torch.zeros(rows.tokens.shape)
        keys = zip(rows.prompt_index.tolist(), rows.sample_index.tolist(), strict=True)
        known = [self.sums[batch.prompts[place].given][number] for place, number in keys]
        logprobs[torch.arange(len(known)), rows.loss_mask.int().argmax(dim=1)] = torch.tensor(known)
        return logprobs

    def _remember(self, batch: Examples) -> None:
        logprobs = reference_logprobs(self.model, batch)
        sums = iter(gather_column(logprobs.sum(dim=1), self.source.ranks).tolist())
        for prompt in batch.prompts:
            self.sums[prompt.given] = [next(sums) for _ in prompt.given]


class EvaluatedExamples(NamedTuple):
    """A step before its updates, as this rank has it."""

    batch: Examples
    minibatches: Sequence[Experience]


@dataclass
class FromAnswers:
    """Algorithm that learns from given answers; its loss is that of the actor."""

    actor: Learner
    reference: Reference | None
    minibatches: MinibatchPlan
    compares: bool  # the loss has a baseline, the mean log-ratio of answers to other prompts
    stage: Stages
    log: StepLog

    def evaluate(self, batch: Examples, step: int) -> EvaluatedExamples:
        """Return the mini-batches of rows, with the reference's log-probs."""
        rows = batch.rows
        if self.reference is not None:
            with self.stage("ref_logprobs"):
                rows.ref_logprobs = self.reference(batch)
        if self.compares:
            rows.returns = self._baseline(batch) * rows.loss_mask
        return EvaluatedExamples(batch, list(self.minibatches.cut(rows, num_prompts=len(batch.prompts), step=step)))

    def update(self, evaluated: EvaluatedExamples, step: int) -> None:
        """Make one optimizer step on each mini-batch."""
        with self.stage("update_actor"):
            self.log.add(mean_metrics([self.actor.update(one, step=step) for one in evaluated.minibatches]))

    def _baseline(self, batch: Examples) -> float:
        """Return max(0, mean log-ratio of prompts with the answer of the next one); collective."""
        assert self.reference is not None
        prompts = batch.prompts
        others = [
            Prompt(
                one.index,
                one.token_ids,
                one.text,
                None,
                given=(_answer_to(one, after, self.minibatches.max_response_tokens),),
            )
            for one, after in zip(prompts, [*prompts[1:], prompts[0]], strict=True)
        ]
        ranks = self.minibatches.ranks
        moved = Examples(others, example_rows(others, ranks))
        with self.stage("old_logprobs"):
            own = self.actor.evaluate(moved.rows).logprobs
        with self.stage("ref_logprobs"):
            ratio = own - self.reference(moved)  # type: ignore[operator]
        return max(0.0, float(ranks.sum(ratio.double().sum())) / len(prompts))


def _answer_to(prompt: Prompt, other: Prompt, most: int) -> Given:
    """Return another prompt's answer to this prompt, cut to `most` tokens with it."""
    given = other.given[0]
    moved = len(prompt.token_ids) - given.spans[0][0]
    spans = tuple((begin + moved, min(end + moved, most)) for begin, end in given.spans if begin + moved < most)
    return Given((*prompt.token_ids, *given.token_ids[given.spans[0][0] :])[:most], spans)


@dataclass
class EvaluateLoss(Event):
    """Report the loss on held-out rows: before the first step, every N-th, and after the last."""

    sets: Sequence[PromptSet]
    source: ExampleSource
    algorithm: FromAnswers
    loss: TokenLoss
    steps: int  # length of the run
    interval: int  # steps; 0 never
    by_tokens: bool  # the loss is a mean over tokens, not over rows

    def after(self, done: int, evaluated: EvaluatedExamples | None) -> None:
        due = done == 0 if evaluated is None else done == self.steps or is_due(done, self.interval)
        if due and self.interval:
            for one in self.sets:
                means = self._means(one.prompts)
                own = {HELD_OUT[name]: value for name, value in means.items() if name in HELD_OUT}
                named = {name.replace("val/", f"val/{one.name}/"): value for name, value in own.items()}
                self.source.log.add(named if one.name else own)

    def _means(self, prompts: Sequence[Prompt]) -> Metrics:
        """Return the loss's metrics over all rows; collective."""
        plan, stage = self.algorithm.minibatches, self.source.stage
        totals: dict[str, float] = {}
        count = 0.0
        for part in parts_of(len(prompts), most=max(plan.minibatch_size, plan.ranks.size)):
            batch = self.source.rows(prompts[part.start : part.stop])
            for rows in self.algorithm.evaluate(batch, 0).minibatches:
                with stage("validate"):
                    stage.hold("old_logprobs")
                    outputs = self.algorithm.actor.evaluate(rows)
                fields = {name: getattr(rows, name) for name in LOSS_FIELDS}
                sums = self.loss(outputs, fields, Sequences(rows.rows, len(rows.rows))).sums
                weight = float(rows.loss_mask.sum()) if self.by_tokens else float(len(rows.rows))
                numbers = plan.ranks.sum(torch.tensor([*(float(x) for x in sums.values()), weight]).double()).tolist()
                count += numbers[-1]
                for name, value in zip(sums, numbers, strict=False):
                    totals[name] = totals.get(name, 0.0) + value * numbers[-1]
        return {name: value / max(count, 1.0) for name, value in totals.items()}


# Metric of updates -> its name for held-out rows.
HELD_OUT = {"sft/loss": "val/loss", "preference/loss": "val/loss", "preference/accuracy": "val/accuracy"}
LOSS_FIELDS = ("ref_logprobs", "advantages", "returns", "token_weights", "loss_weights", "loss_mask", "rows")
