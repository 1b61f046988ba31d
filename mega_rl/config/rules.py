"""Rules between fields, and between fields and the model: what is found wrong is listed, nothing is raised.

Each line names the values, the rule and what is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mega_rl.config.schema import Config

MAX_LISTED = 12  # legal values that one line repeats
MAX_CANDIDATE = 4096  # largest divisor that is looked for


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know of a checkpoint."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    multi_latent_attention: bool = False


def check(config: Config, *, world_size: int, models: Mapping[str, ModelFacts] | None = None) -> list[str]:
    """Every broken rule, one line each; an empty list for a config that can run on `world_size` ranks.

    `models` maps the config key that names a checkpoint ("model.path", "model.critic_path", ...) to its facts; rules
    that need the facts of a model not given are left out.
    """
    problems = [*_layout(config, world_size), *_batches(config, world_size), *_schedule(config), *_algorithm(config)]
    for key, facts in (models or {}).items():
        problems += _fits_model(config, key, facts)
    return [*problems, *_without_effect(config)]


def _layout(config: Config, world_size: int) -> Iterator[str]:
    par = config.parallel
    size = par.tp * par.pp * par.cp
    if world_size % size:
        yield (
            f"world size {world_size} is not a multiple of parallel.tp*pp*cp={par.tp}*{par.pp}*{par.cp}={size}; "
            f"start a multiple of {size} ranks, or choose sizes whose product divides {world_size}"
        )
    if par.cp > 1:
        yield f"parallel.cp={par.cp}: context parallelism is not in this release; legal: 1"
    if par.sequence_parallel and par.tp == 1:
        yield "parallel.sequence_parallel=true needs parallel.tp above 1; there is nothing to shard over with tp=1"
    if par.vpp > 1 and par.pp == 1:
        yield f"parallel.vpp={par.vpp} needs parallel.pp above 1; set vpp=1"
    if par.vpp > 1 and par.pp == 2 and not par.overlap_p2p:
        # Megatron-Core checks this in its training arguments only; its schedule runs and gives wrong gradients.
        yield f"parallel.vpp={par.vpp} with pp=2 needs parallel.overlap_p2p=true; without it gradients are wrong"


def _batches(config: Config, world_size: int) -> Iterator[str]:
    trainer, rollout, par = config.trainer, config.rollout, config.parallel
    prompts, minibatch = trainer.prompts_per_step, trainer.minibatch_size
    if prompts % minibatch:
        yield (
            f"trainer.minibatch_size={minibatch} does not divide trainer.prompts_per_step={prompts}; "
            f"legal: {_listed(_divisors(prompts))}"
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
    if trainer.packing and trainer.max_tokens_per_microbatch < longest:
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest}; make it at least {longest}"
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


def _fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    par = config.parallel
    legal = _listed([tp for tp in _divisors(facts.num_heads) if not _cut_problems(tp, facts)])
    for problem in _cut_problems(par.tp, facts):
        yield f"parallel.tp={par.tp} {problem} of {key}; legal: {legal}"
    stages = par.pp * par.vpp
    if facts.num_layers % stages:
        yield (
            f"parallel.pp*vpp={par.pp}*{par.vpp}={stages} does not divide the {facts.num_layers} layers of {key}; "
            f"legal products: {_listed(_divisors(facts.num_layers))}"
        )
    if facts.multi_latent_attention and par.tp > 1 and not par.sequence_parallel:
        # Without it Megatron-Core sums the gradient of the latent norms over tp once too often.
        yield f"{key} has multi-latent attention: parallel.tp={par.tp} needs parallel.sequence_parallel=true"
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > facts.max_position_embeddings:
        yield (
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest} is above the "
            f"{facts.max_position_embeddings} positions of {key}; make them shorter"
        )
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < facts.vocab_size]
    if outside and key == "model.path":
        yield f"rollout.stop_token_ids={outside}: legal: 0 to {facts.vocab_size - 1}, the vocabulary of {key}"


def _cut_problems(tp: int, facts: ModelFacts) -> list[str]:
    problems = []
    if facts.num_heads % tp:
        problems.append(f"does not divide the {facts.num_heads} attention heads")
    if facts.num_kv_heads % tp and tp % facts.num_kv_heads:
        problems.append(f"neither divides nor is a multiple of the {facts.num_kv_heads} key-value heads")
    if facts.ffn_hidden_size % tp:
        problems.append(f"does not divide the feed-forward size {facts.ffn_hidden_size}")
    return problems


@dataclass(frozen=True)
class _Needs:
    """Keys that are read only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it
    holds: Callable[[Config], bool]


_NEEDS = (
    _Needs(
        (
            "model.critic_path",
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
        ("model.ref_path", "algorithm.kl_estimator", "algorithm.kl_coef", "algorithm.kl_control"),
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
        ("optim.min_lr_ratio",),
        "optim.schedule=linear or cosine",
        lambda config: config.optim.schedule != "constant",
    ),
    _Needs(("trainer.max_tokens_per_microbatch",), "trainer.packing=true", lambda config: config.trainer.packing),
    _Needs(("trainer.micro_batch_size",), "trainer.packing=false", lambda config: not config.trainer.packing),
    _Needs(("data.val_files", "data.val_size"), "trainer.val_interval above 0", lambda c: c.trainer.val_interval > 0),
    _Needs(("data.val_size",), "no data.val_files", lambda config: not config.data.val_files),
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


def flat(config: Config) -> dict[str, object]:
    """Every setting by its dotted key."""
    sections = dataclasses.asdict(config)
    return {f"{section}.{name}": value for section, entries in sections.items() for name, value in entries.items()}


def _divisors(number: int) -> list[int]:
    """Divisors up to MAX_CANDIDATE, and the number itself."""
    small = [candidate for candidate in range(1, min(number, MAX_CANDIDATE + 1)) if number % candidate == 0]
    return [*small, number]


def _listed(values: list[int]) -> str:
    words = [str(value) for value in values[:MAX_LISTED]]
    return ", ".join(words) + (", ..." if len(values) > MAX_LISTED else "")
