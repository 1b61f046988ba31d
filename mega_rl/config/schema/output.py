"""Settings of what a run writes: checkpoints and metrics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mega_rl.config.setting import setting


@dataclass(frozen=True)
class MemoryCheckpointConfig:
    """Checkpoints in the hosts' memory, between those on disk."""

    interval: int = setting(
        0,
        "Keep the state of every N-th step in the hosts' memory (/dev/shm), each host's on the next one too, so that a "
        "lost process costs at most N steps; 0: never.",
        unit="steps",
        min=0,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, retention, resuming."""

    save_interval: int = setting(
        0, "Save every N steps; 0 saves only when the run is told to stop and for save_final.", unit="steps", min=0
    )
    save_final: bool = setting(True, "Save after the last step.")
    async_save: bool = setting(
        False, "Copy the state to the host's memory and write it in the background, while training goes on."
    )
    on_error: str = setting(
        "continue",
        "After a save that failed (full disk, I/O error): continue training without it, or stop the run.",
        choices=("continue", "stop"),
    )
    timeout_s: float = setting(1800.0, "Longest that a save may take.", unit="seconds", min=1.0)
    keep: int = setting(2, "Newest checkpoints kept.", unit="checkpoints", min=1)
    keep_interval: int = setting(0, "Keep every checkpoint whose step is a multiple of this; 0: none.", min=0)
    keep_best: str = setting(
        "", "Also keep the checkpoint with the largest value of this metric, as val/reward_mean or val/gsm8k/pass_at_4."
    )
    resume: str = setting(
        "auto",
        "auto (newest in the run folder, if any), never, or a checkpoint directory. What an earlier run left in the "
        "folder and is not resumed is moved to its previous/.",
    )
    fallback: bool = setting(
        False, "When the newest checkpoint is damaged, resume from the newest one before it that is whole."
    )
    hf_interval: int = setting(
        0, "Write the actor as a Hugging Face checkpoint every N steps; 0: never.", unit="steps", min=0
    )
    hf_final: bool = setting(False, "Write the actor as a Hugging Face checkpoint after the last step.")
    memory: MemoryCheckpointConfig = dataclasses.field(default_factory=MemoryCheckpointConfig)


@dataclass(frozen=True)
class RecordsConfig:
    """Complete records of steps, which `mega-rl replay` computes again: docs/replay.md."""

    interval: int = setting(
        0,
        "Record every N-th step, from the first on, in records/ of the run folder: tokens, log-probs, values, "
        "advantages, rewards; 0: never.",
        unit="steps",
        min=0,
    )
    max_mib: int = setting(
        1024,
        "Most that the records of a run take together: the oldest go first, and a step that is larger alone is not "
        "recorded.",
        unit="MiB",
        min=1,
    )
    entropy: bool = setting(
        False,
        "Also record the entropy of the distribution that predicts each token, by one forward of the policy more; "
        "where old log-probs are the sampler's recording makes that forward anyway, and has it.",
    )
    weights: bool = setting(
        False,
        "Also keep the weights that the step began with in each record, so that it needs no checkpoint to be replayed.",
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Sinks of metrics and rollouts besides metrics.jsonl, which is always written."""

    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    trackers: list[str] = setting(
        [], "Experiment trackers that also get metrics, config and rollouts.", choices=("wandb", "mlflow", "swanlab")
    )
    project: str = setting("mega_rl", "Project (MLflow: experiment) of the run in trackers.")
    run_name: str = setting("", "Name of the run in trackers; empty takes that of its folder.")
    progress_bar: bool = setting(True, "Show a live line on a terminal: step, what is being done, time left.")
    rollout_samples: int = setting(
        16,
        "Rollouts dumped as JSONL: all samples of as many of the first rank's prompts as they fill, at least one.",
        unit="samples",
        min=0,
    )
    rollout_interval: int = setting(
        10,
        "Dump rollouts of the first, the last and every N-th step, and answers at every validation; 0: none.",
        unit="steps",
        min=0,
    )
    print_samples: int = setting(
        2, "Samples of the first dump shown on the console, with their rewards.", unit="samples", min=0
    )
    records: RecordsConfig = dataclasses.field(default_factory=RecordsConfig)
