"""Dynamic sampling on each rank of a launch: with a source and scorer of numbers, and in runs of the whole trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mega_rl.config.schema import Config
from mega_rl.config.schema.data import MixtureConfig
from mega_rl.data.order import PromptSampler
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks
from mega_rl.trainer.collect import Collector, SamplingPlan
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.selection import AtOnce, Stock
from mega_rl.types import Metrics, Prompt, RewardParts, Rewards, Rollout
from tests.helpers.engines import exported, replaced
from tests.helpers.fakes import FakeSink, FakeTimer
from tests.helpers.loops import watch_batches
from tests.unit_tests.distributed.test_layout_invariance import run_config

SAMPLES = 3
WEIGHTS = {"few": 2.0, "many": 1.0}  # of the files of a run: the few end an epoch while the many go on
PLAN = SamplingPlan(SAMPLES, waves=3, prompts_per_step=4, prompts=5)
PROMPTS = [Prompt(index=i, token_ids=(7, i), text=f"p{i}", answer="") for i in range(11)]
MACHINE = ("time/", "perf/", "memory/", "checkpoint/")  # metrics that tell of it rather than of training
STEPS, SAVED = 4, 2
REWARD = '''
def half_are_hopeless(prompt, response, answer):
    """Nothing for prompts with an even answer, whatever the response; else the number of different characters."""
    return 0.0 if int(answer) % 2 == 0 else float(len(set(response)) % 3)
'''


def response(seed: int, position: int, sample: int) -> list[int]:
    """Tokens of one sample, of 1 to 6, as a function of the generation's seed and its place."""
    length = 1 + (3 * seed + position + 2 * sample) % 6
    return [1 + (seed + 5 * position + 7 * sample + place) % 9 for place in range(length)]


def score(prompt: Prompt, tokens: Sequence[int]) -> float:
    """Return nothing for every third prompt, so that its samples are equal."""
    return 0.0 if prompt.index % 3 == 0 else float(sum(tokens) % 4)


class NumberSource:
    """Rollout source and scorer; fails the first sample of every seventh generation seed if asked to."""

    def __init__(self, ranks: Ranks, *, failing: bool = False) -> None:
        self.ranks = ranks
        self.failing = failing

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        places = [(position, sample) for position in share(len(prompts), self.ranks) for sample in range(SAMPLES)]
        failed = [self.failing and step % 7 == 0 and sample == 0 for _, sample in places]
        responses = [[] if fails else response(step, *place) for fails, place in zip(failed, places, strict=True)]
        tokens = torch.zeros(len(places), 2 + max(map(len, responses)), dtype=torch.int64)
        for row, ((position, _), sampled) in enumerate(zip(places, responses, strict=True)):
            tokens[row, : 2 + len(sampled)] = torch.tensor([*prompts[position].token_ids, *sampled])
        return Rollout.from_rows(
            tokens,
            prompt_lengths=torch.full((len(places),), 2),
            lengths=torch.tensor([2 + len(sampled) for sampled in responses]),
            rollout_logprobs=-0.1 * tokens.float() * (torch.arange(tokens.size(1)) >= 2),
            prompt_index=torch.tensor([position for position, _ in places]),
            sample_index=torch.tensor([sample for _, sample in places]),
            failed=torch.tensor(failed) if any(failed) else None,
        )

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        rows = zip(rollout.tokens.tolist(), rollout.lengths.tolist(), rollout.prompt_index.tolist(), strict=True)
        totals = torch.tensor([score(prompts[index], ids[2:length]) for ids, length, index in rows])
        columns = torch.stack([totals - rollout.lengths, rollout.lengths.float(), rollout.sample_index % 2], dim=1)
        return Rewards(totals, RewardParts(("most", "length", "odd"), (1.0, 1.0, 0.0), columns))

    def metrics(self) -> Metrics:
        return {}


