"""Roles without models: a policy that is a table of numbers, so that the whole loop runs in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mega_rl.config.schema.data import ValidationConfig
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Inspect
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import Draws, Experience, Metrics, Prompt, PromptSet, RewardParts, Rewards, Rollout, TokenOutputs

LONGEST = 6  # tokens: two of prompt, four of response


FakeRanks = SingleRank


class FakePrompts:
    """The same four prompts in every step."""

    def batch(self, step: int) -> list[Prompt]:
        return [Prompt(index=i, token_ids=(2 + i, 1), text=f"p{i}", answer=str(i)) for i in range(4)]

    def drawn_after(self, done: int) -> int:
        return 4 * done

    def metrics(self, drawn: int) -> Metrics:
        return {"data/prompts": float(drawn)}

    def waits(self) -> Metrics:
        return {}


def held_out(prompts: Sequence[Prompt]) -> Callable[..., Evaluation]:
    """Return the maker of a greedy validation on these prompts, given the parts of a run."""
    return partial(Evaluation, [PromptSet("", prompts)] if prompts else [], ValidationConfig())


class FakePolicy:
    """Actor, rollout engine and weight sync in one: token v of the vocabulary has a logit that training moves.

    The rollout side uses `published`, a copy that only `publish` renews.
    """

    def __init__(self, events: list[str], *, vocab_size: int = 8, lr: float = 0.5) -> None:
        self.events = events
        self.logits = torch.zeros(vocab_size)
        self.published = self.logits.clone()
        self.weight_version = 0
        self.lr = lr

    def resume_at(self, version: int) -> None:
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        self.events.append("publish")
        self.published = self.logits.clone()
        self.weight_version += 1
        return {"rollout/weight_version": float(self.weight_version)}

    def metrics(self) -> Metrics:
        return {}

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        self.events.append("validate" if greedy or draws else "generate")
        count = draws.n if draws else 2 if not greedy else 1
        rows = len(prompts) * count
        generator = torch.Generator().manual_seed(step)
        tokens = torch.zeros(rows, LONGEST, dtype=torch.int64)
        tokens[:, :2] = torch.tensor([p.token_ids for p in prompts for _ in range(count)])
        drawn = torch.multinomial(self.published.softmax(0), rows * 4, replacement=True, generator=generator)
        tokens[:, 2:] = self.published.argmax() if greedy else drawn.view(rows, 4)
        mask = torch.zeros(rows, LONGEST, dtype=torch.bool)
        mask[:, 2:] = True
        return Rollout.from_rows(
            tokens,
            prompt_lengths=torch.full((rows,), 2),
            lengths=torch.full((rows,), LONGEST),
            rollout_logprobs=self.published.log_softmax(0)[tokens] * mask,
            prompt_index=torch.arange(len(prompts)).repeat_interleave(count),
            sample_index=torch.arange(count).repeat(len(prompts)),
            weight_version=torch.full((rows,), self.weight_version),
        )

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        self.events.append("old_logprobs")
        return TokenOutputs(logprobs=self.logits.log_softmax(0)[batch.tokens] * batch.loss_mask)

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        self.events.append("update_actor")
        inspected = {} if inspect is None else inspect(minibatch, self.evaluate(minibatch))
        logits = self.logits.clone().requires_grad_()
        logprobs = logits.log_softmax(0)[minibatch.tokens]
        loss = -(minibatch.loss_weights * minibatch.advantages * logprobs).sum()
        loss.backward()
        assert logits.grad is not None
        self.logits -= self.lr * logits.grad
        return {"actor/loss": float(loss.detach())} | inspected


class FakeCritic:
    """Predicts one number everywhere and moves it towards the mean return."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.value = 0.0

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        self.events.append("values")
        return TokenOutputs(values=self.value * batch.loss_mask.float())

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        self.events.append("update_critic")
        target = float((minibatch.token_weights * minibatch.returns).sum())
        self.value += 0.5 * (target - self.value)
        return {"critic/loss": (target - self.value) ** 2}


class FakeReward:
    """The share of response tokens that are number 5; with `parts` that of either half, and one of no weight."""

    def __init__(self, events: list[str], *, parts: bool = False) -> None:
        self.events = events
        self.parts = parts

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        self.events.append("reward")
        right = (rollout.tokens[:, 2:] == 5).float()
        if not self.parts:
            return Rewards(right.mean(dim=1))
        columns = torch.stack([right[:, :2].mean(dim=1), right[:, 2:].mean(dim=1), rollout.tokens[:, 2].float()], dim=1)
        return Rewards(right.mean(dim=1), RewardParts(("early", "late", "token"), (0.5, 0.5, 0.0), columns))

    def metrics(self) -> Metrics:
        return {}


class FakeTimer:
    """Takes no time; refuses nested phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.inside = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        self.phases.append(name)
        yield
        self.inside = False

    def reset(self) -> None:
        self.phases.clear()

    def metrics(self) -> Metrics:
        return {f"time/{name}_s": 0.0 for name in self.phases}


class FakeSink:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.records: dict[int, Metrics] = {}
        self.dumps: dict[int, Sequence[Mapping[str, Any]]] = {}
        self.val_dumps: dict[int, Sequence[Mapping[str, Any]]] = {}

    def log(self, step: int, metrics: Metrics) -> None:
        earlier = self.records.get(step, {})
        assert all(name.startswith("checkpoint/") for name in earlier.keys() & metrics.keys())
        self.records[step] = earlier | metrics

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        (self.val_dumps if validation else self.dumps)[step] = rows

    def close(self, *, failed: bool = False) -> None: ...


class FakeStore:
    """Keeps what is saved."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.saved: dict[int, Mapping[str, Any]] = {}

        self.finished = False
        self._saving = 0

    def save_in_memory(self, step: int, state: Mapping[str, Any]) -> None:
        self.events.append(f"save {step} in memory")

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Metrics | None = None) -> None:
        self.events.append("save")
        self.saved[step] = dict(state) | {"metrics": metrics}
        self._saving = step

    def poll(self) -> Metrics:
        step, self._saving = self._saving, 0
        return {"checkpoint/step": float(step)} if step else {}

    def finish(self) -> None:
        self.finished = True
