"""Files of a recorded run: the batch of each step, the real trainer's figures of each update."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mega_rl.verify.rl.independent.records import Figures, ScoredSample, StepBatch

GRADIENT, WEIGHT, TOKENS = "gradient/", "weight/", "tokens/"
GREEDY = "greedy"  # kind of samples
PART = "part/"  # before the name of a part of the rewards
FACTS = ("role", "step", "update", "loss", "grad_norm")  # numbers of an update next to its tensors
ROWS = ("tokens", "prompt_lengths", "lengths", "prompt_index", "sample_index", "rollout_logprobs", "rewards")


def write_rows(folder: Path, step: int, rows: dict[str, Tensor], *, kind: str = "") -> None:
    """Write the samples that a step trains on, or those of a kind: `GREEDY`, `drawn`.

    rows: the tensors of `ROWS`, in any order of rows, and perhaps, after `PART`, parts of the rewards. A
    run that has no reward has no "rewards".
    """
    tensors = {name: rows[name].contiguous() for name in rows if name in ROWS or name.startswith(PART)}
    save_file(tensors, _rows_path(folder, step, kind))


def drawn(generation: int) -> str:
    """Return the kind of a dynamic sampling's generation, which counts from 0 in its step."""
    return f"drawn{generation}"


def write_update(folder: Path, number: int, figures: Figures, prompts: list[int]) -> None:
    """Write an update of the real trainer and its prompts; `number` counts the role's updates."""
    tensors = {WEIGHT + name: tensor for name, tensor in figures.weights.items()}
    tensors |= {GRADIENT + name: tensor for name, tensor in figures.gradients.items()}
    tensors |= {TOKENS + name: tensor for name, tensor in figures.tokens.items()}
    facts = {name: getattr(figures, name) for name in FACTS} | {"prompts": prompts}
    path = _update_path(folder, figures.role, number)
    save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


def read_batch(folder: Path, step: int) -> StepBatch:
    """Return a step's samples, by prompt and sample number, mini-batches, generations and greedy samples."""
    updates: dict[str, list[list[int]]] = {}
    for facts in _facts(folder):
        if facts["step"] == step:
            updates.setdefault(facts["role"], []).append(facts["prompts"])
    generations = itertools.takewhile(
        Path.exists, (_rows_path(folder, step, drawn(number)) for number in itertools.count())
    )
    greedy = _rows_path(folder, step, GREEDY)
    return StepBatch(
        _samples(_rows_path(folder, step)),
        max(updates.values(), key=len, default=[]),
        generations=[_samples(path) for path in generations],
        greedy=_samples(greedy) if greedy.exists() else (),
    )


def _samples(path: Path) -> list[ScoredSample]:
    """Return the samples of a file, by prompt and sample number."""
    rows = load_file(path)
    parts = {name.removeprefix(PART): rows[name].tolist() for name in rows if name.startswith(PART)}
    samples = []
    for i in by_sample(rows["prompt_index"], rows["sample_index"]).tolist():
        start, end = int(rows["prompt_lengths"][i]), int(rows["lengths"][i])
        samples.append(
            ScoredSample(
                tokens=rows["tokens"][i, :end].tolist(),
                prompt_length=start,
                prompt=int(rows["prompt_index"][i]),
                reward=float(rows["rewards"][i]) if "rewards" in rows else math.nan,
                rollout_logprobs=rows["rollout_logprobs"][i, start:end].tolist(),
                parts={name: column[i] for name, column in parts.items()},
            )
        )
    return samples


def num_updates(folder: Path) -> dict[str, int]:
    """Return the number of updates of each role."""
    return dict(Counter(facts["role"] for facts in _facts(folder)))


def read_figures(folder: Path, role: str, number: int) -> Figures | None:
    """Return the figures of update `number` of a role, None where the real trainer made none."""
    path = _update_path(folder, role, number).with_suffix(".json")
    if not path.exists():
        return None
    facts, tensors = json.loads(path.read_text("utf-8")), load_file(path.with_suffix(".safetensors"))

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return Figures(
        **{name: facts[name] for name in FACTS},
        tokens=below(TOKENS),
        loss_scale=0.0,
        gradients=below(GRADIENT),
        weights=below(WEIGHT),
    )


def by_sample(prompt_index: Tensor, sample_index: Tensor) -> Tensor:
    """Return the order of rows by prompt and sample number; both [B] int64."""
    return torch.argsort(prompt_index * (int(sample_index.max()) + 1) + sample_index)


def _rows_path(folder: Path, step: int, kind: str = "") -> Path:
    """Return the file of a step's samples of a kind."""
    return folder / f"step{step}{kind and '_'}{kind}.safetensors"


def _update_path(folder: Path, role: str, number: int) -> Path:
    return folder / f"{role}_{number:04d}"


def _facts(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of all updates, in the order of those of each role."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*_*.json"))]
