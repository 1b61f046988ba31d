"""Settings of training: models, optimizer, algorithm, the loop and its batches, checkpoints and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from mega_rl.config.setting import ATTENTION, Kind, by_name, setting, tagged

# Found by name, since these packages stand above config: it reads their settings, and they import no torch for it.
_ALGORITHMS = "mega_rl.algorithms"
ESTIMATORS: dict[str, type[Kind]] = import_module(f"{_ALGORITHMS}.advantages").ESTIMATORS
LOSSES: dict[str, type[Kind]] = import_module(f"{_ALGORITHMS}.policy_losses").LOSSES
CORRECTIONS: dict[str, type[Kind]] = import_module(f"{_ALGORITHMS}.corrections").CHOICES
TRAININGS: dict[str, type[Kind]] = import_module(f"{_ALGORITHMS}.preferences").TRAININGS


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA), which train in the place of the model's weights."""

    rank: int = setting(0, "Rank of every adapter; 0: none, the weights train.", min=0)
    alpha: float = setting(32.0, "Adapters are scaled by alpha / rank.", above=0.0)
    targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Modules with an adapter: last parts of their names in the checkpoint.",
    )
    rs: bool = setting(False, "Scale by alpha / sqrt(rank) (rank-stabilised).")
    path: str = setting("", "PEFT folder that the actor's adapters begin from; empty: they add nothing at first.")


