"""Rollout role: the engine's workers, and a user's own source with its context, weights and checks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mega_rl.agents.environment import FAILURES, NAMED, Played, Runner, TurnEngine, TurnSampling
from mega_rl.agents.trajectory import Trajectory, Turn, rows_of, score_fault
from mega_rl.data.chat import ChatTemplate
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together, run_on_all
from mega_rl.parallel.comm import share
from mega_rl.protocols import EarlyScorer, Ranks, RolloutSource
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import ENDS, Draws, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)
EVALUATION = 0x6576616C  # "eval": third word of the seeds of evaluations


def own_share(count: int, data_parallel: Ranks, replica: Ranks) -> range:
    """Return which of `count` prompts this rank generates for: a share of its replica's."""
    owned = share(count, data_parallel)
    part = share(len(owned), replica)
    return owned[part.start : part.stop]


def evaluation_stream(draws: Draws | None) -> tuple[int, ...]:
    """Return the words after seed and step in seeds of evaluations; none in training."""
    return () if draws is None else (EVALUATION, draws.stream)


@dataclass
class RolloutWorker:
    """Rollout role with an engine on every rank."""

    engine: TurnEngine
    data_parallel: Ranks
    replica: Ranks
    n: int
    seed: int

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return this replica's rows: n samples of each prompt (greedy: one), by prompt and sample."""
        mine = own_share(len(prompts), self.data_parallel, self.replica)
        own = [prompts[i] for i in mine]
        if draws is not None:
            seed = (self.seed, step, *evaluation_stream(draws))
            places = [draws.first + i for i in mine]
            rows = self.engine.generate(own, places, n=draws.n, seed=seed, draws=draws)
            rows.prompt_index = rows.prompt_index - draws.first
        else:
            n = 1 if greedy else self.n
            rows = self.engine.generate(own, list(mine), n=n, seed=(self.seed, step), greedy=greedy)
        return self.replica.gather_rows(rows)

    def metrics(self) -> Metrics:
        return self.engine.metrics()


Weights = Iterator[tuple[str, Tensor]]  # (Hugging Face name, full tensor in training dtype)
_ABOVE_ZERO = 1e-3  # log-probs of near-certain tokens may exceed 0 by the rounding of bf16 logits


@dataclass(frozen=True)
class RolloutContext:
    """Parts of a run for environments and rollout sources; ranks differ in `Ranks` only."""

    tokenizer: PreTrainedTokenizerBase
    # A `RolloutEngine` with `turns`, which samples with the actor's weights; None with rollout.backend=none.
    engine: Any
    sampling: Sampling  # temperature, top_p, top_k, max_new_tokens of a whole response, stop_token_ids
    n: int  # samples of each prompt in training
    seed: int
    data_parallel: Ranks  # this rank's replica among the replicas
    replica: Ranks  # this rank among those of its replica
    weight_version: Callable[[], int]  # version of the actor's weights that was published last
    template: ChatTemplate | None = None  # the one of data.chat; None: prompts are text
    reads_scores: bool = False  # reward.source=environment

    def start(self, prompts: Sequence[Prompt], *, greedy: bool = False, draws: Draws | None = None) -> list[Trajectory]:
        """Return trajectories without a turn of this rank's prompts: n of each (greedy: one), or `draws.n`."""
        samples, limit = range(self._samples(greedy, draws)), self.sampling.max_new_tokens
        limit = limit if draws is None else draws.max_new_tokens or limit
        return [Trajectory(prompts[i], i, sample, limit) for i in self._own(prompts) for sample in samples]

    def rollout(self, trajectories: Sequence[Trajectory], *, with_versions: bool = False) -> Rollout:
        """Return the replica's rows from its ranks' trajectories; collective over all ranks."""
        ordered = sorted(trajectories, key=lambda each: (each.prompt_index, each.sample_index))
        own: list[int] = [any(one.ended() == "error" for one in ordered), any(len(one.branches) > 1 for one in ordered)]
        own.append(self.reads_scores or any(one.scores for one in ordered))
        shapes: list[Sequence[int]] = [
            turn.routing.shape[1:] for one in ordered for turn in one.turns if turn.routing is not None
        ]
        if with_versions and self.engine.routed is not None:  # all arrivals have these columns
            shapes = [(sum(self.engine.routed.mixtures), self.engine.routed.top_k)]
        own += shapes[0] if shapes else (0, 0)
        *has, mixtures, top_k = self.data_parallel.max(self.replica.max(torch.tensor(own).long())).tolist()
        columns = dict(zip(("with_failed", "with_branches", "with_scores"), map(bool, has), strict=True))
        columns["with_versions"] = with_versions
        rows = rows_of(ordered, version=self.weight_version(), routed=(mixtures, top_k), **columns)
        return self.replica.gather_rows(rows)

    def _own(self, prompts: Sequence[Prompt]) -> range:
        return own_share(len(prompts), self.data_parallel, self.replica)

    def _samples(self, greedy: bool, draws: Draws | None) -> int:
        return draws.n if draws is not None else 1 if greedy else self.n


