"""Runs with a user's own sources of rollouts and data, one after the other on each rank of a launch."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.keys import with_settings
from mega_rl.errors import RunError, UserError
from tests.helpers.loops import engines_of, watch_source
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS = 2
SOURCES = r'''
"""Sources of rollouts and of data, as a user writes them."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import mega_rl
from reward import share_of_odd_digits

SCORED = Path(f"{__file__}.scored-{os.getpid()}")  # a line for each response that this process has scored


@dataclass
class Turns(mega_rl.Environment):
    """Turns of the policy, and between them a tool that answers with the number of tokens so far."""

    context: mega_rl.RolloutContext
    turns: int = 2
    forks: bool = False
    first: int = 0  # most tokens of the first turn
    scores: bool = False

    async def run(self, policy, prompt, trajectory):
        if self.scores:
            trajectory.score = (prompt.index + trajectory.sample_index) % 3 / 2
        await policy.turn(limit=self.first)
        if self.scores:
            trajectory.turns[0].score = sum(trajectory.turns[0].token_ids) % 5 / 4
        for turn in range(1, self.turns):
            await asyncio.sleep(0.002 * (trajectory.prompt_index % 3))
            if self.forks and turn == 1 and trajectory.sample_index % 2:
                trajectory.fork(trajectory.branch, 1)
            words = str(len(trajectory.branch.token_ids) - len(prompt.token_ids))
            trajectory.give(self.context.tokenizer(words, add_special_tokens=False)["input_ids"])
            await policy.turn()


@dataclass
class Patient(Turns):
    """A prompt's first sample ends when another one has been scored."""

    async def run(self, policy, prompt, trajectory):
        await super().run(policy, prompt, trajectory)
        while not (trajectory.sample_index or SCORED.exists()):
            await asyncio.sleep(0.01)


async def odd_digits(prompt, response, answer):
    with SCORED.open("a") as file:
        file.write("1\n")
    return share_of_odd_digits(prompt, response, answer)


@dataclass
class Scored(mega_rl.Environment):
    """One turn, which the environment scores as the reward function does."""

    context: mega_rl.RolloutContext

    async def run(self, policy, prompt, trajectory):
        turn = await policy.turn()
        assert prompt.row["answer"] == prompt.answer
        stops = self.context.sampling.stop_token_ids
        text = self.context.tokenizer.decode([token for token in turn.token_ids if token not in stops])
        digits = [int(c) for c in text if c.isdigit()]
        trajectory.score = sum(d % 2 for d in digits) / max(len(digits), 1) + 0.1 * len(text)


@dataclass
class Hostile(mega_rl.Environment):
    """Trajectories that hang, crash, answer garbage or megabytes, block, or let no cancellation through."""

    context: mega_rl.RolloutContext

    async def run(self, policy, prompt, trajectory):
        turn = await policy.turn(limit=2)
        kind = (prompt.index + trajectory.sample_index) % 4
        if kind == 0:
            await asyncio.sleep(60)
        if kind == 1:
            trajectory.give([3] * (1 << 20))
        if kind == 2:
            raise ValueError("a tool broke")
        await policy.turn()


@dataclass
class Recorded:
    """Responses that something else wrote, counted on from a checkpoint; the weights that come by are kept."""

    context: mega_rl.RolloutContext

    def __post_init__(self):
        self.calls = 0
        self.weights = {}

    def receive_weights(self, weights, *, version):
        self.weights = {name: tensor.sum().item() for name, tensor in weights}
        self.version = version

    def generate(self, prompts, *, step, greedy=False):
        self.calls += 1
        trajectories = self.context.start(prompts, greedy=greedy)
        for each in trajectories:
            number = (self.calls + each.sample_index + each.prompt.index) % 10
            tokens = self.context.tokenizer(f"{number}{number}", add_special_tokens=False)["input_ids"]
            each.add(tokens, [-1.5] * len(tokens), stopped=False)
        return self.context.rollout(trajectories)

    def metrics(self):
        return {"replay/calls": self.calls}

    def state(self):
        return {"calls": torch.tensor(self.calls)}

    def restore(self, tensors):
        self.calls = int(tensors["calls"])


@dataclass(frozen=True)
class Sums:
    context: mega_rl.DataContext
    start: int = 0
    has_validation = True

    def __iter__(self):
        step = 9 if self.context.split == "train" else 30
        for a in range(self.start, 10):
            for b in range(0, 100, step):
                yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def of_ranks(context):
    yield {"prompt": "1+1=", "answer": os.environ.get("RANK", "0")}
'''


def run(config: Any, accelerator: Any) -> dict[str, Any]:
    """Rows of every step and validation, metrics, and what the source keeps; or the error that ends the run."""
    from mega_rl.trainer.assemble import build_trainer, session

    kept: list[tuple[Any, ...]] = []
    with session(config, accelerator) as groups, ExitStack() as resources:
        try:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            ranks = trainer.batches.ranks

            def keep(rollout: Any) -> None:
                every = ranks.gather_rows(rollout)
                kept.append((every.tokens, every.loss_mask, every.rollout_logprobs, every.finished))

            own = trainer.batches.source
            while hasattr(own, "source"):  # below what the run has put around it
                own = own.source
            watch_source(trainer, keep)
            trainer.fit()
        except (UserError, RunError) as error:
            return {"error": f"{type(error).__name__} {error.exit_code}: {error}"}
        exported = {name: tensor.sum().item() for name, tensor in engines_of(trainer)["actor"].export_weights()}
    lines = (Path(config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    received = getattr(own, "weights", None)
    return {"rows": kept, "metrics": [json.loads(line) for line in lines], "received": received, "exported": exported}


def run_all(rank: int, folder: str, layout: str, runs: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Outcomes by name of runs with these settings on a layout; a second run of a name goes on from the first."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    torch.set_num_threads(1)
    outcomes = {}
    for name, settings in runs:
        config = run_config(Path(folder), layout, "grpo")
        run_dir = str(Path(folder) / f"own-{layout}-{settings.pop('run', name)}")
        config = with_settings(config, {"trainer.run_dir": run_dir, "trainer.steps": STEPS, **settings})
        outcomes[name] = run(config, accelerator)
    return outcomes
