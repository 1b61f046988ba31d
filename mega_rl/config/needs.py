"""Settings that are read only where others hold: a table, and the settings of a config that miss their condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mega_rl.config.schema import Config, DdpConfig, FsdpConfig, MoeConfig, ParallelConfig, SglangConfig


def _keys(section: str, area: type) -> tuple[str, ...]:
    """Every key of a section."""
    return tuple(f"{section}.{field.name}" for field in dataclasses.fields(area))


@dataclass(frozen=True)
class Need:
    """Keys that mean something only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it: "engine=megatron"
    holds: Callable[[Config], bool]
    fault: str = "has no effect"  # of a key whose condition does not hold


@dataclass(frozen=True)
class Unmet:
    """A setting other than the default whose condition does not hold."""

    key: str  # "parallel.tp"
    value: object
    need: Need

    @property
    def setting(self) -> str:
        """The setting as one writes it: "parallel.tp=2"."""
        value = str(self.value)
        return f"{self.key}={value.lower() if isinstance(self.value, bool) else value}"


_ENGINE_KEYS = {
    "megatron": (
        *_keys("parallel", ParallelConfig),
        *_keys("ddp", DdpConfig),
        *_keys("moe", MoeConfig),
        *("model.transformer_impl", "model.recompute_modules", "model.recompute_layers"),
        *("optim.distributed_optimizer", "optim.cpu_offload", "optim.precision_aware"),
    ),
    "fsdp": _keys("fsdp", FsdpConfig),
}
_SOURCE_KEYS = {
    "function": ("reward.function",),
    "model": ("reward.model_path", "reward.attn_implementation"),
    "http": tuple(f"reward.{n}" for n in ("url", "key_file", "batch_size", "concurrency", "timeout_s", "retries")),
}

