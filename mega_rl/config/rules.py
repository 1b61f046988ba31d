"""Rules between fields, and between fields and the model: what is found wrong is listed, nothing is raised.

Each line names the values, the rule and what is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mega_rl.config import parallel_rules, rollout_rules
from mega_rl.config.facts import ModelFacts, divisors, listed
from mega_rl.config.schema import Config, DdpConfig, FsdpConfig, MoeConfig, ParallelConfig, SglangConfig


def check(config: Config, *, world_size: int, models: Mapping[str, ModelFacts] | None = None) -> list[str]:
    """Every broken rule, one line each; an empty list for a config that can run on `world_size` ranks.

    `models` maps the config key that names a checkpoint ("model.path", "model.critic_path", ...) to its facts; rules
    that need the facts of a model not given are left out.
    """
    problems = [*parallel_rules.layout(config, world_size), *_batches(config, world_size), *_schedule(config)]
    problems += [*_algorithm(config), *parallel_rules.recompute(config)]
    problems += [*parallel_rules.data_parallel(config, world_size), *parallel_rules.fsdp_engine(config, world_size)]
    problems += [*rollout_rules.rollouts(config), *_reward(config)]
    for key, facts in (models or {}).items():
        problems += [*parallel_rules.fits_model(config, key, facts), *_fits_model(config, key, facts)]
        problems += rollout_rules.fits_model(config, key, facts)
    return [*problems, *_without_effect(config)]


def _batches(config: Config, world_size: int) -> Iterator[str]:
    trainer, rollout, par = config.trainer, config.rollout, config.parallel
    prompts, minibatch = trainer.prompts_per_step, trainer.minibatch_size
    if prompts % minibatch:
        yield (
            f"trainer.minibatch_size={minibatch} does not divide trainer.prompts_per_step={prompts}; "
            f"legal: {listed(divisors(prompts))}"
        )
    size = par.tp * par.pp * par.cp
    dp = world_size // size
    if world_size % size == 0 and prompts % dp:
        yield (
            f"trainer.prompts_per_step={prompts} is not a multiple of the data-parallel size {dp} "
            f"(world size {world_size} / tp*pp*cp {size}); legal: multiples of {dp}"
        )
    if world_size % size == 0 and minibatch * rollout.n < dp:
        yield (
            f"trainer.minibatch_size*rollout.n={minibatch}*{rollout.n}={minibatch * rollout.n} leaves some of the "
            f"{dp} data-parallel ranks without a sequence; make it at least {dp}"
        )
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    pieces = 2 * par.cp if par.cp > 1 else 1  # context parallelism cuts every sequence into so many
    rounded = -(-longest // pieces) * pieces
    if trainer.packing and trainer.max_tokens_per_microbatch < rounded:
        padded = "" if rounded == longest else f", rounded up to a multiple of 2*cp={pieces}"
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest}{padded}; make it at least {rounded}"
        )


def _schedule(config: Config) -> Iterator[str]:
    steps, optim, algorithm = config.trainer.steps, config.optim, config.algorithm
    if optim.warmup_steps >= steps:
        yield f"optim.warmup_steps={optim.warmup_steps} must be below trainer.steps={steps}"
    if algorithm.critic_warmup_steps >= steps and algorithm.advantage == "gae":
        yield (
            f"algorithm.critic_warmup_steps={algorithm.critic_warmup_steps} must be below trainer.steps={steps}; "
            "the actor would never train"
        )
    if config.trainer.val_interval and not (config.data.val_files or config.data.val_size):
        yield (
            f"trainer.val_interval={config.trainer.val_interval} needs validation prompts; "
            "set data.val_files or data.val_size"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.advantage == "grpo" and config.rollout.n < 2:
        yield f"rollout.n={config.rollout.n}: algorithm.advantage=grpo compares samples of a prompt; legal: at least 2"
    if algorithm.advantage == "grpo" and algorithm.kl_placement == "reward":
        yield (
            "algorithm.kl_placement=reward with advantage=grpo: GRPO has one reward for a whole response, a KL per "
            "token has no place in it; legal: none, loss"
        )
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip={algorithm.dual_clip:g}: legal: 0 (off) or above 1"


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.source == "model" and not reward.model_path:
        yield "reward.source=model needs reward.model_path: name a sequence-classification checkpoint directory"
    if reward.source == "http" and not reward.url.startswith(("http://", "https://")):
        yield f"reward.url={reward.url!r}: reward.source=http needs an address that begins with http:// or https://"


def _fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > facts.max_position_embeddings:
        yield (
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest} is above the "
            f"{facts.max_position_embeddings} positions of {key}; make them shorter"
        )
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < facts.vocab_size]
    if outside and key == "model.path":
        yield f"rollout.stop_token_ids={outside}: legal: 0 to {facts.vocab_size - 1}, the vocabulary of {key}"


def _keys(section: str, area: type) -> tuple[str, ...]:
    """Every key of a section."""
    return tuple(f"{section}.{field.name}" for field in dataclasses.fields(area))


@dataclass(frozen=True)
class _Needs:
    """Keys that are read only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it
    holds: Callable[[Config], bool]


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
        _Needs(keys, f"engine={engine}", lambda config, engine=engine: config.engine == engine)  # type: ignore[misc]
        for engine, keys in _ENGINE_KEYS.items()
    ),
    *(
        _Needs(keys, f"reward.source={name}", lambda config, name=name: config.reward.source == name)  # type: ignore[misc]
        for name, keys in _SOURCE_KEYS.items()
    ),
    _Needs(
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
    _Needs(
        ("algorithm.grpo_std_normalization",),
        "algorithm.advantage=grpo",
        lambda config: config.algorithm.advantage == "grpo",
    ),
    _Needs(
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
    _Needs(
        ("algorithm.kl_target", "algorithm.kl_horizon"),
        "algorithm.kl_control=adaptive",
        lambda config: config.algorithm.kl_control == "adaptive",
    ),
    _Needs(("parallel.overlap_p2p",), "parallel.vpp above 1", lambda config: config.parallel.vpp > 1),
    _Needs(
        ("parallel.pipeline", "parallel.first_stage_layers", "parallel.last_stage_layers"),
        "parallel.pp above 1",
        lambda config: config.parallel.pp > 1,
    ),
    _Needs(("model.recompute_modules",), "model.recompute=selective", lambda c: c.model.recompute == "selective"),
    _Needs(("model.recompute_layers",), "model.recompute=full", lambda config: config.model.recompute == "full"),
    _Needs(
        ("ddp.fsdp_sharding",),
        "ddp.implementation=megatron_fsdp",
        lambda config: config.ddp.implementation == "megatron_fsdp",
    ),
    _Needs(("ddp.bucket_size",), "ddp.overlap_grad_reduce=true", lambda config: config.ddp.overlap_grad_reduce),
    _Needs(
        ("ddp.bucket_size", "ddp.reduce_scatter_fp32_accumulation", "optim.distributed_optimizer"),
        "ddp.implementation=ddp",
        lambda config: config.ddp.implementation == "ddp",
    ),
    _Needs(
        ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather"),
        "ddp.implementation=ddp or megatron_fsdp",
        lambda config: config.ddp.implementation != "torch_fsdp2",
    ),
    _Needs(
        ("ddp.optimizer_instances",),
        "optim.distributed_optimizer=true",
        lambda config: config.optim.distributed_optimizer,
    ),
    _Needs(
        ("moe.routing_replay",),
        "a pass that computes old log-probs: algorithm.old_logprobs=recompute, several updates a step, or a KL in the "
        "reward",
        lambda config: not is_on_policy(config),
    ),
    _Needs(("optim.moment_dtype",), "optim.precision_aware=true", lambda config: config.optim.precision_aware),
    _Needs(
        ("optim.min_lr_ratio",),
        "optim.schedule=linear or cosine",
        lambda config: config.optim.schedule != "constant",
    ),
    _Needs(("trainer.max_tokens_per_microbatch",), "trainer.packing=true", lambda config: config.trainer.packing),
    _Needs(("trainer.micro_batch_size",), "trainer.packing=false", lambda config: not config.trainer.packing),
    _Needs(("data.val_files", "data.val_size"), "trainer.val_interval above 0", lambda c: c.trainer.val_interval > 0),
    _Needs(("data.val_size",), "no data.val_files", lambda config: not config.data.val_files),
    _Needs(
        ("checkpoint.keep_best", "checkpoint.keep_interval", "checkpoint.async_save"),
        "checkpoint.save_interval above 0",
        lambda config: config.checkpoint.save_interval > 0,
    ),
    _Needs(("checkpoint.fallback",), "checkpoint.resume=auto", lambda config: config.checkpoint.resume == "auto"),
    _Needs(("rollout.batch_size",), "rollout.backend=hf", lambda config: config.rollout.backend == "hf"),
    _Needs(
        _keys("sglang", SglangConfig),
        "rollout.backend=sglang",
        lambda config: config.rollout.backend == "sglang",
    ),
    _Needs(
        tuple(f"sglang.{name}" for name in ("servers", "tp", "host", "max_total_tokens", "mem_fraction")),
        "servers that the run starts: no sglang.urls",
        lambda config: not config.sglang.urls,
    ),
    _Needs(("sglang.keys_file",), "sglang.urls", lambda config: bool(config.sglang.urls)),
    _Needs(
        ("sglang.max_failed_share",),
        "sglang.failed_samples=mask",
        lambda config: config.sglang.failed_samples == "mask",
    ),
    _Needs(("sglang.partial_rollout",), "trainer.async_steps=1", lambda config: config.trainer.async_steps > 0),
    _Needs(("sglang.probe_limit",), "sglang.probe_tokens above 0", lambda config: config.sglang.probe_tokens > 0),
)


def _without_effect(config: Config) -> Iterator[str]:
    """Settings other than the default that nothing would read."""
    values, defaults = flat(config), flat(Config())
    for need in _NEEDS:
        if need.holds(config):
            continue
        for key in need.keys:
            if values[key] != defaults[key]:
                value = str(values[key])
                value = value.lower() if value in ("True", "False") else value
                yield f"{key}={value} has no effect: it needs {need.condition}; set that or remove {key}"


def is_on_policy(config: Config) -> bool:
    """Whether every update is made with the weights that sampled, and nothing before it needs the old log-probs."""
    algorithm, trainer = config.algorithm, config.trainer
    single_update = algorithm.epochs == 1 and trainer.minibatch_size == trainer.prompts_per_step
    needed_before = algorithm.kl_placement == "reward" or algorithm.critic_warmup_steps > 0 or algorithm.tis_cap > 0
    sampled_now = trainer.async_steps == 0
    return algorithm.old_logprobs == "auto" and single_update and sampled_now and not needed_before


def flat(config: Config) -> dict[str, object]:
    """Every setting by its dotted key."""
    found: dict[str, object] = {}
    for section, entries in dataclasses.asdict(config).items():
        if isinstance(entries, dict):
            found |= {f"{section}.{name}": value for name, value in entries.items()}
        else:
            found[section] = entries
    return found
