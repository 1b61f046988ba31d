"""Conditions under which settings are read, and questions that several settings of a config answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from mega_rl.config.choices import (
    ADVANTAGE,
    DATA,
    corrects,
    has_reference,
    is_sampled,
    kind_of_run,
    needs_critic,
    reads_reference,
)
from mega_rl.config.keys import FIELDS, SECTIONS, TAGGED, keys_below, open_ended, value_of, with_settings
from mega_rl.config.schema import Config, EngineConfig, RolloutConfig, TrainerConfig
from mega_rl.config.schema.rollout import runs_code

# Settings of a run that samples nothing, whatever its kind.
_UNSAMPLED = {"reward.source.name": "none", "rollout.backend": "none", "rollout.max_new_tokens": 1}
_OF_SAMPLES = (
    "algorithm.advantage algorithm.loss algorithm.correction algorithm.entropy_coef algorithm.loss_aggregation "
    "algorithm.train_turns algorithm.old_logprobs algorithm.value_clip algorithm.epochs algorithm.critic_warmup_steps "
    "algorithm.kl data.source_key data.curriculum reward rollout trainer.async_steps model.critic_path "
    "optim.critic_lr metrics.rollout_interval metrics.rollout_samples metrics.print_samples metrics.records "
    "validation.n validation.temperature validation.top_p validation.top_k validation.max_new_tokens validation.chunk "
    "validation.k validation.right_above validation.right_part"
)
# Setting with a value -> keys that are read only then; a section stands for all keys in it.
_EQUAL = {
    "engine.backend=megatron": "engine.megatron model.recompute_layers",
    "engine.backend=fsdp": "engine.fsdp",
    "model.recompute=selective": "model.recompute_modules",
    "model.recompute=full": "model.recompute_layers",
    "reward.source=function": "reward.function reward.functions",
    "algorithm.kl.control=adaptive": "algorithm.kl.target algorithm.kl.horizon",
    "engine.megatron.ddp.overlap_grad_reduce=true": "engine.megatron.ddp.bucket_size "
    "engine.megatron.ddp.overlap_param_gather",
    "engine.megatron.optimizer.distributed=true": "engine.megatron.ddp.overlap_param_gather "
    "engine.megatron.ddp.optimizer_instances engine.megatron.optimizer.precision_aware "
    "engine.megatron.ddp.reduce_scatter_fp32_accumulation",
    "engine.megatron.optimizer.precision_aware=true": "engine.megatron.optimizer.moment_dtype",
    "trainer.microbatch.packing=true": "trainer.microbatch.max_tokens",
    "trainer.microbatch.packing=false": "trainer.microbatch.size",
    "data.chat.template=true": "data.chat.template_kwargs data.chat.system_prompt data.chat.date",
    "checkpoint.resume=auto": "checkpoint.fallback",
    "rollout.backend=hf": "rollout.hf",
    "rollout.backend=sglang": "rollout.sglang",
    "rollout.sglang.arrival=free": "rollout.sglang.sync.in_flight",
    "engine.megatron.moe.routing_replay=true": "rollout.sglang.return_routing",
}
# Setting that is given, or above 0 -> keys that are read only then.
_GIVEN = {
    "trainer.async_steps": "rollout.sglang.arrival rollout.dynamic_sampling.expired",
    "algorithm.kl.reference_interval": "algorithm.kl.reference_rate",
    "engine.megatron.reference.pp": "engine.megatron.reference.pipeline",
    "reward.overlong.buffer_tokens": "reward.overlong.penalty",
    "trainer.val_interval": "data.val_files data.val_size validation",
    "validation.temperature": "validation.top_p validation.top_k",
    "data.stream.rows": "data.stream.timeout_s",
    "model.adapter.rank": "model.adapter rollout.sglang.sync.adapter",
    "data.mixture.sources": "data.mixture.temperature",
    "reward.functions": "reward.sources",
    "reward.sources": "data.source_key",
    "checkpoint.save_interval": "checkpoint.keep_best checkpoint.keep_interval checkpoint.async_save",
    "metrics.records.interval": "metrics.records.max_mib metrics.records.entropy metrics.records.weights",
    "rollout.sglang.urls": "rollout.sglang.keys_file",
    "rollout.dynamic_sampling.max_generations": "rollout.dynamic_sampling.prompts rollout.dynamic_sampling.expired",
}
# Keys, their condition as a user would write it, and whether a config has that.
_NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    (_OF_SAMPLES, "algorithm.kind=rl: other kinds sample nothing", is_sampled),
    (
        "model.critic_path model.critic_attn_implementation optim.critic_lr algorithm.value_clip "
        "algorithm.critic_warmup_steps",
        ADVANTAGE.with_need("needs_critic"),
        needs_critic,
    ),
    (
        "model.ref_path model.ref_attn_implementation engine.megatron.reference",
        f"a reference: algorithm.kl=reward or loss, or {ADVANTAGE.with_need('needs_reference')}",
        has_reference,
    ),
    ("engine.megatron.sequence_parallel", "engine.megatron.tp above 1", lambda c: c.engine.megatron.tp > 1),
    ("engine.megatron.vpp engine.megatron.pipeline", "engine.megatron.pp above 1", lambda c: c.engine.megatron.pp > 1),
    (
        "engine.megatron.moe.routing_replay",
        "a pass that computes old log-probs: algorithm.old_logprobs=recompute, or auto with several updates a step",
        lambda c: has_pass_for_old_logprobs(c),
    ),
    (
        "algorithm.correction",
        "algorithm.old_logprobs=auto or recompute: with rollout the ratio itself is to what sampled",
        lambda c: c.algorithm.old_logprobs != "rollout" or not corrects(c),
    ),
    (
        "algorithm.train_turns algorithm.advantage.discount_per",
        "turns: rollout.source=path/to/file.py:class",
        lambda c: c.rollout.source.name != "single_turn",
    ),
    ("optim.min_lr_ratio", "optim.schedule=linear or cosine", lambda c: c.optim.schedule != "constant"),
    (
        "reward.source.timeout_s reward.source.memory_mib",
        "reward.source.workers other than 0",
        lambda c: c.reward.source.name != "function" or c.reward.calls.workers != 0,
    ),
    ("reward.source.failure_score", "reward.source.on_failure=score", lambda c: c.reward.calls.on_failure == "score"),
    (
        "reward.overlong.buffer_tokens rollout.dynamic_sampling.max_generations",
        "rewards, which reward.source=none has not",
        lambda c: c.reward.source.name != "none",
    ),
    (
        "optim.warmup_steps",
        "trainer.steps above its sum with algorithm.critic_warmup_steps, or it does not end within the run",
        lambda c: c.optim.warmup_steps + c.algorithm.critic_warmup_steps < c.trainer.steps,
    ),
    (
        "algorithm.critic_warmup_steps",
        "trainer.steps above it, or the actor never trains",
        lambda c: c.algorithm.critic_warmup_steps < c.trainer.steps,
    ),
    (
        "trainer.val_interval",
        "data.val_files, data.val_size, validation.sets, or a data.source with has_validation = True",
        lambda c: bool(c.data.val_files or c.data.val_size or c.validation.sets or DATA.needs(c, "has_validation")),
    ),
    (
        "data.val_files data.val_size",
        "a data.source without has_validation, which has held-out rows of its own",
        lambda c: not DATA.needs(c, "has_validation"),
    ),
    ("data.val_size", "no data.val_files", lambda c: not c.data.val_files),
    ("trainer.steps", "no trainer.epochs", lambda c: not c.trainer.epochs),
    ("data.train_files", "data.source=files and no data.mixture", lambda c: c.data.reads_train_files),
    ("reward.sandbox", "the reward function code_tests", lambda c: runs_code(c.reward)),
    ("reward.function", "no reward.functions", lambda c: not c.reward.functions),
    (
        "reward.weights",
        "named parts: reward.source=http, reward.functions, or reward.function=path/to/file.py:function",
        lambda c: may_have_parts(c),
    ),
    (
        "rollout.dtype trainer.async_steps",
        "rollout.backend=hf or sglang: a source of one's own gets the weights as they train, and samples when asked",
        lambda c: c.rollout.backend != "none",
    ),
    (
        "rollout.verify_interval",
        "rollout.backend=hf, or sglang with trainer.async_steps",
        lambda c: c.rollout.backend == "hf" or (c.rollout.backend == "sglang" and bool(c.trainer.async_steps)),
    ),
    (
        "rollout.sglang.sync.interval",
        "trainer.async_steps and servers with their own devices: else nothing samples while the batch trains",
        lambda c: c.trainer.async_steps > 0 and c.rollout.sglang.placement != "colocated",
    ),
    (
        "rollout.sglang.sync.interval",
        "more optimizer steps a step than that: algorithm.epochs*trainer.prompts_per_step/trainer.minibatch_size",
        lambda c: updates_of_a_batch(c) > c.rollout.sglang.sync.interval,
    ),
    ("rollout.sglang.server", "no rollout.sglang.urls: servers that it starts", lambda c: not c.rollout.sglang.urls),
    (
        "rollout.dynamic_sampling.max_generations",
        "an estimator that compares samples of a prompt, as " + ADVANTAGE.with_need("needs_groups"),
        lambda c: ADVANTAGE.needs(c, "needs_groups"),
    ),
)


class Unmet(NamedTuple):
    """A setting other than the default that has no effect."""

    key: str  # "engine.megatron.tp"
    value: object
    needs: str  # its condition, as the user would write it: "engine.backend=megatron"

    @property
    def setting(self) -> str:
        """The setting as one writes it: "engine.megatron.tp=2"."""
        value = str(self.value)
        return f"{self.key}={value.lower() if isinstance(self.value, bool) else value}"


def unmet(config: Config) -> Iterator[Unmet]:
    """Yield each non-default setting whose condition does not hold, with its first unmet condition."""
    default, listed = with_settings(Config(), implied(config.algorithm.kind.name)), set[str]()
    for keys, needs in _missed(open_ended(config)):
        for key in (key for name in keys.split() for key in (keys_below(name) if name in SECTIONS else [name])):
            section, _, name = key.rpartition(".")
            usual: object = type(value_of(config, section))() if section in TAGGED else value_of(default, section)
            value = getattr(value_of(config, section), name, None)
            if key not in listed and value is not None and value != getattr(usual, name):
                listed.add(key)
                yield Unmet(key, value, needs)


def implied(kind: str) -> dict[str, object]:
    """Return the settings that a kind of training implies, by key; none of those that sample."""
    own = FIELDS["algorithm.kind"].metadata["kinds"].get(kind)
    return {} if own is None or own.form == "prompts" else {**_UNSAMPLED, "rollout.n": own.rows}


def _missed(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys and condition of each condition that does not hold."""
    for needs, keys in _EQUAL.items():
        key, _, value = needs.partition("=")
        if str(value_of(config, key)).lower() != value:
            yield keys, needs
    for key, keys in _GIVEN.items():
        if not value_of(config, key):
            yield keys, key
    yield from ((keys, needs) for keys, needs, holds in _NEEDS if not holds(config))


