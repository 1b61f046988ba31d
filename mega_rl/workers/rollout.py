"""Rollout role: the engine's workers, and a user's own source with its context, weights and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks, RolloutEngine, RolloutSource
from mega_rl.rollout.sglang.generation.engine import Sampled, SglangRolloutEngine
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Draws, Metrics, Prompt, Rollout

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

    engine: RolloutEngine
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


@dataclass
class BackgroundRolloutWorker(RolloutWorker):
    """Generation in two parts, for the background: `sample` may run on another thread, `collect` not."""

    engine: SglangRolloutEngine

    def sample(self, prompts: Sequence[Prompt], step: int) -> Sampled:
        """Generate this rank's samples of the step; no collective."""
        mine = own_share(len(prompts), self.data_parallel, self.replica)
        return self.engine.sample([prompts[i] for i in mine], list(mine), n=self.n, seed=(self.seed, step))

    def collect(self, samples: Sampled) -> Rollout:
        """Return this replica's rows; collective over all ranks."""
        return self.replica.gather_rows(self.engine.collect(samples))


End = Literal["done", "length", "turns", "error"]
Weights = Iterator[tuple[str, Tensor]]  # (Hugging Face name, full tensor in training dtype)
_ABOVE_ZERO = 1e-3  # log-probs of near-certain tokens may exceed 0 by the rounding of bf16 logits