_NEEDS = (
    *(
        Need(keys, f"engine={engine}", lambda config, engine=engine: config.engine == engine)  # type: ignore[misc]
        for engine, keys in _ENGINE_KEYS.items()
    ),
    *(
        Need(keys, f"reward.source={name}", lambda config, name=name: config.reward.source == name)  # type: ignore[misc]
        for name, keys in _SOURCE_KEYS.items()
    ),
    Need(
        (
            "model.critic_path",
            "model.critic_attn_implementation",
            "optim.critic_lr",
            "algorithm.gamma",
            "algorithm.gae_lambda",
            "algorithm.whiten_advantages",
            "algorithm.value_clip",
            "algorithm.critic_warmup_steps",
        ),
        "algorithm.advantage=gae",
        lambda config: config.algorithm.advantage == "gae",
    ),
    Need(
        ("algorithm.grpo_std_normalization",),
        "algorithm.advantage=grpo",
        lambda config: config.algorithm.advantage == "grpo",
    ),
    Need(
        (
            "model.ref_path",
            "model.ref_attn_implementation",
            "algorithm.kl_estimator",
            "algorithm.kl_coef",
            "algorithm.kl_control",
        ),
        "algorithm.kl_placement=reward or loss",
        lambda config: config.algorithm.kl_placement != "none",
    ),
    Need(
        ("algorithm.kl_target", "algorithm.kl_horizon"),
        "algorithm.kl_control=adaptive",
        lambda config: config.algorithm.kl_control == "adaptive",
    ),
    Need(("parallel.sequence_parallel",), "parallel.tp above 1", lambda config: config.parallel.tp > 1),
    Need(("parallel.vpp",), "parallel.pp above 1", lambda config: config.parallel.pp > 1),
    Need(("parallel.overlap_p2p",), "parallel.vpp above 1", lambda config: config.parallel.vpp > 1),
    Need(
        ("parallel.pipeline", "parallel.first_stage_layers", "parallel.last_stage_layers"),
        "parallel.pp above 1",
        lambda config: config.parallel.pp > 1,
    ),
    Need(("model.recompute_modules",), "model.recompute=selective", lambda c: c.model.recompute == "selective"),
    Need(("model.recompute_layers",), "model.recompute=full", lambda config: config.model.recompute == "full"),
    Need(
        ("ddp.fsdp_sharding",),
        "ddp.implementation=megatron_fsdp",
        lambda config: config.ddp.implementation == "megatron_fsdp",
    ),
    Need(("ddp.bucket_size",), "ddp.overlap_grad_reduce=true", lambda config: config.ddp.overlap_grad_reduce),
    Need(
        ("ddp.bucket_size", "ddp.reduce_scatter_fp32_accumulation", "optim.distributed_optimizer"),
        "ddp.implementation=ddp",
        lambda config: config.ddp.implementation == "ddp",
    ),
    Need(
        ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather"),
        "ddp.implementation=ddp or megatron_fsdp",
        lambda config: config.ddp.implementation != "torch_fsdp2",
    ),
    Need(
        ("ddp.overlap_param_gather",),
        "ddp.overlap_grad_reduce=true and optim.distributed_optimizer=true, whose updates are gathered",
        lambda config: config.ddp.overlap_grad_reduce and config.optim.distributed_optimizer,
        fault="cannot work",
    ),
    Need(
        ("ddp.optimizer_instances",),
        "optim.distributed_optimizer=true",
        lambda config: config.optim.distributed_optimizer,
    ),
    Need(
        ("moe.routing_replay",),
        "a pass that computes old log-probs: algorithm.old_logprobs=recompute, several updates a step, or a KL in the "
        "reward",
        lambda config: not is_on_policy(config),
    ),
    Need(("optim.moment_dtype",), "optim.precision_aware=true", lambda config: config.optim.precision_aware),
    Need(
        ("optim.min_lr_ratio",),
        "optim.schedule=linear or cosine",
        lambda config: config.optim.schedule != "constant",
    ),
    Need(("trainer.max_tokens_per_microbatch",), "trainer.packing=true", lambda config: config.trainer.packing),
    Need(("trainer.micro_batch_size",), "trainer.packing=false", lambda config: not config.trainer.packing),
    Need(
        ("optim.warmup_steps",),
        "trainer.steps above it",
        lambda config: config.optim.warmup_steps < config.trainer.steps,
        fault="does not end within the run",
    ),
    Need(
        ("algorithm.critic_warmup_steps",),
        "trainer.steps above it, or the actor never trains",
        lambda config: config.algorithm.critic_warmup_steps < config.trainer.steps,
        fault="does not end within the run",
    ),
    Need(
        ("trainer.val_interval",),
        "data.val_files or data.val_size",
        lambda config: bool(config.data.val_files or config.data.val_size),
        fault="has no prompts to validate on",
    ),
    Need(
        ("trainer.async_steps",),
        "rollout.backend=sglang: the embedded engine generates in the trainer's own processes",
        lambda config: config.rollout.backend == "sglang",
        fault="cannot run ahead",
    ),
    Need(("data.val_files", "data.val_size"), "trainer.val_interval above 0", lambda c: c.trainer.val_interval > 0),
    Need(
        ("data.chat_template_kwargs", "data.system_prompt"),
        "data.chat_template=true",
        lambda config: config.data.chat_template,
    ),
    Need(("data.val_size",), "no data.val_files", lambda config: not config.data.val_files),
    Need(
        ("checkpoint.keep_best", "checkpoint.keep_interval", "checkpoint.async_save"),
        "checkpoint.save_interval above 0",
        lambda config: config.checkpoint.save_interval > 0,
    ),
    Need(("checkpoint.fallback",), "checkpoint.resume=auto", lambda config: config.checkpoint.resume == "auto"),
    Need(("metrics.project", "metrics.run_name"), "metrics.trackers", lambda config: bool(config.metrics.trackers)),
    Need(("rollout.batch_size",), "rollout.backend=hf", lambda config: config.rollout.backend == "hf"),
    Need(
        _keys("sglang", SglangConfig),
        "rollout.backend=sglang",
        lambda config: config.rollout.backend == "sglang",
    ),
    Need(
        tuple(f"sglang.{name}" for name in ("servers", "tp", "host", "max_total_tokens", "mem_fraction")),
        "servers that the run starts: no sglang.urls",
        lambda config: not config.sglang.urls,
    ),
    Need(("sglang.keys_file",), "sglang.urls", lambda config: bool(config.sglang.urls)),
    Need(
        ("sglang.max_failed_share",),
        "sglang.failed_samples=mask",
        lambda config: config.sglang.failed_samples == "mask",
    ),
    Need(("sglang.partial_rollout",), "trainer.async_steps=1", lambda config: config.trainer.async_steps > 0),
    Need(("sglang.probe_limit",), "sglang.probe_tokens above 0", lambda config: config.sglang.probe_tokens > 0),
)


def unmet(config: Config) -> Iterator[Unmet]:
    """Yield every setting other than the default whose condition does not hold, each once, with its first condition."""
    values, defaults = flat(config), flat(Config())
    missed = [need for need in _NEEDS if not need.holds(config)]
    first = {key: need for need in reversed(missed) for key in need.keys}
    for key in dict.fromkeys(key for need in missed for key in need.keys):
        if values[key] != defaults[key]:
            yield Unmet(key, values[key], first[key])


def is_on_policy(config: Config) -> bool:
    """Return whether updates are made with the weights that sampled and nothing before needs the old log-probs."""
    algorithm, trainer = config.algorithm, config.trainer
    single_update = algorithm.epochs == 1 and trainer.minibatch_size == trainer.prompts_per_step
    needed_before = algorithm.kl_placement == "reward" or algorithm.critic_warmup_steps > 0 or algorithm.tis_cap > 0
    sampled_now = trainer.async_steps == 0
    return algorithm.old_logprobs == "auto" and single_update and sampled_now and not needed_before


def flat(config: Config) -> dict[str, object]:
    """Return every setting by its dotted key."""
    settings: dict[str, object] = {}
    for section, entries in dataclasses.asdict(dataclasses.replace(config, origins={})).items():
        if isinstance(entries, dict):
            settings |= {f"{section}.{name}": value for name, value in entries.items()}
        else:
            settings[section] = entries
    return settings
