"""Every key a recipe may set: frozen dataclasses, one per area, with the range of each field in its metadata.

`field(metadata={"doc", "unit", "min", "max", "choices"})` is the single source for the loader's checks, for
`--print-config` and for docs/config.md. This module imports neither torch nor anything that does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Dataclass field with its documentation and range (`min` and `max` inclusive, `above` exclusive)."""
    metadata = {"doc": doc, "unit": unit, "min": min, "max": max, "above": above, "choices": choices}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoints the roles start from and how they are built."""

    path: str = setting(
        "",
        "Checkpoint of the actor: a directory in Hugging Face's format (config.json, safetensors, tokenizer), or a "
        "model of the Hub as org/name or org/name@revision.",
    )
    ref_path: str = setting("", "Checkpoint of the reference policy; empty takes the actor's.")
    critic_path: str = setting("", "Checkpoint of the critic's backbone; empty takes the actor's.")
    dtype: str = setting("bf16", "Parameter and activation type of training.", choices=("bf16", "fp32"))
    attn_implementation: str = setting(
        "auto",
        "Attention kernel of every role that names no other: plain matrix products (eager), torch's fused attention "
        "(sdpa), FlashAttention, or the best that is there (auto).",
        choices=ATTENTION,
    )
    critic_attn_implementation: str = setting(
        "same", "Attention kernel of the critic; same takes model.attn_implementation.", choices=("same", *ATTENTION)
    )
    ref_attn_implementation: str = setting(
        "same", "Attention kernel of the reference; same takes model.attn_implementation.", choices=("same", *ATTENTION)
    )
    transformer_impl: str = setting(
        "auto",
        "Layer implementation: Transformer Engine where it is installed (auto), or one of the two by name.",
        choices=("auto", "transformer_engine", "local"),
    )
    recompute: str = setting(
        "none",
        "Activations recomputed in the backward: none, the modules of recompute_modules, or whole layers.",
        choices=("none", "selective", "full"),
    )
    recompute_modules: list[str] = setting(
        ["core_attn"],
        "What selective recompute runs again: core_attn, layernorm, mlp, moe, moe_act, mla_up_proj, shared_experts.",
    )
    recompute_layers: int = setting(
        0, "Layers of each chunk that full recompute runs again, from the first on; 0 is all.", unit="layers", min=0
    )
    frozen: list[str] = setting(
        [],
        "Weights that do not train: shell patterns of the engine's parameter names, Megatron-Core's as embedding.* or "
        "decoder.layers.0.*, Hugging Face's as model.embed_tokens.*; layers are numbered over the whole model.",
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How one model replica is cut; data parallelism fills the rest of the world."""

    tp: int = setting(1, "Tensor-parallel size.", unit="ranks", min=1)
    sequence_parallel: bool = setting(False, "Shard layer-norm activations over the tensor-parallel group.")
    pp: int = setting(1, "Pipeline-parallel size.", unit="ranks", min=1)
    vpp: int = setting(1, "Model chunks per pipeline rank (interleaved schedule when above 1).", unit="chunks", min=1)
    overlap_p2p: bool = setting(False, "Overlap pipeline sends with compute (interleaved schedule only).")
    pipeline: str = setting(
        "",
        "Layers of each stage in Megatron-Core's notation, as Ett|ttt|ttL (E embedding, t layer, L loss); "
        "empty splits evenly.",
    )
    first_stage_layers: int = setting(
        0, "Layers of the first pipeline stage, the rest split evenly; 0 gives it as many.", unit="layers", min=0
    )
    last_stage_layers: int = setting(
        0, "Layers of the last pipeline stage, the rest split evenly; 0 gives it as many.", unit="layers", min=0
    )
    cp: int = setting(1, "Context-parallel size: ranks that share every sequence.", unit="ranks", min=1)
    ep: int = setting(1, "Expert-parallel size: ranks that share the experts of a layer.", unit="ranks", min=1)
    etp: int = setting(0, "Tensor-parallel size of each expert; 0 takes tp.", unit="ranks", min=0)


