"""Settings of what a run writes: checkpoints and metrics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mega_rl.config.setting import setting


@dataclass(frozen=True)
class MemoryCheckpointConfig:
    """Checkpoints in the hosts' memory, between those on disk."""

    interval: int = setting(
        0, "Every N-th step's state goes to memory of two hosts (/dev/shm); 0: never.", unit="steps", min=0
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, retention, resuming."""

    save_interval: int = setting(0, "Save every N steps; 0: only when stopped and for save_final.", unit="steps", min=0)
    save_final: bool = setting(True, "Save after the last step.")
    async_save: bool = setting(False, "Copy the state to the host's memory and write it in the background.")
    on_error: str = setting("continue", "Continue or stop after a failed save.", choices=("continue", "stop"))
    timeout_s: float = setting(1800.0, "Longest that a save may take.", unit="seconds", min=1.0)
    keep: int = setting(2, "Newest checkpoints kept.", unit="checkpoints", min=1)
    keep_interval: int = setting(0, "Keep every checkpoint whose step is a multiple of this; 0: none.", min=0)
    keep_best: str = setting("", "Also keep the checkpoint with the largest value of this metric.")
    resume: str = setting("auto", "auto (newest in the run folder), never, or a checkpoint directory.")
    fallback: bool = setting(False, "If the newest checkpoint is damaged, resume from the newest whole one before it.")
    hf_interval: int = setting(
        0, "Write the actor in Hugging Face's format every N steps; 0: never.", unit="steps", min=0
    )
    hf_final: bool = setting(False, "Write the actor as a Hugging Face checkpoint after the last step.")
    memory: MemoryCheckpointConfig = dataclasses.field(default_factory=MemoryCheckpointConfig)


@dataclass(frozen=True)
class RecordsConfig:
    """Complete records of steps, which `mega-rl replay` computes again: docs/replay.md."""

    interval: int = setting(0, "Record every N-th step in records/ of the run folder; 0: never.", unit="steps", min=0)
    max_mib: int = setting(1024, "Limit of all records of a run: the oldest go first.", unit="MiB", min=1)
    entropy: bool = setting(False, "Also record each token's entropy, by one more forward if needed.")
    weights: bool = setting(False, "Also keep the weights before the step, so that a replay needs no checkpoint.")


@dataclass(frozen=True)
class MetricsConfig:
    """Sinks of metrics and rollouts besides metrics.jsonl."""

    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    trackers: list[str] = setting([], "Trackers that also get metrics.", choices=("wandb", "mlflow", "swanlab"))
    project: str = setting("mega_rl", "Project (MLflow: experiment) of the run in trackers.")
    run_name: str = setting("", "Name of the run in trackers; empty: its folder's.")
    progress_bar: bool = setting(True, "Show a live line on a terminal: step, phase, time left.")
    rollout_samples: int = setting(16, "Rollouts of the first prompts that are dumped as JSONL.", unit="samples", min=0)
    rollout_interval: int = setting(
        10, "Dump rollouts of the first, last and every N-th step; 0: none.", unit="steps", min=0
    )
    print_samples: int = setting(2, "Samples of the first dump shown on the console.", unit="samples", min=0)
    records: RecordsConfig = dataclasses.field(default_factory=RecordsConfig)
