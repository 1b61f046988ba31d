"""Settings that are read only where others hold: a table, and the settings of a config that miss their condition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mega_rl.config.choices import ADVANTAGE, DATA, corrects, has_reference, needs_critic, reads_reference
from mega_rl.config.keys import TAGGED, keys_below, keys_in, open_ended, value_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.sandbox import runs_code

# "KEY=A or B", "KEY above 0", "KEY other than 0", "KEY" that is set, "no KEY"; a remark may follow a colon.
_CONDITION = re.compile(r"(no )?([a-z0-9_.]+)(?:=(\w+(?: or \w+)*)| (above|other than) (\d+))?(?:: .*)?")


@dataclass(frozen=True)
class Need:
    """Keys that mean something only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it: "engine.backend=megatron"
    check: Callable[[Config], bool] | None = None  # of a condition that is not of the forms of `_CONDITION`
    fault: str = "has no effect"  # of a key whose condition does not hold

    def holds(self, config: Config) -> bool:
        """Return whether the condition holds."""
        if self.check is not None:
            return self.check(config)
        match = _CONDITION.fullmatch(self.condition)
        assert match is not None, f"{self.condition!r} needs a check"
        absent, key, choices, relation, bound = match.groups()
        try:
            value = value_of(config, key)
        except AttributeError:  # another kind of this tagged section, which has neither this setting nor `keys`
            return True
        if choices:
            return str(value).lower() in choices.split(" or ")
        if relation:
            return bool(value > int(bound) if relation == "above" else value != int(bound))
        return bool(value) != bool(absent)


@dataclass(frozen=True)
class Unmet:
    """A setting other than the default whose condition does not hold."""

    key: str  # "engine.megatron.tp"
    value: object
    need: Need

    @property
    def setting(self) -> str:
        """The setting as one writes it: "engine.megatron.tp=2"."""
        value = str(self.value)
        return f"{self.key}={value.lower() if isinstance(self.value, bool) else value}"


def within(section: str, names: str, condition: str) -> Need:
    """Return the Need of some keys of a section."""
    return Need(tuple(f"{section}.{name}" for name in names.split()), condition)


_ENGINE_KEYS = {
    "megatron": (*keys_below("engine.megatron"), "model.recompute_modules", "model.recompute_layers"),
    "fsdp": keys_below("engine.fsdp"),
}