@dataclass
class EnvironmentRollouts:
    """Rollout source over a user's environment: each rank plays the trajectories of its own prompts."""

    runner: Runner
    context: RolloutContext
    everyone: Ranks
    scores: EarlyScorer | None = None  # takes each trajectory as it ends
    window: int = 0  # trajectories of which too many may fail; 0: those of a generation
    _sums: dict[str, float] = field(default_factory=dict, init=False)  # totals behind `metrics`
    _failed: tuple[float, float] = field(default=(0.0, 0.0), init=False)  # failures, trajectories

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the replica's rows. Raises RunError on all ranks if too many trajectories fail; collective."""
        context, engine = self.context, self.context.engine
        assert engine is not None, "a rule refuses environments with rollout.backend=none"
        seed, first = (context.seed, step, *evaluation_stream(draws)), 0 if draws is None else draws.first
        trajectories = context.start(prompts, greedy=greedy, draws=draws)
        ended: dict[int, Played] = {}
        how = TurnSampling(seed, greedy, draws)

        def lost() -> list[int]:
            return [place for place, one in ended.items() if one.failure == "lost"]

        def play(places: Sequence[int]) -> None:
            own, sample = [trajectories[i] for i in places], partial(engine.turns, how=how)
            ended.update(zip(places, self.runner.run(own, sample, first=first, ended=self.ended), strict=True))

        with ExitStack() as failed:
            if self.scores is not None:
                failed.callback(self.scores.forget)
            run_on_all(lambda: play(range(len(trajectories))), self.everyone)
            # What servers had begun when they died runs again from its start, with the same random numbers.
            engine.settle(lambda: len(lost()), lambda: play(lost()))
            rows = self.rollout([ended[place] for place in range(len(trajectories))])
            failed.pop_all()
        return rows

    def rollout(self, ended: Sequence[Played], *, with_versions: bool = False) -> Rollout:
        """Return the replica's rows from its ranks' trajectories. Raises RunError as `generate`; collective."""
        outcomes = [self._checked(one) for one in ended]
        self._count(outcomes)
        return self.context.rollout([one.trajectory for one in outcomes], with_versions=with_versions)

    def metrics(self) -> Metrics:
        """Return and reset the metrics of the trajectories since the last call, over all ranks."""
        numbers, self._sums = self._sums, {}
        count = max(numbers.pop("count", 0.0), 1.0)
        return {n: v if "failed" in n else v / count for n, v in numbers.items()}

    def ended(self, played: Played) -> Played:
        """Begin to score a trajectory; return it, failed if its own scores are wrong."""
        played = self._checked(played)
        if self.scores is not None and played.trajectory.ended() != "error":
            one = replace(played.trajectory, prompt_index=0)
            self.scores.begin(rows_of([one], version=0, with_branches=True), [one.prompt])
        return played

    def _checked(self, played: Played) -> Played:
        """Return a trajectory as a failed one if its own scores are wrong."""
        trajectory = played.trajectory
        failed = trajectory.ended() == "error"
        fault = "" if failed else score_fault(trajectory, is_read=self.context.reads_scores)
        if fault:
            trajectory.end = "error"
        return played._replace(failure="error", what=fault) if fault else played

    def _count(self, outcomes: Sequence[Played]) -> None:
        """Count turns, tokens, ends and failures of all ranks; raise RunError if too many fail; collective."""
        played = [one.trajectory for one in outcomes]
        given = [sum(len(p) for p in b.parts if not isinstance(p, Turn)) for t in played for b in t.branches]
        own: dict[str, float] = {"count": len(played), "agent/turns_mean": sum(len(one.turns) for one in played)}
        used = [any(isinstance(part, Turn) for part in b.parts) for t in played for b in t.branches]
        own |= {"agent/given_tokens_mean": sum(given), "agent/branches_mean": sum(used)}
        own |= {"agent/drifted_mean": sum(one.drifted for one in played)}
        own |= {"agent/tool_calls_mean": sum(one.tool_calls for one in played)}
        own |= {"agent/tool_s_mean": sum(one.tool_s for one in played)}
        own |= {"agent/environment_s_mean": sum(one.seconds for one in outcomes)}
        own |= {f"agent/end_{end}_fraction": sum(one.end == end for one in played) for end in ENDS}
        own |= {f"agent/failed_{kind}": sum(one.failure == kind for one in outcomes) for kind in FAILURES}
        totals = self.everyone.sum(torch.tensor(list(own.values()), dtype=torch.float64)).tolist()
        numbers = dict(zip(own, totals, strict=True))
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in numbers.items()}
        words = [one for one in outcomes if one.failure]
        for one in words[:NAMED]:
            place = f"sample {one.trajectory.sample_index} of prompt {one.trajectory.prompt.index}"
            log.warning("%s: %s: %s (%s)", self.runner.name, place, one.what, one.failure)
        share, (failed, count) = self.runner.environment.max_failed_share, self._failed
        failed, count = failed + sum(numbers[f"agent/failed_{kind}"] for kind in FAILURES), count + numbers["count"]
        self._failed, error = (failed, count) if count < self.window else (0.0, 0.0), None
        if words and count >= self.window and (failed > share * count or failed == count):
            error = RunError(
                f"{self.runner.name}: {failed:.0f} of {count:.0f} trajectories failed, more than "
                f"max_failed_share={share:g}; the first: {words[0].what}"
            )
        raise_together(error, self.everyone, error=RunError)