def models_take_turns(engine: EngineConfig, several: bool, *, colocated: bool) -> bool:
    """Return whether several models take turns on the device; colocated: with servers."""
    wanted, movable = engine.resident_roles, not (engine.backend == "fsdp" and engine.fsdp.cpu_offload)
    return several and movable and (wanted == "one" or (wanted == "auto" and colocated))


def shares_devices(rollout: RolloutConfig, trainer: TrainerConfig) -> bool:
    """Return whether servers are placed on the trainer's devices if it trains on GPUs."""
    sglang = rollout.sglang
    if sglang.placement == "auto":
        return not sglang.urls and not trainer.async_steps
    return sglang.placement == "colocated"


def may_have_parts(config: Config) -> bool:
    """Return whether rewards may have named parts: those of a service and of a user's function."""
    reward = config.reward
    return reward.source.name == "http" or (
        reward.source.name == "function" and (bool(reward.functions) or ":" in reward.function)
    )


def has_pass_for_old_logprobs(config: Config) -> bool:
    """Return whether a step has a separate actor forward for the log-probs before the update."""
    return config.algorithm.old_logprobs != "rollout" and not is_on_policy(config)


def updates_of_a_batch(config: Config) -> int:
    """Return the optimizer steps on the rollouts of one step."""
    return config.algorithm.epochs * config.trainer.prompts_per_step // config.trainer.minibatch_size