@dataclass(frozen=True)
class MoeConfig:
    """Mixtures of experts in training."""

    dispatcher: str = setting(
        "alltoall",
        "How tokens reach their experts: sent to the ranks that have them, or gathered on all.",
        choices=("alltoall", "allgather"),
    )
    grouped_experts: bool = setting(
        True, "A rank's experts in one grouped matrix product where the layers have one; false: one after the other."
    )
    aux_loss_coef: float = setting(
        0.0, "Weight of the load-balancing loss; 0 leaves it out, as reinforcement learning does.", min=0.0
    )
    expert_bias_update_rate: float = setting(
        0.0, "Step of the router's expert bias against the load after each update; 0 freezes it.", min=0.0
    )
    routing_replay: bool = setting(
        False, "Routes every token in the updates as the pass that computed its old log-prob did."
    )


@dataclass(frozen=True)
class DdpConfig:
    """Data parallelism of engine=megatron: who holds what, and how gradients are added up."""

    implementation: str = setting(
        "ddp",
        "Megatron-Core's DDP, Megatron FSDP, or PyTorch's FSDP2 around Megatron-Core's modules.",
        choices=("ddp", "megatron_fsdp", "torch_fsdp2"),
    )
    fsdp_sharding: str = setting(
        "optim_grads_params",
        "What Megatron FSDP shards: optimizer state, and gradients, and parameters.",
        choices=("optim", "optim_grads", "optim_grads_params"),
    )
    bucket_size: int = setting(
        0,
        "Parameters of a bucket when reduction overlaps with the backward; 0: 40 million, or 1 million per "
        "data-parallel rank if that is more.",
        unit="parameters",
        min=0,
    )
    overlap_grad_reduce: bool = setting(False, "Overlap gradient reduction with the backward.")
    overlap_param_gather: bool = setting(False, "Overlap the gathering of updated parameters with the forward.")
    grad_reduce_in_fp32: bool = setting(True, "Accumulate and reduce gradients in FP32 whatever the model's dtype.")
    reduce_scatter_fp32_accumulation: bool = setting(
        False, "Send bf16 gradients and add them in FP32; needs grad_reduce_in_fp32=false."
    )
    average_in_collective: bool = setting(
        False, "Let the collective average instead of adding; the result is the same up to rounding."
    )
    optimizer_instances: int = setting(
        1, "Copies of the sharded optimizer state over data parallel (hybrid sharding).", unit="copies", min=1
    )


@dataclass(frozen=True)
class FsdpConfig:
    """PyTorch FSDP2 under engine=fsdp: who holds what, and when it travels."""

    shard_ranks: int = setting(
        0, "Ranks that hold one copy of weights and optimizer state between them; 0: all.", unit="ranks", min=0
    )
    reshard_after_forward: bool = setting(
        True, "Free a layer's weights after its forward and gather them again in the backward; false keeps them."
    )
    reduce_every_microbatch: bool = setting(
        True,
        "Reduce gradients after every micro-batch, so that each rank keeps its share of them; false reduces once for "
        "each optimizer step, for less traffic, and keeps the whole of them in FP32 until then.",
    )
    grad_reduce_in_fp32: bool = setting(True, "Accumulate and reduce gradients in FP32 whatever the model's dtype.")
    cpu_offload: bool = setting(
        False, "Keep sharded weights, gradients and optimizer state in host memory; Adam steps there."
    )