@dataclass
class WeightsToSource:
    """Weight sync without an engine: a publish gives the source the weights, or only counts."""

    export: Callable[[], Weights]  # collective
    # `receive_weights(weights, version=...)` of the source: takes every weight; a tensor stays as it is until the next
    # one is asked for; collective. None for a source that needs no weights, such as recorded rollouts.
    receive: Callable[..., None] | None = None
    weight_version: int = field(default=0, init=False)

    def resume_at(self, version: int) -> None:
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        """Hand over every weight and raise the version."""
        version = self.weight_version + 1
        if self.receive is not None:
            weights = self.export()
            self.receive(weights, version=version)
            for _ in weights:  # every rank takes part in gathering what the source has left
                pass
        self.weight_version = version
        return {"rollout/weight_version": float(version)}


@dataclass(frozen=True)
class CheckedRollouts:
    """A user's rollout source whose rows are checked on every rank."""

    source: RolloutSource
    name: str  # the setting that chose it: "rollout.source='agent.py:Agent'"
    context: RolloutContext  # the source's own
    max_prompt_tokens: int
    vocab_size: int  # the smallest of the run's models
    everyone: Ranks

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the source's rows. Raises RunError on all ranks for rows that break a rule; collective."""
        longest = self.context.sampling.max_new_tokens
        if draws is None:
            rollout = self.source.generate(prompts, step=step, greedy=greedy)
            n = 1 if greedy else self.context.n
        else:
            rollout = self.source.generate(prompts, step=step, draws=draws)
            n, longest = draws.n, draws.max_new_tokens or longest
        form = _wrong_form(rollout, self.context, prompts=len(share(len(prompts), self.context.data_parallel)), n=n)
        self._raise(form or self._broken_rule(rollout, longest))
        columns = (rollout.tokens, rollout.loss_mask, rollout.rollout_logprobs, rollout.lengths)
        content = b"".join(column.contiguous().numpy().tobytes() for column in columns)
        digest = torch.tensor(xxhash.xxh3_64_intdigest(content) >> 2)
        least, most = -self.context.replica.max(-digest), self.context.replica.max(digest)
        self._raise("" if bool(least == most) else "the ranks of a replica return different rows; gather them")
        return rollout

    def metrics(self) -> Metrics:
        """Return the metrics of source and engine; collective."""
        metrics = self.source.metrics()
        numbers = [isinstance(value, (int, float)) and math.isfinite(value) for value in metrics.values()]
        right = all(numbers) and all(isinstance(name, str) for name in metrics)
        self._raise("" if right else f"metrics() holds {metrics!r}; legal: finite numbers by name")
        of_engine = {} if self.context.engine is None else self.context.engine.metrics()
        return of_engine | {name: float(value) for name, value in metrics.items()}

    def _raise(self, fault: str) -> None:
        """Raise on all ranks if any has a fault; collective."""
        raise_together(RunError(f"{self.name}: {fault}") if fault else None, self.everyone, error=RunError)

    def _broken_rule(self, rollout: Rollout, longest: int) -> str:
        first, end = rollout.prompt_lengths[:, None], rollout.lengths[:, None]
        places, mask, logprobs = torch.arange(rollout.tokens.size(1)), rollout.loss_mask, rollout.rollout_logprobs
        failed = torch.zeros_like(rollout.lengths, dtype=torch.bool) if rollout.failed is None else rollout.failed
        # Rows of a trajectory with branches may open with more than the prompt.
        longest_prompt = torch.full_like(rollout.lengths, self.max_prompt_tokens)
        if rollout.branch is not None:
            longest_prompt += longest
        is_long = rollout.lengths > longest_prompt.new_tensor(self.max_prompt_tokens + longest)
        tokens = torch.where(places < end, rollout.tokens, 0)
        faults = {
            f"has no prompt, or one of more than data.max_prompt_tokens={self.max_prompt_tokens} tokens": (first < 1)
            | (first > longest_prompt[:, None])
            | is_long[:, None],
            f"has a response of more than rollout.max_new_tokens={longest} tokens, or ends before its prompt or after "
            "the tokens": (end < first) | (end - first > longest) | (end > rollout.tokens.size(1)),
            "has loss_mask set outside its response": mask & ((places < first) | (places >= end)),
            "must have tokens on loss_mask, or have failed, not both": mask.any(dim=1) == failed,
            f"has token ids outside a model's vocabulary of {self.vocab_size}": (tokens < 0)
            | (tokens >= self.vocab_size),
            "has log-probs that are not finite, above 0, or not 0 off loss_mask": ~(logprobs <= _ABOVE_ZERO)
            | logprobs.isinf()
            | ((logprobs != 0) & ~mask),
        }
        if rollout.scores is not None:
            faults["has no finite score, which is the reward"] = ~rollout.scores.isfinite()
        if rollout.turn_scores is not None:
            wrong = ~rollout.turn_scores.isfinite() | ((rollout.turn_scores != 0) & ~mask)
            faults["has scores of turns that are not finite, or not 0 off loss_mask"] = wrong
        for fault, broken in faults.items():
            if broken.any():
                row = int(broken.reshape(len(broken), -1).any(dim=1).nonzero()[0])
                place = f"prompt {int(rollout.prompt_index[row])} and sample {int(rollout.sample_index[row])}"
                return f"row {row}, {place}, {fault}"
        return ""