def collector(ranks: Ranks, plan: SamplingPlan = PLAN, *, failing: bool = False) -> Collector:
    """Return dynamic sampling over numbers."""
    source, timer = NumberSource(ranks, failing=failing), FakeTimer()
    order = PromptSampler(PROMPTS, batch_size=plan.prompts_per_step, shuffle=True, seed=3)
    log, stock = StepLog(FakeSink(), timer), Stock(AtOnce(source))
    return Collector(order, source, source, plan, ranks, Stages(timer), log, stock=stock)


def sampled_steps(ranks: Ranks) -> list[dict[str, Any]]:
    """Prompts, this rank's rows and rewards, and metrics of some steps."""
    dynamic, steps = collector(ranks), []
    for step in range(4):
        dynamic.log.begin()
        batch = dynamic.take(step)
        prompts, rollout, rewards, tickets = batch.samples
        steps.append(
            {
                "prompts": [prompt.index for prompt in prompts],
                "tickets": tickets.tolist(),
                "dropped": list(map(list, batch.dropped)),
                "rollout": {name: field for name, field in rollout.items() if field is not None},
                "rewards": rewards.columns(),
                "metrics": dynamic.log.metrics,
            }
        )
    return steps


class Run(NamedTuple):
    """A run of STEPS steps that saves after SAVED, or one that goes on from there."""

    layout: str
    source: str = ""  # name of the run to resume from


def config_of(folder: Path, name: str, run: Run) -> Config:
    """GRPO in two updates a step; generations of three prompts of a mixture, which two ranks cannot share equally."""
    config = run_config(folder, run.layout, "grpo")
    sources = {name: {"files": [str(folder / f"{name}.jsonl")], "weight": weight} for name, weight in WEIGHTS.items()}
    config = replaced(config, "data", train_files=[], mixture=MixtureConfig(sources=sources))
    config = replaced(config, "reward", function=f"{folder / 'hopeless.py'}:half_are_hopeless")
    config = replaced(config, "rollout", n=SAMPLES, max_new_tokens=6)
    config = replaced(config, "rollout.dynamic_sampling", max_generations=5, prompts=3)
    config = replaced(
        config,
        "checkpoint",
        save_interval=0 if run.source else SAVED,
        save_final=False,
        resume=str(folder / run.source / "checkpoints" / f"step_{SAVED:06d}") if run.source else "auto",
    )
    sizes = {"steps": STEPS, "prompts_per_step": 4, "minibatch_size": 2}
    return replaced(config, "trainer", run_dir=str(folder / name), **sizes)


def on_ranks(rank: int, folder: str, runs: dict[str, Run]) -> dict[str, Any]:
    """Steps of numbers, and by name tokens, weights and metrics of runs of the whole trainer."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    results: dict[str, Any] = {name: one_run(Path(folder), name, run, accelerator) for name, run in runs.items()}
    return results | {"numbers": _numbers(Path(folder), accelerator)}


def _numbers(folder: Path, accelerator: Any) -> list[dict[str, Any]]:
    from mega_rl.trainer.assemble import session

    config = run_config(folder, "dp2", "grpo")
    with session(config, accelerator) as groups:
        from mega_rl.parallel.comm import GroupRanks

        return sampled_steps(GroupRanks(groups.host_world))


def one_run(folder: Path, name: str, run: Run, accelerator: Any) -> dict[str, Any]:
    from mega_rl.trainer.assemble import build_trainer, session

    config = config_of(folder, name, run)
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        tokens: list[torch.Tensor] = []
        ranks: Ranks = trainer.batches.ranks  # type: ignore[attr-defined]
        watch_batches(trainer, lambda batch: tokens.append(ranks.gather_rows(batch.rollout).tokens))
        trainer.fit()
        weights = exported(trainer.algorithm.actor.engine)  # type: ignore[attr-defined]
        return {"start": trainer.start, "tokens": tokens, "weights": weights}


def records(folder: Path, run: str) -> dict[int, dict[str, float]]:
    """The metrics of a run by step, without what tells of time and machine."""
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    parsed = [json.loads(line) for line in lines]
    return {
        record["step"]: {name: value for name, value in record.items() if not name.startswith(MACHINE)}
        for record in parsed
    }