def is_on_policy(config: Config) -> bool:
    """Return whether updates use the weights that sampled and nothing before needs the old log-probs."""
    algorithm, trainer = config.algorithm, config.trainer
    single_update = updates_of_a_batch(config) == 1
    needed_before = algorithm.kl.name == "reward"
    needed_before = needed_before or (ADVANTAGE.needs(config, "needs_reference") and reads_reference(config))
    needed_before = needed_before or algorithm.critic_warmup_steps > 0 or corrects(config)
    sampled_now = trainer.async_steps == 0
    return algorithm.old_logprobs == "auto" and single_update and sampled_now and not needed_before


Role = Literal["actor", "critic", "reference", "reward"]


class RequestedAttention(NamedTuple):
    """A word of `config.setting.ATTENTION` and the key that asks for it."""

    word: str
    key: str


def requested_attention(config: Config, role: Role) -> RequestedAttention:
    """Return the request of a role's own key, or where that is "same" that of `model.attn_implementation`."""
    model = config.model
    own = {
        "actor": RequestedAttention("same", ""),
        "critic": RequestedAttention(model.critic_attn_implementation, "model.critic_attn_implementation"),
        "reference": RequestedAttention(model.ref_attn_implementation, "model.ref_attn_implementation"),
        "reward": RequestedAttention(
            getattr(config.reward.source, "attn_implementation", "same"), "reward.source.attn_implementation"
        ),
    }[role]
    return RequestedAttention(model.attn_implementation, "model.attn_implementation") if own.word == "same" else own


class RequestedModel(NamedTuple):
    """The model of a role as its settings ask for it."""

    path: Path
    attention: RequestedAttention
    head: Literal["lm", "value"] = "lm"


def requested_models(config: Config) -> dict[Role, RequestedModel]:
    """Return the models of a run by role, the actor first."""
    model, has_reward = config.model, config.reward.source.name == "model"
    there: dict[Role, bool] = {
        **{"actor": True, "critic": needs_critic(config), "reference": has_reference(config), "reward": has_reward}
    }
    own = {"critic": model.critic_path, "reference": model.ref_path, "reward": config.reward.model_path}
    scored = ("critic", "reward", *(["actor"] if kind_of_run(config).scores else []))
    return {
        role: RequestedModel(
            Path(own.get(role) or model.path), requested_attention(config, role), "value" if role in scored else "lm"
        )
        for role, is_there in there.items()
        if is_there
    }
