"""Runs of a learning task with the project's trainer, one after the other in this process."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from mega_rl import api
from mega_rl.protocols import RolloutSource, TokenModel
from mega_rl.rollout.embedded import HFRolloutEngine
from mega_rl.tracking.health.guard import StoppedBySignal
from mega_rl.tracking.metrics.sinks import MultiSink, NullSink
from mega_rl.tracking.progress.terminal import standard_error
from mega_rl.trainer.collect import Collector
from mega_rl.trainer.policy_gradient import PolicyGradient
from mega_rl.types import Metrics, Rollout
from mega_rl.verify.learn.tasks import Curve, LearningTask, Variant
from mega_rl.verify.rl.inputs import UNSEEN
from mega_rl.verify.tiny_models import fresh_qwen3, write_tokenizer
from mega_rl.workers.rollout import RolloutWorker

log = logging.getLogger(__name__)

# Settings of every task: a small model in fp32.
SHARED: Mapping[str, object] = {
    "model.dtype": "fp32",
    "model.attn_implementation": "sdpa",
    **UNSEEN,
    "data.max_prompt_tokens": 8,
    "rollout.hf.batch_size": 4096,
}


@dataclass
class CurveRecorder(NullSink):
    """Sink of metrics that measures the trainer after every step."""

    probe: Callable[[int, Metrics], float | None]  # (steps done, metrics) -> value of the curve; None: no point there
    points: list[tuple[int, float]] = field(default_factory=list)

    def log(self, step: int, metrics: Metrics) -> None:
        value = self.probe(step, metrics)
        if value is not None:
            self.points.append((step, value))


def build_probe(task: LearningTask, models: PolicyGradient) -> Callable[[int, Metrics], float | None]:
    """Return the task's measure of a trainer's models."""
    measure = task.measure
    if measure.metric:
        return lambda step, metrics: metrics.get(measure.metric)
    rows, rewards = enumerate_responses(task, length=measure.length)

    def value() -> float:
        if measure.beta:
            return closed_form_distance(models, rows, rewards, beta=measure.beta)
        return expected_reward(models, rows, rewards)

    return lambda step, metrics: None if step % measure.interval else value()


def run_variant(task: LearningTask, variant: Variant, *, seed: int) -> Curve:
    """Train a variant of a task with a seed of model, data order and sampling."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mega-rl-learn-") as name:
        folder = Path(name)
        write_model(folder / "model", task.vocabulary, stop=task.stop, seed=seed)
        for file, rows in {"train": task.prompts, "held_out": task.held_out}.items():
            lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
            (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = {
            **SHARED,
            **task.settings,
            **variant.settings,
            "model.path": str(folder / "model"),
            "data.train_files": [str(folder / "train.jsonl")],
            "data.val_files": [str(folder / "held_out.jsonl")] if task.held_out else [],
            "trainer.run_dir": str(folder / "run"),
            "trainer.seed": seed,
        }
        with api.Trainer(api.load_config(None, settings), reward=task.reward) as trainer:
            loop = trainer.loop
            if variant.noise:
                assert isinstance(loop.batches, Collector)
                mix_with_uniform(loop.batches.source, share=variant.noise)
            assert isinstance(loop.algorithm, PolicyGradient)
            recorder = CurveRecorder(build_probe(task, loop.algorithm))
            loop.log.sink = MultiSink([loop.log.sink, recorder])
            outcome = trainer.fit()
    if outcome.exit_code:
        raise StoppedBySignal(outcome.exit_code - 128)
    return Curve(seed, tuple(recorder.points), time.perf_counter() - started)


def run_task(task: LearningTask, variants: Sequence[Variant], *, seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Train variants of a task with each seed; return the curves by variant."""
    curves: dict[str, list[Curve]] = {}
    logger, console = logging.getLogger("mega_rl"), standard_error()
    before = logger.level
    for variant, seed in product(variants, seeds):
        try:
            logger.setLevel(logging.ERROR)  # a task has dozens of runs
            console.quiet = True  # for the table of each run's start
            curve = run_variant(task, variant, seed=seed)
        finally:
            console.quiet = False
            logger.setLevel(before)
        curves.setdefault(variant.name, []).append(curve)
        final = curve.final(task.final_points)
        log.info("%s, %s, seed %d: %.4g in %.0f s", task.name, variant.name, seed, final, curve.seconds)
    return curves


def write_model(folder: Path, vocabulary: str, *, stop: str, seed: int) -> None:
    """Write a random Qwen3 of two layers, and a tokenizer with one token per character."""
    end = vocabulary.index(stop) if stop else None
    model = fresh_qwen3(len(vocabulary), width=64, initializer_range=0.08, max_positions=64, eos=end, seed=seed)
    model.generation_config = GenerationConfig(eos_token_id=len(vocabulary) if end is None else end)
    model.save_pretrained(folder)
    write_tokenizer(folder, vocabulary, unknown=vocabulary[0], clean_up_tokenization_spaces=False)


def mix_with_uniform(source: RolloutSource, *, share: float) -> None:
    """Make the embedded engine draw a share of its tokens uniformly; log-probs are the mixture's."""
    assert isinstance(source, RolloutWorker)
    assert isinstance(source.engine, HFRolloutEngine)

    def mix(module: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        probabilities = logits.float().softmax(-1)
        return torch.log((1.0 - share) * probabilities + share / logits.size(-1))

    head = source.engine.model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(mix)


def enumerate_responses(task: LearningTask, *, length: int) -> tuple[Rollout, Tensor]:
    """Return every response of `length` tokens to every prompt as rows, and their rewards.

    Rewards are [prompts, responses] float64. Prompts have one length.
    """
    responses = ["".join(characters) for characters in product(task.vocabulary, repeat=length)]
    ids = {character: i for i, character in enumerate(task.vocabulary)}
    tokens = torch.tensor([[ids[c] for c in prompt + response] for prompt, _ in task.prompts for response in responses])
    lengths = torch.full((len(tokens),), tokens.size(1))
    rows = Rollout.from_rows(tokens, prompt_lengths=lengths - length, lengths=lengths)
    rewards = [
        [task.reward(prompt, response, *filter(None, [answer])) for response in responses]
        for prompt, answer in task.prompts
    ]
    return rows, torch.tensor(rewards, dtype=torch.float64)


def closed_form_distance(models: PolicyGradient, rows: Rollout, rewards: Tensor, *, beta: float) -> float:
    """Return KL(pi || pi*) in nats, the mean over prompts (arXiv:2205.11275, eq. 4)."""
    assert models.reference is not None, "the closed form is relative to a reference"
    policy, reference = (_logprobs(model, rows).view_as(rewards) for model in (models.actor, models.reference))
    optimum = (reference + rewards / beta).log_softmax(-1)
    return float((policy.exp() * (policy - optimum)).sum(-1).mean())


def expected_reward(models: PolicyGradient, rows: Rollout, rewards: Tensor) -> float:
    """Return the actor's expected reward, the mean over prompts; rows, rewards: from `enumerate_responses`."""
    policy = _logprobs(models.actor, rows).view_as(rewards)
    return float((policy.exp() * rewards).sum(-1).mean())


def _logprobs(model: TokenModel, rows: Rollout) -> Tensor:
    """Return the log-prob of every row's response, [B] float64."""
    logprobs = model.evaluate(rows).logprobs
    assert logprobs is not None
    return logprobs.double().sum(-1)
