"""Folders of runs with planted metrics, settings, samples and records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from mega_rl.tracking.metrics.records import encode_step
from mega_rl.tracking.records.reader import RecordDescription, Shard, to_json

HOSTILE = '<script>alert(1)</script><img src=x onerror="console.error(1)"></script><!--<b>bold</b>'

Curve = Callable[[int], float]
HEALTHY: Mapping[str, Curve] = {
    "reward/mean": lambda step: 1 - math.exp(-step / 20),
    "reward/equal_groups_fraction": lambda step: 0.3,
    "rollout/response_tokens_mean": lambda step: 20 + step % 3,
    "rollout/truncated_fraction": lambda step: 0.02,
    "rollout/logprob_diff_max": lambda step: 1e-5 * (1 + step % 4),
    "rollout/logprob_diff_mean": lambda step: 1e-6,
    "rollout/repeated_fraction": lambda step: 0.01,
    "importance/effective_fraction": lambda step: 0.99,
    "actor/entropy": lambda step: 1.0 + math.exp(-step / 30),
    "actor/grad_norm": lambda step: 1.0 + 0.5 * (step % 5),
    "actor/clip_fraction_high": lambda step: 0.02,
    "actor/ppo_kl": lambda step: 1e-3,
    "actor/ratio_mean": lambda step: 1.0,
    "actor/skipped_steps": lambda step: 0.0,
    "actor/grad_clipped_fraction": lambda step: 0.2,
    "kl/ref": lambda step: 0.1 * (1 - math.exp(-step / 10)),
    "values/explained_variance": lambda step: 0.4,
    "time/step_s": lambda step: 3.0 + step % 2,
    "time/generate_s": lambda step: 2.0,
    "time/update_actor_s": lambda step: 0.5 + step % 2,
    "memory/host_bytes": lambda step: 4e9,
}


def plant(
    folder: Path, *, steps: int = 60, curves: Mapping[str, Curve] = HEALTHY, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write metrics and config of a run and return its folder; settings: sections that replace the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [encode_step(step, {name: curve(step) for name, curve in curves.items()}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    usual = {"trainer": {"seed": 0, "run_dir": str(folder)}, "optim": {"lr": 1e-6}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**usual, **(settings or {})}))
    return folder


def dump(
    folder: Path, name: str = "step_000020.jsonl", *, response: str = HOSTILE, count: int = 1, **more: object
) -> None:
    """Write a dump of rollouts."""
    row = {
        "step": 20,
        "prompt": "1+1=",
        "rendered_prompt": f"<|user|>{HOSTILE}",
        "response": response,
        "answer": HOSTILE,
    }
    numbers = {"prompt_tokens": 6, "response_tokens": 4, "reward": 0.5, "reward_correct": 1.0, "finished": True}
    (folder / "rollouts").mkdir(exist_ok=True)
    (folder / "rollouts" / name).write_text(
        "".join(f"{json.dumps({**row, **numbers, **more})}\n" for _ in range(count))
    )


def record(
    folder: Path, step: int = 20, *, rows: int = 2, length: int = 12, with_entropy: bool = False,
    turns: Sequence[int] = (),
) -> Path:  # fmt: skip
    """Write a record of a step whose tokens have advantages, log-probs and values; returns its folder.

    turns: turn of each token, for the conversation of an agent whose first turn another row trains.
    """
    place = folder / "records" / f"step_{step:06d}"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    mask = np.zeros((rows, length + 3), dtype=bool)
    mask[:, 4:length] = True
    if turns:
        mask[:, :length] = np.array(turns) > 1
    old = np.where(mask, -rng.exponential(0.5, mask.shape), 0).astype(np.float32)
    columns = {
        "prompt_index": np.arange(rows), "sample_index": np.zeros(rows, dtype=np.int64),
        "loss_mask": mask, "lengths": np.full(rows, length), "old_logprobs": old,
        "rollout_logprobs": np.where(mask, old + rng.normal(0, 0.01, mask.shape), 0).astype(np.float32),
        "ref_logprobs": np.where(mask, old - 0.1, 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(0, 1, mask.shape), 0).astype(np.float32),
    }  # fmt: skip
    if turns:
        columns["turn"] = np.tile(np.array([*turns, 0, 0, 0], dtype=np.int16), (rows, 1))
    if with_entropy:
        columns["entropy"] = np.where(mask, 0.75, 0).astype(np.float32)
    save_file(columns, place / "replica_00000.safetensors")
    texts = ["<|user|>", "1", "+1", "=", HOSTILE, "\n", " so", " the", " answer", " is", " 2", "<|end|>"]
    line = {"step": step, "prompt": "1+1=", "response": "2", "reward": 1.0, "token_texts": (texts * length)[:length]}
    keys = [{"prompt_index": row, "sample_index": 0} for row in range(rows)]
    (place / "replica_00000.jsonl").write_text("".join(f"{json.dumps({**key, **line})}\n" for key in keys))
    description = RecordDescription(
        step=step, prompts=rows, kl_coef=0.0, reward_parts=(), reward_weights=(), config={}, model={}, weights=(),
        layout="", world_size=1, device="cpu", dtype="fp32", versions={},
    )  # fmt: skip
    shards = [shard(place / f"replica_00000.{ending}", rows) for ending in ("safetensors", "jsonl")]
    content = to_json(description, shards, {name: str(column.dtype) for name, column in columns.items()})
    (place / "record.json").write_text(json.dumps(content))
    return place


def shard(path: Path, rows: int) -> Shard:
    data = path.read_bytes()
    return Shard(path.name, len(data), hashlib.sha256(data).hexdigest(), rows)