@dataclass(frozen=True)
class ModelConfig:
    """Checkpoints of the roles, and how models are built."""

    path: str = setting("", "Checkpoint of the actor: a Hugging Face directory, or org/name@revision of the Hub.")
    ref_path: str = setting("", "Checkpoint of the reference policy; empty takes the actor's.")
    critic_path: str = setting("", "Checkpoint of the critic's backbone; empty takes the actor's.")
    dtype: str = setting("bf16", "Parameter and activation type of training.", choices=("bf16", "fp32"))
    fp32_head: bool = setting(False, "Compute logits in FP32, at twice their memory: bf16 rounds large ones.")
    attn_implementation: str = setting("auto", "Attention kernel; auto: the best available.", choices=ATTENTION)
    critic_attn_implementation: str = setting("same", "Attention kernel of the critic.", choices=("same", *ATTENTION))
    ref_attn_implementation: str = setting("same", "Attention kernel of the reference.", choices=("same", *ATTENTION))
    recompute: str = setting(
        "none",
        "Activations recomputed in the backward: none, those of recompute_modules, or whole layers.",
        choices=("none", "selective", "full"),
    )
    recompute_modules: list[str] = setting(
        ["core_attn"],
        "What selective recompute runs again.",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"),
    )
    recompute_layers: int = setting(
        0, "Layers of each chunk that full recompute runs again; 0: all.", unit="layers", min=0
    )
    frozen: list[str] = setting(
        [],
        "Weights that do not train: shell patterns of parameter names, such as embedding.* or decoder.layers.0.* "
        "(Megatron), model.embed_tokens.* (FSDP).",
    )
    adapter: AdapterConfig = AdapterConfig()


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and its schedule, for the actor and the critic."""

    name: str = setting("adam", "AdamW, or Muon for matrices inside layers, at Adam's scale.", choices=("adam", "muon"))
    lr: float = setting(1e-6, "Peak learning rate of the actor.", above=0.0)
    critic_lr: float = setting(1e-5, "Peak learning rate of the critic.", above=0.0)
    weight_decay: float = setting(0.0, "Decoupled weight decay of matrices (norms and biases have none).", min=0.0)
    beta1: float = setting(0.9, "Decay of the first moment.", min=0.0, max=0.9999)
    beta2: float = setting(0.95, "Decay of the second moment.", min=0.0, max=0.99999)
    eps: float = setting(1e-8, "Denominator floor of Adam.", above=0.0)
    clip_grad: float = setting(1.0, "Global gradient-norm limit; 0 turns clipping off.", min=0.0)
    schedule: str = setting("constant", "Learning-rate shape after warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, "Linear warm-up; the actor's follows the critic's.", unit="trainer steps", min=0)
    min_lr_ratio: float = setting(0.1, "Learning rate of the last step as a fraction of the peak.", min=0.0, max=1.0)
    max_skipped_steps: int = setting(
        3,
        "Steps in a row that may be skipped for a gradient norm that is not finite; more end the run.",
        unit="optimizer steps",
        min=0,
    )


class KlConfig(Kind):
    """Base of penalties on the distance from the reference policy, with values of no penalty."""

    estimator: str = "k3"
    coef: float = 0.0
    control: str = "fixed"
    target: float = 0.1
    horizon: int = 10_000
    reference_interval: int = 0
    reference_rate: float = 1.0


@dataclass(frozen=True)
class NoKl(KlConfig):
    """No penalty."""

    name = "none"


@dataclass(frozen=True)
class _Penalty(KlConfig):
    coef: float = setting(0.001, "KL coefficient (the initial one if adaptive).", min=0.0)
    control: str = setting("fixed", "Fixed or adaptive KL coefficient.", choices=("fixed", "adaptive"))
    target: float = setting(0.1, "Target KL of the adaptive controller.", unit="nats per token", above=0.0)
    horizon: int = setting(10_000, "Horizon of the adaptive controller.", unit="sequences", min=1)
    reference_interval: int = setting(0, "The reference takes the policy's weights every N steps.", unit="steps", min=0)
    reference_rate: float = setting(1.0, "Share of the policy in the reference's new weights.", above=0.0, max=1.0)

    def problems(self) -> Iterator[str]:
        if self.control == "adaptive" and not self.coef:
            yield "coef=0 with control=adaptive: a product never leaves 0; legal: above 0"


@dataclass(frozen=True)
class KlInReward(_Penalty):
    """A penalty taken off the rewards of tokens, by the estimator k1."""

    name = "reward"
    # Other estimators in the reward have gradients that are not the KL's: docs/decisions.md, 0022.
    estimator = "k1"


@dataclass(frozen=True)
class KlInLoss(_Penalty):
    """A term of the loss."""

    name = "loss"

    # The gradient of k1 in the loss is 0 on average: docs/decisions.md, 0022.
    estimator: str = setting("k3", "KL estimator; k2 and k3 have one gradient.", choices=("k2", "k3"))


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and losses: docs/algorithms.md."""

    kind: Kind = tagged(
        TRAININGS,
        "rl",
        "What the run learns from: its own samples (rl), given answers (sft), pairs (dpo, ipo, simpo, orpo), labelled "
        "answers (kto), or pairs for a reward model (rm). The commands sft, dpo and rm set it.",
    )

    advantage: Kind = tagged(
        ESTIMATORS,
        "grpo",
        "Advantage estimator, also path/to/file.py:class. gae needs a critic, gdpo named rewards, distillation a "
        "reference.",
    )
    loss: Kind = tagged(LOSSES, "ppo", "Policy loss, also path/to/file.py:class.")
    correction: Kind = tagged(
        CORRECTIONS,
        "auto",
        "Weights of token losses if other weights or another engine sampled, also path/to/file.py:class. auto: tis "
        "for SGLang in bf16 or with older weights, icepop for mixtures of experts, else none.",
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus; 0 computes no entropy.", min=0.0)
    loss_aggregation: str = setting(
        "token-mean",
        "How the policy's token losses become one number.",
        choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"),
    )
    train_turns: str = setting("all", "Turns of an agent that train: all, or its last.", choices=("all", "last"))
    old_logprobs: str = setting(
        "auto",
        "Log-probs before the update: from a separate forward (recompute), the update's own if a step makes one "
        "optimizer step (auto), or the sampler (rollout).",
        choices=("auto", "recompute", "rollout"),
    )
    value_clip: float = setting(0.5, "Largest distance of value predictions from the old ones; 0: off.", min=0.0)
    epochs: int = setting(1, "Passes over each batch of rollouts.", unit="passes", min=1)
    critic_warmup_steps: int = setting(0, "First steps that train only the critic.", unit="trainer steps", min=0)
    kl: KlConfig = tagged(
        by_name(NoKl, KlInReward, KlInLoss),
        "none",
        "Place of the KL to the reference policy: token rewards, the loss, or none.",
    )


@dataclass(frozen=True)
class MicrobatchConfig:
    """Micro-batches of a mini-batch, one forward and backward each."""

    packing: bool = setting(True, "Pack sequences without padding (THD); false pads each micro-batch.")
    max_tokens: int = setting(8192, "Token budget of a packed micro-batch.", unit="tokens", min=1)
    size: int = setting(4, "Sequences per padded micro-batch.", unit="sequences", min=1)


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of chosen steps, and the rate that computation is measured by."""

    steps: list[int] = setting([], "Steps, from 1, that torch's profiler traces into profile/ of the run folder.")
    ranks: list[int] = setting([0], "Ranks that write traces.")
    memory: bool = setting(False, "Also write the GPU allocator's history of each traced step.")
    peak_tflops: float = setting(0.0, "Rate of which perf/mfu is a share; 0: the device's.", unit="TFLOP/s", min=0.0)


@dataclass(frozen=True)
class TrainerConfig:
    """The loop and its batches."""

    run_dir: str = setting("runs/default", "Folder of everything the run writes.")
    steps: int = setting(100, "Trainer steps.", unit="steps", min=1)
    epochs: float = setting(0.0, "Passes over the training prompts, instead of steps.", unit="epochs", min=0.0)
    prompts_per_step: int = setting(64, "Prompts per step over all ranks.", unit="prompts", min=1)
    minibatch_size: int = setting(64, "Prompts per optimizer step over all ranks.", unit="prompts", min=1)
    seed: int = setting(0, "Seed of data order, sampling and fresh heads.", min=0, max=2**32 - 1)
    val_interval: int = setting(0, "Validate every N steps and at both ends; 0: never.", unit="steps", min=0)
    async_steps: int = setting(
        0, "Steps that generation runs ahead: the largest age of a token's weights.", unit="steps", min=0, max=64
    )
    device: str = setting("auto", "auto takes CUDA where there is one.", choices=("auto", "cuda", "cpu"))
    deterministic: bool = setting(False, "Use only algorithms that repeat their bits.")
    timeout_s: float = setting(600.0, "Deadline of every collective.", unit="seconds", above=0.0, max=604_800.0)
    microbatch: MicrobatchConfig = dataclasses.field(default_factory=MicrobatchConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)


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
