"""An evaluation without training: samples of a checkpoint's policy, their rewards, and files of both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mega_rl import __version__
from mega_rl.config.keys import as_record
from mega_rl.config.schema import Config
from mega_rl.data.build import PromptReader
from mega_rl.disk import rename, replace_text
from mega_rl.environment import installed_version
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.agreement import run_on_one
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.tracking import progress
from mega_rl.tracking.health.guard import Investigate, guarded, stop_on_signals
from mega_rl.trainer.assemble.data import agreed_fingerprint, load_data
from mega_rl.trainer.assemble.load import build_evaluation, load_run, read_inputs
from mega_rl.trainer.assemble.run import heartbeat_of, session
from mega_rl.trainer.rows import ReadResponse, first_rows, scored_rows
from mega_rl.trainer.validation import ScoredSamples, SetOutcome
from mega_rl.types import ENDS, JsonObject, Metrics, over_trajectory

UNFINISHED = "samples.jsonl.part"
FINISHES = {"done": "stop", "length": "length", "turns": "turns", "error": "failed"}  # words of a sample for its end


def evaluate(config: Config, accelerator: Accelerator, investigate: Investigate | None = None) -> JsonObject:
    """Evaluate as `config.validation` says on every rank of this job; return the results.

    Rank 0 writes samples.jsonl, one row a sample, as they come, and results.json into trainer.run_dir. A rank that
    fails or hangs ends all, with its cause, as in training. Raises StoppedBySignal after SIGTERM, SIGUSR1 or Ctrl-C.
    """
    with (
        heartbeat_of(config.trainer, accelerator) as heartbeat,
        stop_on_signals(),
        guarded(heartbeat, investigate),
        session(config, accelerator) as groups,
        ExitStack() as resources,
        # Says the cause before servers and groups are taken down, which a peer that is gone may hold up.
        guarded(heartbeat, investigate),
    ):
        results = _results(config, *_run(config, accelerator, groups, resources))
        run_on_one(partial(_finish, Path(config.trainer.run_dir), results), ranks_of(groups.host_world))
    return results


def _run(
    config: Config, accelerator: Accelerator, groups: Groups, resources: ExitStack
) -> tuple[list[SetOutcome], dict[str, Metrics]]:
    """Return the outcome on each set, and an environment's numbers on it; collective."""
    world, folder, count = ranks_of(groups.host_world), Path(config.trainer.run_dir), 0
    inputs = read_inputs(config, accelerator, world, resources, trains=False)
    data, tokens, seed = config.data, inputs.tokens, config.trainer.seed
    columns = inputs.rewards.columns(data.answer_key, data.source_key)
    reader = PromptReader(data, tokens.tokenizer, inputs.plan.models["actor"].hf.vocab_size, columns)
    _, sets = load_data(reader, config.validation.sets, tokens, seed=seed, trains=False)
    run_on_one(partial(inputs.rewards.check, [], sets, source_key=data.source_key), world)
    agreed_fingerprint([], sets, world)
    run = load_run(inputs, config.rollout, config.trainer, accelerator, groups, resources)
    evaluation = build_evaluation(run, config.validation, sets, run.rollouts.devices.enter)
    run.rollouts.devices.publish(run.rollouts.sync)
    sizes = {one.name: len(one.prompts) for one in sets}
    agents: dict[str, Metrics] = {name: {} for name in sizes}

    def each(scored: ScoredSamples) -> None:
        nonlocal count
        parts = run.replicas.gather_json(list(sample_rows(scored, evaluation.read)))
        rows = sorted((r for part in parts for r in part), key=lambda row: (row["prompt_index"], row["sample_index"]))
        run_on_one(partial(_append, folder, rows, mode="a" if count else "w"), world)
        count += len(rows)
        own, share = agents[scored.name], len(scored.prompts) / sizes[scored.name]
        for name, value in run.rollouts.source.metrics().items():
            if name.startswith("agent/"):
                own[name] = own.get(name, 0.0) + value * (1.0 if "failed" in name else share)
        progress.report(count // evaluation.settings.n, sum(sizes.values()), unit="prompts")

    with progress.phase("evaluating"):
        return evaluation.run(0, each=each), agents


def _append(folder: Path, rows: Sequence[JsonObject], *, mode: str) -> None:
    """Write the samples of the next prompts, by prompt and sample."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / UNFINISHED).open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _finish(folder: Path, results: JsonObject) -> None:
    """Name the complete samples and write results.json."""
    rename(folder / UNFINISHED, folder / "samples.jsonl")
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    replace_text(folder / "results.json", text)


def sample_rows(scored: ScoredSamples, read: ReadResponse) -> Iterator[dict[str, Any]]:
    """Yield one row for each sample of this replica."""
    rollout, rewards, parts = scored.rollout, scored.rewards, scored.rewards.parts
    answered = [True] * len(rollout.lengths) if rollout.failed is None else (~rollout.failed).tolist()
    has_score = scored_rows(rollout, rewards).tolist()
    tokens = over_trajectory(rollout.loss_mask.sum(dim=1), rollout.branch)
    rows = over_trajectory(rollout.lengths - rollout.prompt_lengths * first_rows(rollout), rollout.branch)
    for row in first_rows(rollout).nonzero().flatten().tolist():
        number = int(rollout.prompt_index[row])
        prompt = scored.prompts[number]
        named = {} if parts is None else dict(zip(parts.names, parts.values[row].tolist(), strict=True))
        yield {
            "set": scored.name,
            "prompt_index": scored.first + number,
            "sample_index": int(rollout.sample_index[row]),
            "row": prompt.index,
            "prompt": prompt.text,
            "messages": [{"role": role, "content": content} for role, content in prompt.messages] or None,
            "response": read(rollout, row)[1],
            "reference": prompt.answer,
            "answer": scored.votes[row] if scored.votes else None,
            "reward": float(rewards.totals[row]) if rewards.scored and has_score[row] else None,
            "parts": {name: value for name, value in named.items() if has_score[row] and not math.isnan(value)},
            "right": scored.right[row] if scored.right else None,
            "finish": FINISHES[ENDS[int(rollout.end[row])]] if answered[row] else "failed",
            "response_tokens": int(tokens[row]),
            "given_tokens": int(rows[row] - tokens[row]),  # read after the prompt
        }


def _results(config: Config, outcomes: Sequence[SetOutcome], agents: Mapping[str, Metrics]) -> JsonObject:
    sets = {}
    for outcome in outcomes:
        edges = {f"val/{name}{edge}" for name in outcome.estimates for edge in ("", "_low", "_high")}
        means = {name.removeprefix("val/"): outcome.metrics[name] for name in outcome.metrics if name not in edges}
        sets[outcome.prompts.name] = {
            "prompts": len(outcome.prompts.prompts),
            "means": means | agents[outcome.prompts.name],
            "estimates": {name: asdict(estimate) for name, estimate in outcome.estimates.items()},
        }
    names = ("torch", "transformers", "megatron-core", "sglang")
    versions = {"mega-rl": __version__} | {name: installed_version(name) for name in names}
    return {"sets": sets, "seed": config.trainer.seed, "versions": versions, "config": as_record(config)}