@dataclass(frozen=True)
class OptimConfig:
    """Adam and its schedule, for the actor and the critic."""

    lr: float = setting(1e-6, "Peak learning rate of the actor.", above=0.0)
    critic_lr: float = setting(1e-5, "Peak learning rate of the critic.", above=0.0)
    weight_decay: float = setting(0.0, "Decoupled weight decay of matrices (norms and biases have none).", min=0.0)
    beta1: float = setting(0.9, "Decay of the first moment.", min=0.0, max=0.9999)
    beta2: float = setting(0.95, "Decay of the second moment.", min=0.0, max=0.99999)
    eps: float = setting(1e-8, "Denominator floor of Adam.", above=0.0)
    clip_grad: float = setting(1.0, "Global gradient-norm limit; 0 turns clipping off.", min=0.0)
    schedule: str = setting("constant", "Learning-rate shape after warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, "Linear warm-up from zero.", unit="trainer steps", min=0)
    min_lr_ratio: float = setting(0.0, "Final learning rate as a fraction of the peak.", min=0.0, max=1.0)
    distributed_optimizer: bool = setting(True, "Shard optimizer state and FP32 main parameters over data parallel.")
    cpu_offload: float = setting(
        0.0, "Share of the optimizer state that stays in host memory and steps there.", min=0.0, max=1.0
    )
    precision_aware: bool = setting(
        False, "Transformer Engine's Adam with moments of moment_dtype and no FP32 copy beyond bf16 remainders."
    )
    moment_dtype: str = setting("fp32", "Type of Adam's moments (precision_aware only).", choices=("fp32", "bf16"))


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses and KL penalties."""

    advantage: str = setting("gae", "Advantage estimator: GAE (needs a critic) or GRPO.", choices=("gae", "grpo"))
    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)
    gae_lambda: float = setting(1.0, "GAE lambda.", min=0.0, max=1.0)
    grpo_std_normalization: bool = setting(
        True, "Divide group-centred rewards by their standard deviation (false: Dr. GRPO)."
    )
    whiten_advantages: bool = setting(True, "Whiten GAE advantages over the global batch.")
    clip_low: float = setting(0.2, "Policy ratio is clipped at 1 - clip_low.", above=0.0, max=1.0)
    clip_high: float = setting(0.2, "Policy ratio is clipped at 1 + clip_high.", above=0.0)
    dual_clip: float = setting(
        0.0, "Lower bound of the objective for negative advantages, as a ratio; 0 turns it off.", min=0.0
    )
    value_clip: float = setting(
        0.5, "Value predictions are clipped to this distance of the old ones; 0 turns it off.", min=0.0
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", min=0.0)
    kl_placement: str = setting(
        "none", "Where the KL to the reference policy enters.", choices=("none", "reward", "loss")
    )
    kl_estimator: str = setting("k3", "KL estimator.", choices=("k1", "k2", "k3"))
    kl_coef: float = setting(0.001, "KL coefficient (the initial one if adaptive).", min=0.0)
    kl_control: str = setting("fixed", "Fixed or adaptive KL coefficient.", choices=("fixed", "adaptive"))
    kl_target: float = setting(0.1, "Target KL of the adaptive controller.", unit="nats per token", above=0.0)
    kl_horizon: int = setting(10_000, "Horizon of the adaptive controller.", unit="sequences", min=1)
    loss_aggregation: str = setting(
        "token-mean",
        "How token losses become one number.",
        choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    old_logprobs: str = setting(
        "auto",
        "Log-probs before the update: from a forward of their own (recompute), or, where a step makes one optimizer "
        "step and they enter nothing before it, from that step's forward (auto).",
        choices=("auto", "recompute"),
    )
    tis_cap: float = setting(
        0.0,
        "Truncated importance sampling: each token's policy loss times min(pi_old / pi_rollout, cap); 0 is off.",
        min=0.0,
    )
    epochs: int = setting(1, "Passes over each batch of rollouts.", unit="passes", min=1)
    critic_warmup_steps: int = setting(0, "First steps that train only the critic.", unit="trainer steps", min=0)


@dataclass(frozen=True)
class DataConfig:
    """Prompts: files, formats, lengths."""

    train_files: list[str] = setting(
        [], "Training prompts: JSONL or Parquet files, or data sets of the Hub as org/name:config:split@revision."
    )
    val_files: list[str] = setting(
        [], "Held-out prompts, named as train_files are; empty splits them off the training files."
    )
    val_size: int = setting(
        0, "Rows split off the training files for validation when val_files is empty.", unit="rows", min=0
    )
    prompt_key: str = setting("prompt", "Column with the prompt: a string, or a list of chat messages.")
    answer_key: str = setting("answer", "Column handed to the reward as the reference answer; empty: none.")
    chat_template: bool = setting(False, "Apply the tokenizer's chat template to the prompt.")
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        "Variables of the chat template, as {enable_thinking: false}, or tools: [...] for templates that take tools. "
        "An argument sets one as data.chat_template_kwargs.enable_thinking=false.",
    )
    system_prompt: str = setting(
        "", "System message before every conversation that begins with none of its own; empty adds none."
    )
    max_prompt_tokens: int = setting(1024, "Longest prompt.", unit="tokens", min=1)
    overlong_prompts: str = setting("error", "What happens to longer prompts.", choices=("error", "drop"))
    malformed_rows: str = setting("error", "What happens to rows that cannot be read.", choices=("error", "drop"))
    shuffle: bool = setting(True, "Shuffle the training prompts each epoch, from trainer.seed.")


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: backend, sampling, weight sync."""

    backend: str = setting(
        "hf",
        "Rollout engine: Hugging Face generate in the trainer's own processes (hf), or SGLang servers (sglang).",
        choices=("hf", "sglang"),
    )
    n: int = setting(1, "Samples per prompt.", unit="samples", min=1)
    temperature: float = setting(1.0, "Sampling temperature; the trainer's log-probs use it too.", above=0.0)
    top_p: float = setting(1.0, "Nucleus mass.", above=0.0, max=1.0)
    top_k: int = setting(0, "Keep the k most likely tokens; 0 keeps all.", unit="tokens", min=0)
    max_new_tokens: int = setting(256, "Longest response.", unit="tokens", min=1)
    stop_token_ids: list[int] = setting(
        [], "Extra token ids that end a response, besides the model's end-of-sequence ids."
    )
    batch_size: int = setting(256, "Sequences generated together.", unit="sequences", min=1)
    dtype: str = setting(
        "auto", "Weight type of the rollout model; auto takes model.dtype.", choices=("auto", "bf16", "fp32")
    )
    logprob_diff_limit: float = setting(
        1.0, "Largest |trainer - rollout| log-prob of one token before the run stops.", unit="nats", above=0.0
    )
    verify_interval: int = setting(
        10,
        "Verify the checksum of every synced tensor every N publishes (the first always).",
        unit="publishes",
        min=1,
    )
    bucket_mib: int = setting(256, "Weight-sync bucket.", unit="MiB", min=1)


@dataclass(frozen=True)
class SglangConfig:
    """The servers behind rollout.backend=sglang."""

    urls: list[str] = setting([], "Servers to join, as http://host:port; empty starts servers beside the trainer.")
    keys_file: str = setting(
        "", 'Keys of the servers that are joined, mode 0600: {"api_key": "...", "admin_key": "..."}.'
    )
    servers: int = setting(1, "Servers to start on each host of the trainer.", unit="servers", min=1)
    tp: int = setting(1, "Tensor-parallel ranks of each server that is started.", unit="ranks", min=1)
    host: str = setting("127.0.0.1", "Address that started servers bind to.")
    placement: str = setting(
        "auto",
        "Whether servers share the trainer's devices and so take turns with it (colocated) or have devices of their "
        "own (separate); auto is colocated for started servers without trainer.async_steps, else separate.",
        choices=("auto", "colocated", "separate"),
    )
    transport: str = setting(
        "auto",
        "How weights travel: by shared memory or CUDA IPC on one host, by a process group with the servers, or as "
        "files; auto takes the first that is possible.",
        choices=("auto", "shared_memory", "distributed", "disk"),
    )
    start_timeout_s: float = setting(600.0, "Deadline of a server's start.", unit="seconds", above=0.0)
    request_timeout_s: float = setting(600.0, "Deadline of one request, tries and all.", unit="seconds", above=0.0)
    sync_timeout_s: float = setting(300.0, "Deadline of each step of a weight update.", unit="seconds", above=0.0)
    max_concurrency: int = setting(256, "Requests in flight at one server.", unit="requests", min=1)
    retries: int = setting(3, "Further tries of a sample after a failed one.", unit="tries", min=0)
    restarts: int = setting(3, "Times within one step that lost servers are brought back.", unit="times", min=0)
    failed_samples: str = setting(
        "fatal",
        "What a sample without an answer does: end the run, or stay out of the loss.",
        choices=("fatal", "mask"),
    )
    max_failed_share: float = setting(
        0.1, "Share of a step's samples that may be masked before the run ends.", min=0.0, max=1.0
    )
    partial_rollout: bool = setting(
        False, "Let a weight update interrupt responses, which go on under the new weights; tokens carry their version."
    )
    max_total_tokens: int = setting(0, "Tokens in a server's KV cache; 0 lets SGLang choose.", unit="tokens", min=0)
    mem_fraction: float = setting(
        0.0, "Share of a device's memory for weights and KV cache; 0 lets SGLang choose.", min=0.0, max=0.95
    )
    probe_tokens: int = setting(8, "Greedy tokens that prove each weight update; 0 proves none.", unit="tokens", min=0)
    probe_limit: float = setting(
        0.0,
        "Largest |trainer - server| log-prob of a probe's token; 0 takes 1e-4 in fp32 and 0.1 in bf16.",
        unit="nats",
        min=0.0,
    )


@dataclass(frozen=True)
class RewardConfig:
    """Rewards: functions, services, reward models."""

    source: str = setting(
        "function",
        "Who scores: a Python function, a sequence-classification checkpoint on the run's engine, or an HTTP service.",
        choices=("function", "model", "http"),
    )
    function: str = setting("exact_match", "Built-in name (exact_match, math_verify) or path/to/file.py:function.")
    model_path: str = setting("", "Hugging Face sequence-classification checkpoint with one label.")
    attn_implementation: str = setting(
        "same",
        "Attention kernel of the reward model; same takes model.attn_implementation.",
        choices=("same", *ATTENTION),
    )
    url: str = setting("", "Address that batches are posted to, as http://127.0.0.1:8000/score.")
    key_file: str = setting("", "File with the service's bearer token, mode 0600; empty sends none.")
    batch_size: int = setting(64, "Responses in one request.", unit="responses", min=1)
    concurrency: int = setting(4, "Requests in flight of one rank.", unit="requests", min=1)
    timeout_s: float = setting(60.0, "Deadline of one request, tries and all.", unit="seconds", above=0.0)
    retries: int = setting(3, "Further tries of a request after a failed one.", unit="tries", min=0)


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
    keep_best: str = setting("", "Also keep the checkpoint with the largest value of this metric: val/reward_mean.")
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


@dataclass(frozen=True)
class MetricsConfig:
    """What is written besides metrics.jsonl, which always is."""

    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    trackers: list[str] = setting(
        [], "Experiment trackers that also get metrics, config and rollouts.", choices=("wandb", "mlflow", "swanlab")
    )
    project: str = setting("mega_rl", "Project (MLflow: experiment) of the run in trackers.")
    run_name: str = setting("", "Name of the run in trackers; empty takes that of its folder.")
    progress_bar: bool = setting(True, "Show a live line on a terminal: step, what is being done, time left.")
    rollout_samples: int = setting(8, "Rollouts dumped as JSONL per dump.", unit="samples", min=0)
    rollout_interval: int = setting(10, "Dump rollouts every N steps; 0 never.", unit="steps", min=0)


@dataclass(frozen=True)
class TrainerConfig:
    """The loop and its batches."""

    run_dir: str = setting("runs/default", "Folder of everything the run writes.")
    steps: int = setting(100, "Trainer steps.", unit="steps", min=1)
    prompts_per_step: int = setting(64, "Prompts per step over all ranks.", unit="prompts", min=1)
    minibatch_size: int = setting(64, "Prompts per optimizer step over all ranks.", unit="prompts", min=1)
    packing: bool = setting(True, "Pack sequences without padding (THD); false pads each micro-batch.")
    max_tokens_per_microbatch: int = setting(8192, "Token budget of a packed micro-batch.", unit="tokens", min=1)
    micro_batch_size: int = setting(4, "Sequences per padded micro-batch.", unit="sequences", min=1)
    seed: int = setting(0, "Seed of data order, sampling and fresh heads.", min=0, max=2**32 - 1)
    val_interval: int = setting(
        0, "Validate (greedy) every N steps, before the first and after the last; 0 never.", unit="steps", min=0
    )
    async_steps: int = setting(
        0,
        "Steps that generation runs ahead of training; its samples are as many versions old.",
        unit="steps",
        min=0,
        max=1,
    )
    device: str = setting("auto", "auto takes CUDA where there is one.", choices=("auto", "cuda", "cpu"))
    deterministic: bool = setting(False, "Only algorithms that give the same bits twice, where there are such.")
    timeout_s: float = setting(600.0, "Deadline of every collective.", unit="seconds", above=0.0, max=604_800.0)


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    engine: str = setting(
        "megatron",
        "What runs the models: Megatron-Core with tensor, pipeline, context and expert parallelism (megatron), or "
        "Hugging Face's models under PyTorch FSDP2 (fsdp).",
        choices=("megatron", "fsdp"),
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    ddp: DdpConfig = dataclasses.field(default_factory=DdpConfig)
    fsdp: FsdpConfig = dataclasses.field(default_factory=FsdpConfig)
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    sglang: SglangConfig = dataclasses.field(default_factory=SglangConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    # No setting: pinned Hub names of settings that hold the path of a downloaded copy (`mega_rl.config.origins`).
    origins: Mapping[str, str | list[str]] = dataclasses.field(default_factory=dict)