_NEEDS = (
    *(Need(keys, f"engine.backend={engine}") for engine, keys in _ENGINE_KEYS.items()),
    within("reward", "function functions", "reward.source=function"),
    Need(
        (
            "model.critic_path",
            "model.critic_attn_implementation",
            "optim.critic_lr",
            "algorithm.value_clip",
            "algorithm.critic_warmup_steps",
        ),
        ADVANTAGE.with_need("needs_critic"),
        needs_critic,
    ),
    Need(
        ("model.ref_path", "model.ref_attn_implementation", *keys_in("engine.megatron.reference")),
        f"a reference: algorithm.kl=reward or loss, or {ADVANTAGE.with_need('needs_reference')}",
        has_reference,
    ),
    Need(("algorithm.kl.target", "algorithm.kl.horizon"), "algorithm.kl.control=adaptive"),
    within("algorithm.kl", "reference_rate", "algorithm.kl.reference_interval above 0"),
    Need(
        ("algorithm.kl.reference_interval",),
        "trainer.steps above it, or the reference never changes",
        lambda config: config.algorithm.kl.reference_interval < config.trainer.steps,
    ),
    Need(
        ("algorithm.kl.reference_interval",),
        "engine.backend=fsdp or engine.megatron.ddp=ddp: others leave a rank a share of the actor and "
        "the whole reference",
        lambda config: config.engine.backend == "fsdp" or config.engine.megatron.ddp.name == "ddp",
        fault="cannot work",
    ),
    Need(
        ("engine.resident_roles",),
        f"a second model: {ADVANTAGE.with_need('needs_critic')} or {ADVANTAGE.with_need('needs_reference')}, "
        "algorithm.kl=reward or loss, or reward.source=model",
        lambda config: has_several_models(config),
    ),
    Need(
        ("engine.resident_roles",),
        "engine.fsdp.cpu_offload=false: with it every model's state is on the host already",
        lambda config: config.engine.backend != "fsdp" or not config.engine.fsdp.cpu_offload,
    ),
    within("engine.megatron", "sequence_parallel", "engine.megatron.tp above 1"),
    within("engine.megatron", "vpp pipeline", "engine.megatron.pp above 1"),
    within("engine.megatron.reference", "pipeline", "engine.megatron.reference.pp above 1"),
    within("engine.megatron", "overlap_p2p", "engine.megatron.vpp above 1"),
    Need(("model.fp32_head",), "model.dtype=bf16"),
    Need(("model.recompute_modules",), "model.recompute=selective"),
    Need(("model.recompute_layers",), "model.recompute=full"),
    Need(
        ("engine.megatron.ddp.bucket_size",),
        "engine.megatron.ddp.overlap_grad_reduce=true",
    ),
    within("engine.megatron.optimizer", "distributed", "engine.megatron.ddp=ddp"),
    Need(
        ("engine.megatron.ddp.overlap_param_gather",),
        "engine.megatron.ddp.overlap_grad_reduce=true and engine.megatron.optimizer.distributed=true, whose updates "
        "are gathered",
        lambda c: c.engine.megatron.ddp.overlap_grad_reduce and c.engine.megatron.optimizer.distributed,
        fault="cannot work",
    ),
    Need(("engine.megatron.ddp.optimizer_instances",), "engine.megatron.optimizer.distributed=true"),
    Need(
        ("engine.megatron.moe.routing_replay",),
        "a pass that computes old log-probs: algorithm.old_logprobs=recompute, or auto with several updates a step, "
        "a KL in the reward or a teacher",
        lambda config: has_pass_for_old_logprobs(config),
    ),
    within("engine.megatron.optimizer", "moment_dtype", "engine.megatron.optimizer.precision_aware=true"),
    Need(
        ("algorithm.correction",),
        "algorithm.old_logprobs=auto or recompute: with rollout the ratio itself is to what sampled",
        lambda config: config.algorithm.old_logprobs != "rollout" or not corrects(config),
    ),
    Need(("optim.min_lr_ratio",), "optim.schedule=linear or cosine"),
    within("trainer.microbatch", "max_tokens", "trainer.microbatch.packing=true"),
    within("trainer.microbatch", "size", "trainer.microbatch.packing=false"),
    Need(
        ("reward.source.timeout_s", "reward.source.memory_mib"),
        "reward.source.workers other than 0",
        lambda config: config.reward.source.name != "function" or config.reward.calls.workers != 0,
    ),
    within("reward.source", "failure_score", "reward.source.on_failure=score"),
    within("reward.overlong", "penalty", "reward.overlong.buffer_tokens above 0"),
    Need(
        ("reward.overlong.buffer_tokens", "rollout.dynamic_sampling.max_generations"),
        "rewards, which reward.source=none has not",
        lambda config: config.reward.source.name != "none",
    ),
    within("trainer.profile", "ranks memory", "trainer.profile.steps"),
    Need(
        ("optim.warmup_steps",),
        "trainer.steps above it",
        lambda config: config.optim.warmup_steps < config.trainer.steps,
        fault="does not end within the run",
    ),
    Need(
        ("optim.warmup_steps",),
        "trainer.steps above its sum with algorithm.critic_warmup_steps, which the actor's warm-up begins after",
        lambda config: not _warms_up_too_late(config),
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
        "data.val_files, data.val_size, validation.sets, or a data.source with has_validation = True",
        lambda config: bool(
            config.data.val_files
            or config.data.val_size
            or config.validation.sets
            or DATA.needs(config, "has_validation")
        ),
        fault="has no prompts to validate on",
    ),
    Need(("trainer.steps",), "no trainer.epochs"),
    Need(("data.train_files",), "data.source=files and no data.mixture", lambda config: config.data.reads_train_files),
    Need(
        ("data.val_files", "data.val_size"),
        "a data.source without has_validation, which has held-out rows of its own",
        lambda config: not DATA.needs(config, "has_validation"),
    ),
    Need(
        ("trainer.async_steps",),
        "rollout.backend=sglang: the embedded engine generates in the trainer's own processes",
        fault="cannot run ahead",
    ),
    Need(
        ("trainer.async_steps",),
        "rollout.source=single_turn: another source may read anything of the trainer, which has moved on",
        fault="cannot run ahead",
    ),
    Need(("data.val_files", "data.val_size", *keys_in("validation")), "trainer.val_interval above 0"),
    within("validation", "top_p top_k", "validation.temperature above 0"),
    Need(
        ("validation.right_above", "validation.right_part", "validation.answer_of"),
        "validation.k, or validation.n above 1: it is of pass@k and maj@k",
        lambda config: bool(config.validation.counted),
    ),
    Need(("reward.sandbox",), "the reward function code_tests", lambda config: runs_code(config.reward)),
    Need(("reward.function",), "no reward.functions"),
    Need(("reward.sources",), "reward.functions"),
    Need(("data.source_key",), "reward.sources"),
    Need(
        ("reward.weights",),
        "rewards that may have named parts: reward.source=http, reward.functions, or "
        "reward.function=path/to/file.py:function",
        lambda config: may_have_parts(config),
    ),
    Need(
        ("reward.skip_special_tokens",),
        "reward.source=function or http: a reward model reads tokens, or a conversation without them",
    ),
    Need(("data.chat.template_kwargs", "data.chat.system_prompt", "data.chat.date"), "data.chat.template=true"),
    Need(("data.val_size",), "no data.val_files"),
    Need(
        ("checkpoint.keep_best", "checkpoint.keep_interval", "checkpoint.async_save"),
        "checkpoint.save_interval above 0",
    ),
    Need(("checkpoint.fallback",), "checkpoint.resume=auto"),
    within("metrics.records", "max_mib entropy weights", "metrics.records.interval above 0"),
    Need(("metrics.project", "metrics.run_name"), "metrics.trackers"),
    Need(
        ("rollout.dtype", "rollout.verify_interval"),
        "rollout.backend=hf or sglang: a source of one's own gets the weights as they train",
    ),
    Need(("rollout.hf.batch_size",), "rollout.backend=hf"),
    Need(keys_below("rollout.sglang"), "rollout.backend=sglang"),
    Need(
        keys_in("rollout.sglang.server"),
        "servers that the run starts: no rollout.sglang.urls",
        lambda config: not config.rollout.sglang.urls,
    ),
    within("rollout.sglang", "keys_file", "rollout.sglang.urls"),
    Need(
        ("rollout.sglang.return_routing",),
        "engine.backend=megatron with engine.megatron.moe.routing_replay=true, which replays what servers report",
        lambda config: config.engine.backend == "megatron" and config.engine.megatron.moe.routing_replay,
    ),
    Need(("rollout.sglang.return_routing",), "rollout.source=single_turn: rollouts of several turns carry no experts"),
    within("rollout.dynamic_sampling", "prompts", "rollout.dynamic_sampling.max_generations above 0"),
    Need(
        ("rollout.dynamic_sampling.max_generations",),
        "an estimator that compares samples of a prompt, as " + ADVANTAGE.with_need("needs_groups"),
        lambda config: ADVANTAGE.needs(config, "needs_groups"),
        fault="drops groups that others learn from",
    ),
    Need(
        ("rollout.dynamic_sampling.max_generations",),
        "trainer.async_steps=0: the prompts of the next step are known when this one's are scored",
        fault="cannot run ahead",
    ),
    Need(("rollout.sglang.partial_rollout",), "trainer.async_steps=1"),
)


def unmet(config: Config) -> Iterator[Unmet]:
    """Yield every setting other than the default whose condition does not hold, each once, with its first condition."""
    default = Config()
    missed = [need for need in _NEEDS if not need.holds(open_ended(config))]
    first = {key: need for need in reversed(missed) for key in need.keys}
    for key in dict.fromkeys(key for need in missed for key in need.keys):
        section, _, name = key.rpartition(".")
        usual = type(value_of(config, section))() if section in TAGGED else value_of(default, section)
        value = getattr(value_of(config, section), name, None)
        if value is not None and value != getattr(usual, name):
            yield Unmet(key, value, first[key])


def _warms_up_too_late(config: Config) -> bool:
    """Return whether the two warm-ups, each within the run, do not end within it one after the other."""
    steps = (config.optim.warmup_steps, config.algorithm.critic_warmup_steps)
    return max(steps) < config.trainer.steps <= sum(steps)


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