def _wrong_form(rollout: object, context: RolloutContext, *, prompts: int, n: int) -> str:
    if not isinstance(rollout, Rollout):
        return f"generate() returned {type(rollout).__name__}, not a Rollout"
    rows, width = prompts * n, rollout.tokens.shape[-1]
    if rollout.branch is not None:
        rows += int((rollout.branch != 0).sum())
    columns = {"tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32}
    numbers = ("prompt_lengths", "lengths", "prompt_index", "sample_index", "weight_version")
    columns |= {"end": torch.int8, **dict.fromkeys(numbers, torch.int64)}
    columns |= {} if rollout.failed is None else {"failed": torch.bool}
    if (rollout.scores is None) == context.reads_scores:
        return "sets scores, and reward.source is not environment" if rollout.scores is not None else "sets no scores"
    columns |= {} if rollout.scores is None else {"scores": torch.float32}
    columns |= {} if rollout.turn_scores is None else {"turn_scores": torch.float32}
    of_tokens = ("tokens", "loss_mask", "rollout_logprobs", "turn_scores")
    for name, dtype in columns.items():
        column, shape = getattr(rollout, name), [rows, width][: 2 if name in of_tokens else 1]
        if list(column.shape) != shape or column.dtype != dtype:
            return (
                f"{name} has shape {list(column.shape)} and type {column.dtype}; legal: {shape} and {dtype}, {n} "
                f"samples of each of the replica's {prompts} prompts"
            )
    return ""
