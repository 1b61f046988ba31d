"""Settings that are read only where others hold: a table, and the settings of a config that miss their condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mega_rl.config.choices import ADVANTAGE, DATA, corrects, has_reference, needs_critic, reads_reference
from mega_rl.config.keys import SECTIONS, TAGGED, keys_below, open_ended, value_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.sandbox import runs_code

_CRITIC = "model.critic_path model.critic_attn_implementation optim.critic_lr algorithm.value_clip "
_REFERENCE = f"a reference: algorithm.kl=reward or loss, or {ADVANTAGE.with_need('needs_reference')}"
_PASS = "a pass that computes old log-probs: algorithm.old_logprobs=recompute, or auto with several updates a step"
_RATIO = "algorithm.old_logprobs=auto or recompute: with rollout the ratio itself is to what sampled"
_HELD_OUT = "data.val_files, data.val_size, validation.sets, or a data.source with has_validation = True"
_PARTS = "named parts: reward.source=http, reward.functions, or reward.function=path/to/file.py:function"
_REPLAY = "engine.megatron.moe.routing_replay=true and rollout.source=single_turn"

# Keys (a section stands for all keys in it), what they need as a user would write it, and whether a config has that.
_NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("engine.megatron", "engine.backend=megatron", lambda c: c.engine.backend == "megatron"),
    ("engine.fsdp", "engine.backend=fsdp", lambda c: c.engine.backend == "fsdp"),
    ("model.recompute_modules", "model.recompute=selective", lambda c: c.model.recompute == "selective"),
    ("model.recompute_layers", "model.recompute=full", lambda c: c.model.recompute == "full"),
    ("model.recompute_layers", "engine.backend=megatron", lambda c: c.engine.backend == "megatron"),
    ("reward.function reward.functions", "reward.source=function", lambda c: c.reward.source.name == "function"),
    (f"{_CRITIC} algorithm.critic_warmup_steps", ADVANTAGE.with_need("needs_critic"), lambda c: needs_critic(c)),
    ("model.ref_path model.ref_attn_implementation engine.megatron.reference", _REFERENCE, lambda c: has_reference(c)),
    (
        "algorithm.kl.target algorithm.kl.horizon",
        "algorithm.kl.control=adaptive",
        lambda c: c.algorithm.kl.control == "adaptive",
    ),
    (
        "algorithm.kl.reference_rate",
        "algorithm.kl.reference_interval above 0",
        lambda c: c.algorithm.kl.reference_interval > 0,
    ),
    ("engine.megatron.sequence_parallel", "engine.megatron.tp above 1", lambda c: c.engine.megatron.tp > 1),
    ("engine.megatron.vpp engine.megatron.pipeline", "engine.megatron.pp above 1", lambda c: c.engine.megatron.pp > 1),
    ("engine.megatron.overlap_p2p", "engine.megatron.vpp above 1", lambda c: c.engine.megatron.vpp > 1),
    (
        "engine.megatron.reference.pipeline",
        "engine.megatron.reference.pp above 1",
        lambda c: c.engine.megatron.reference.pp > 1,
    ),
    (
        "engine.megatron.ddp.bucket_size engine.megatron.ddp.overlap_param_gather",
        "engine.megatron.ddp.overlap_grad_reduce=true",
        lambda c: c.engine.megatron.ddp.overlap_grad_reduce,
    ),
    (
        "engine.megatron.ddp.overlap_param_gather engine.megatron.ddp.optimizer_instances "
        "engine.megatron.optimizer.precision_aware engine.megatron.ddp.reduce_scatter_fp32_accumulation",
        "engine.megatron.optimizer.distributed=true",
        lambda c: c.engine.megatron.optimizer.distributed,
    ),
    (
        "engine.megatron.optimizer.moment_dtype",
        "engine.megatron.optimizer.precision_aware=true",
        lambda c: c.engine.megatron.optimizer.precision_aware,
    ),
    ("engine.megatron.moe.routing_replay", _PASS, lambda c: has_pass_for_old_logprobs(c)),
    ("algorithm.correction", _RATIO, lambda c: c.algorithm.old_logprobs != "rollout" or not corrects(c)),
    ("optim.min_lr_ratio", "optim.schedule=linear or cosine", lambda c: c.optim.schedule != "constant"),
    ("trainer.microbatch.max_tokens", "trainer.microbatch.packing=true", lambda c: c.trainer.microbatch.packing),
    ("trainer.microbatch.size", "trainer.microbatch.packing=false", lambda c: not c.trainer.microbatch.packing),
    (
        "reward.source.timeout_s reward.source.memory_mib",
        "reward.source.workers other than 0",
        lambda c: c.reward.source.name != "function" or c.reward.calls.workers != 0,
    ),
    ("reward.source.failure_score", "reward.source.on_failure=score", lambda c: c.reward.calls.on_failure == "score"),
    ("reward.overlong.penalty", "reward.overlong.buffer_tokens above 0", lambda c: c.reward.overlong.buffer_tokens > 0),
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
        "trainer.async_steps",
        "rollout.backend=sglang and rollout.source=single_turn: others generate in the trainer's processes",
        lambda c: c.rollout.backend == "sglang" and c.rollout.source.name == "single_turn",
    ),
    (
        "rollout.dynamic_sampling.max_generations",
        "trainer.async_steps=0: the prompts of the next step are known when this one's are scored",
        lambda c: c.trainer.async_steps == 0,
    ),
    (
        "trainer.val_interval",
        _HELD_OUT,
        lambda c: bool(c.data.val_files or c.data.val_size or c.validation.sets or DATA.needs(c, "has_validation")),
    ),
    ("data.val_files data.val_size validation", "trainer.val_interval above 0", lambda c: c.trainer.val_interval > 0),
    ("validation.top_p validation.top_k", "validation.temperature above 0", lambda c: c.validation.temperature > 0),
    (
        "data.val_files data.val_size",
        "a data.source without has_validation, which has held-out rows of its own",
        lambda c: not DATA.needs(c, "has_validation"),
    ),
    ("data.val_size", "no data.val_files", lambda c: not c.data.val_files),
    ("trainer.steps", "no trainer.epochs", lambda c: not c.trainer.epochs),
    ("data.train_files", "data.source=files and no data.mixture", lambda c: c.data.reads_train_files),
    ("data.stream.timeout_s", "data.stream.rows above 0", lambda c: c.data.stream.rows > 0),
    ("data.mixture.temperature", "data.mixture.sources", lambda c: bool(c.data.mixture.sources)),
    ("reward.sandbox", "the reward function code_tests", lambda c: runs_code(c.reward)),
    ("reward.function", "no reward.functions", lambda c: not c.reward.functions),
    ("reward.sources", "reward.functions", lambda c: bool(c.reward.functions)),
    ("data.source_key", "reward.sources", lambda c: bool(c.reward.sources)),
    ("reward.weights", _PARTS, lambda c: may_have_parts(c)),
    (
        "data.chat.template_kwargs data.chat.system_prompt",
        "data.chat.template=true",
        lambda c: c.data.chat.template == "true",
    ),
    ("data.chat.date", "data.chat.template=true", lambda c: c.data.chat.template == "true"),
    (
        "checkpoint.keep_best checkpoint.keep_interval checkpoint.async_save",
        "checkpoint.save_interval above 0",
        lambda c: c.checkpoint.save_interval > 0,
    ),
    ("checkpoint.fallback", "checkpoint.resume=auto", lambda c: c.checkpoint.resume == "auto"),
    (
        "metrics.records.max_mib metrics.records.entropy metrics.records.weights",
        "metrics.records.interval above 0",
        lambda c: c.metrics.records.interval > 0,
    ),
    (
        "rollout.dtype rollout.verify_interval",
        "rollout.backend=hf or sglang: a source of one's own gets the weights as they train",
        lambda c: c.rollout.backend != "none",
    ),
    ("rollout.hf", "rollout.backend=hf", lambda c: c.rollout.backend == "hf"),
    ("rollout.sglang", "rollout.backend=sglang", lambda c: c.rollout.backend == "sglang"),
    (
        "rollout.sglang.server",
        "servers that the run starts: no rollout.sglang.urls",
        lambda c: not c.rollout.sglang.urls,
    ),
    ("rollout.sglang.keys_file", "rollout.sglang.urls", lambda c: bool(c.rollout.sglang.urls)),
    (
        "rollout.sglang.return_routing",
        _REPLAY,
        lambda c: c.engine.megatron.moe.routing_replay and c.rollout.source.name == "single_turn",
    ),
    ("rollout.sglang.partial_rollout", "trainer.async_steps=1", lambda c: c.trainer.async_steps == 1),
    (
        "rollout.dynamic_sampling.prompts",
        "rollout.dynamic_sampling.max_generations above 0",
        lambda c: c.rollout.dynamic_sampling.max_generations > 0,
    ),
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
    """Yield every setting other than the default whose condition does not hold, each once, with its first condition."""
    default, whole, found = Config(), open_ended(config), set[str]()
    for keys, needs, holds in _NEEDS:
        if holds(whole):
            continue
        for key in (key for name in keys.split() for key in (keys_below(name) if name in SECTIONS else [name])):
            section, _, name = key.rpartition(".")
            usual = type(value_of(config, section))() if section in TAGGED else value_of(default, section)
            value = getattr(value_of(config, section), name, None)
            if key not in found and value is not None and value != getattr(usual, name):
                found.add(key)
                yield Unmet(key, value, needs)


def has_several_models(config: Config) -> bool:
    """Return whether a run has a model besides the actor."""
    return needs_critic(config) or has_reference(config) or config.reward.source.name == "model"


def models_take_turns(config: Config, *, colocated: bool) -> bool:
    """Return whether each model has the device to itself while it works; colocated: with the rollout servers."""
    wanted = config.engine.resident_roles
    movable = not (config.engine.backend == "fsdp" and config.engine.fsdp.cpu_offload)
    return has_several_models(config) and movable and (wanted == "one" or (wanted == "auto" and colocated))


def may_have_parts(config: Config) -> bool:
    """Return whether rewards may have named parts: those of a service and of a user's function."""
    reward = config.reward
    return reward.source.name == "http" or (
        reward.source.name == "function" and (bool(reward.functions) or ":" in reward.function)
    )


def has_pass_for_old_logprobs(config: Config) -> bool:
    """Return whether a step has a forward of the actor of its own for the log-probs before the update."""
    return config.algorithm.old_logprobs != "rollout" and not is_on_policy(config)


def updates_of_a_batch(config: Config) -> int:
    """Return the optimizer steps on the rollouts of one step."""
    return config.algorithm.epochs * config.trainer.prompts_per_step // config.trainer.minibatch_size


def is_on_policy(config: Config) -> bool:
    """Return whether updates are made with the weights that sampled and nothing before needs the old log-probs."""
    algorithm, trainer = config.algorithm, config.trainer
    single_update = updates_of_a_batch(config) == 1
    needed_before = algorithm.kl.name == "reward"
    needed_before = needed_before or (ADVANTAGE.needs(config, "needs_reference") and reads_reference(config))
    needed_before = needed_before or algorithm.critic_warmup_steps > 0 or corrects(config)
    sampled_now = trainer.async_steps == 0
    return algorithm.old_logprobs == "auto" and single_update and sampled_now and not needed_before