@dataclass(slots=True)
class Trajectory:
    """A prompt and its response so far: sampled turns, and given tokens between them."""

    prompt: Prompt
    prompt_index: int  # position in the step's prompts
    sample_index: int  # number of the sample of its prompt
    limit: int  # most tokens of the response, given ones included
    token_ids: list[int] = field(default_factory=list)  # the response's
    sampled: list[bool] = field(default_factory=list)  # whether the policy sampled the token: these train
    logprobs: list[float] = field(default_factory=list)  # each token's at the sampling temperature, 0 for given ones
    stopped: bool = False  # a stop token ended the last turn
    # Why no further turn comes; the row of an "error" does not train. None: it is done if a stop token ended it.
    end: End | None = None

    @property
    def room(self) -> int:
        """Return the tokens that may still come; 0 once the trajectory has ended."""
        return 0 if self.end is not None else self.limit - len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Return whether the task is done: neither length nor a limit of turns cut it off."""
        return self.stopped if self.end is None else self.end == "done"

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, finished: bool) -> None:
        """Append a turn of the policy, with the stop token that ended it where it `finished`."""
        assert len(token_ids) == len(logprobs) <= self.room, f"{len(token_ids)} tokens, room for {self.room}"
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.sampled += [True] * len(token_ids)
        self.stopped = finished
        if not finished and not self.room:
            self.end = "length"

    def give(self, token_ids: Sequence[int]) -> bool:
        """Append tokens that the policy only reads; return False without room for a turn after them."""
        if len(token_ids) >= self.room:
            self.end = self.end or "length"
            return False
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.sampled += [False] * len(token_ids)
        return True


@dataclass(frozen=True)
class RolloutContext:
    """Parts of a run that a rollout source works with; only the ranks differ between ranks."""

    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine | None  # samples with the actor's weights; None with rollout.backend=none
    sampling: Sampling  # temperature, top_p, top_k, max_new_tokens of a whole response, stop_token_ids
    n: int  # samples of each prompt in training
    seed: int
    data_parallel: Ranks  # this rank's replica among the replicas
    replica: Ranks  # this rank among those of its replica
    weight_version: Callable[[], int]  # version of the actor's weights that was published last

    def start(self, prompts: Sequence[Prompt], *, greedy: bool = False, draws: Draws | None = None) -> list[Trajectory]:
        """Return empty trajectories of this rank's prompts: n of each (greedy: one), or `draws.n`."""
        samples, limit = range(self._samples(greedy, draws)), self.sampling.max_new_tokens
        limit = limit if draws is None else draws.max_new_tokens or limit
        return [Trajectory(prompts[i], i, sample, limit) for i in self._own(prompts) for sample in samples]

    def sample(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> list[Trajectory]:
        """Return trajectories with their first turn, as rollout.source=single_turn samples it; collective."""
        trajectories, own = self.start(prompts, greedy=greedy, draws=draws), self._own(prompts)
        seed, first = (self.seed, step, *evaluation_stream(draws)), 0 if draws is None else draws.first
        rows = self._engine().generate(
            [prompts[i] for i in own], [first + i for i in own],
            n=self._samples(greedy, draws), seed=seed, greedy=greedy, draws=draws,
        )  # fmt: skip
        _add_turn(trajectories, rows)
        return trajectories

    def extend(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        turn: int,
        greedy: bool = False,
        draws: Draws | None = None,
    ) -> None:
        """Sample turn number `turn`, from 1 on, of the trajectories that have room; collective."""
        going = [trajectory for trajectory in trajectories if trajectory.room > 0]
        samples, first = self._samples(greedy, draws), 0 if draws is None else draws.first
        rows = self._engine().generate(
            [replace(each.prompt, token_ids=(*each.prompt.token_ids, *each.token_ids)) for each in going],
            # Each has random numbers that no other trajectory has.
            [(first + each.prompt_index) * samples + each.sample_index for each in going],
            n=1, seed=(self.seed, step, *evaluation_stream(draws), turn),
            limits=[each.room for each in going], greedy=greedy, draws=draws,
        )  # fmt: skip
        _add_turn(going, rows)

    def rollout(self, trajectories: Sequence[Trajectory]) -> Rollout:
        """Return the replica's rows from its ranks' trajectories; collective over all ranks."""
        ordered = sorted(trajectories, key=lambda each: (each.prompt_index, each.sample_index))
        failed = torch.tensor([each.end == "error" for each in ordered], dtype=torch.bool)
        any_failed = self.data_parallel.max(self.replica.max(failed.any().long()))
        rows = _rows(ordered, version=self.weight_version(), failed=failed if any_failed else None)
        return self.replica.gather_rows(rows)

    def _own(self, prompts: Sequence[Prompt]) -> range:
        return own_share(len(prompts), self.data_parallel, self.replica)

    def _samples(self, greedy: bool, draws: Draws | None) -> int:
        return draws.n if draws is not None else 1 if greedy else self.n

    def _engine(self) -> RolloutEngine:
        assert self.engine is not None, "rollout.backend=none has no engine to sample with; set hf or sglang"
        return self.engine


def _add_turn(trajectories: Sequence[Trajectory], rows: Rollout) -> None:
    failed = [False] * len(trajectories) if rows.failed is None else rows.failed.tolist()
    columns = (rows.tokens, rows.rollout_logprobs, rows.prompt_lengths, rows.lengths, rows.finished)
    for trajectory, no_answer, *row in zip(trajectories, failed, *(column.tolist() for column in columns), strict=True):
        token_ids, logprobs, first, end, finished = row
        trajectory.add(token_ids[first:end], logprobs[first:end], finished=finished)
        if no_answer:
            trajectory.end = "error"


def _rows(trajectories: Sequence[Trajectory], *, version: int, failed: Tensor | None) -> Rollout:
    """Return one row for each trajectory, prompt and response, right-padded; a failed one has no response."""
    # Tokens that were given after the last turn are left out.
    last = [max((place + 1 for place, own in enumerate(each.sampled) if own), default=0) for each in trajectories]
    ends = [0 if each.end == "error" else end for each, end in zip(trajectories, last, strict=True)]
    prompts = torch.tensor([len(each.prompt.token_ids) for each in trajectories], dtype=torch.int64)
    lengths = prompts + torch.tensor(ends, dtype=torch.int64)
    width = int(lengths.max()) if len(lengths) else 0
    tokens = torch.zeros(len(ends), width, dtype=torch.int64)
    mask, logprobs = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.float32)
    for row, (each, first, end) in enumerate(zip(trajectories, prompts.tolist(), ends, strict=True)):
        tokens[row, : first + end] = torch.tensor([*each.prompt.token_ids, *each.token_ids[:end]])
        mask[row, first : first + end] = torch.tensor(each.sampled[:end], dtype=torch.bool)
        logprobs[row, first : first + end] = torch.tensor(each.logprobs[:end])
    return Rollout.from_rows(
        tokens,
        prompt_lengths=prompts,
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        finished=torch.tensor([each.finished for each in trajectories], dtype=torch.bool),
        prompt_index=torch.tensor([each.prompt_index for each in trajectories], dtype=torch.int64),
        sample_index=torch.tensor([each.sample_index for each in trajectories], dtype=torch.int64),
        weight_version=torch.full_like(lengths, version),
        failed=failed,
    )


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
        form = _wrong_form(rollout, prompts=len(share(len(prompts), self.context.data_parallel)), n=n)
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
        failed = torch.zeros_like(rollout.finished) if rollout.failed is None else rollout.failed
        tokens = torch.where(places < end, rollout.tokens, 0)
        faults = {
            f"has no prompt, or one of more than data.max_prompt_tokens={self.max_prompt_tokens} tokens": (first < 1)
            | (first > self.max_prompt_tokens),
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
        for fault, broken in faults.items():
            if broken.any():
                row = int(broken.reshape(len(broken), -1).any(dim=1).nonzero()[0])
                place = f"prompt {int(rollout.prompt_index[row])} and sample {int(rollout.sample_index[row])}"
                return f"row {row}, {place}, {fault}"
        return ""


def _wrong_form(rollout: object, *, prompts: int, n: int) -> str:
    if not isinstance(rollout, Rollout):
        return f"generate() returned {type(rollout).__name__}, not a Rollout"
    rows, width = prompts * n, rollout.tokens.shape[-1]
    columns = {"tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32}
    numbers = ("prompt_lengths", "lengths", "prompt_index", "sample_index", "weight_version")
    columns |= {"finished": torch.bool, **dict.fromkeys(numbers, torch.int64)}
    columns |= {} if rollout.failed is None else {"failed": torch.bool}
    for place, (name, dtype) in enumerate(columns.items()):
        column, shape = getattr(rollout, name), [rows, width][: 2 if place < 3 else 1]
        if list(column.shape) != shape or column.dtype != dtype:
            return (
                f"{name} has shape {list(column.shape)} and type {column.dtype}; legal: {shape} and {dtype}, {n} "
                f"samples of each of the replica's {prompts} prompts"
            )
    return ""
