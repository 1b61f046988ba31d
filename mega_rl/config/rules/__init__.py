"""Rules between fields, and between fields and the model. Broken rules are listed, not raised.

Each line names the values, the rule and what is legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mega_rl.config.choices import (
    ADVANTAGE,
    CHOICES,
    CORRECTION,
    LOSS,
    chosen,
    is_sampled,
    kind_of_run,
    needs_critic,
    reads_reference,
)
from mega_rl.config.keys import open_ended, value_of
from mega_rl.config.needs import may_have_parts, unmet, updates_of_a_batch
from mega_rl.config.rules.parallel import engine, fits_models, has_own_layout, layout
from mega_rl.config.rules.rollout import data, rollouts, validation
from mega_rl.config.schema import Config
from mega_rl.config.schema.rollout import runs_code
from mega_rl.config.values import ModelFacts, divisors, leave_out, listed


def check(config: Config, *, world_size: int, models: Mapping[str, ModelFacts] | None = None) -> list[str]:
    """Return a line per broken rule; empty if the config can run on `world_size` ranks.

    `models` maps the config key that names a checkpoint ("model.path", "model.critic_path", ...) to its facts; rules
    that need the facts of a model not given are left out.
    """
    given, config = config, open_ended(config)
    problems = [*layout(config.engine.megatron, world_size), *_batches(config, world_size), *_lengths(config)]
    problems += engine(config, world_size)
    if is_sampled(config):
        problems += [*_algorithm(config), *_teacher(config), *_loss(config)]
        problems += [*rollouts(config), *_reward(config), *_functions(config)]
    else:
        problems += _given(config)
    problems += [*data(config), *validation(config)]
    for key in CHOICES:
        problems += [f"{key}.{line}" for line in value_of(config, key).problems()]
    problems += fits_models(config, world_size, models or {})
    for entry in unmet(given):
        problems.append(f"{entry.setting} has no effect: it needs {entry.needs}; set that or {leave_out(entry.key)}")
    return problems


def _batches(config: Config, world_size: int) -> Iterator[str]:
    trainer, par = config.trainer, config.engine.megatron
    prompts, minibatch = trainer.prompts_per_step, trainer.minibatch_size
    if prompts % minibatch:
        legal = listed(divisors(prompts))
        yield f"trainer.minibatch_size={minibatch} does not divide trainer.prompts_per_step={prompts}; legal: {legal}"
    size = par.tp * par.pp * par.cp
    dp = world_size // size
    if world_size % size == 0 and prompts % dp:
        yield (
            f"trainer.prompts_per_step={prompts} is not a multiple of the data-parallel size {dp} "
            f"(world size {world_size} / tp*pp*cp {size}); legal: multiples of {dp}"
        )
    samples = minibatch * config.rollout.n
    if world_size % size == 0 and samples < dp:
        yield f"trainer.minibatch_size*rollout.n={samples}: needs a sequence for each of {dp} data-parallel ranks"


def _lengths(config: Config) -> Iterator[str]:
    """Yield micro-batches that cannot hold one longest sequence, cut by context parallelism."""
    micro, val, par = config.trainer.microbatch, config.validation.max_new_tokens, config.engine.megatron
    cp = max(par.cp, par.of_reference.cp if has_own_layout(config) else 1)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if val and config.reward.source.name == "model":
        longest = max(longest, config.data.max_prompt_tokens + val + 1)  # the reward model reads one token more
    multiple = 2 * cp if cp > 1 else 1
    needed = -(-longest // multiple) * multiple
    if micro.packing and micro.max_tokens < needed:
        padded = f", rounded up to a multiple of 2*cp={multiple}" * (needed > longest)
        yield (
            f"trainer.microbatch.max_tokens={micro.max_tokens} cannot hold one sequence of data.max_prompt_tokens and "
            f"the longest response, {longest} tokens{padded}; make it at least {needed}"
        )


def _given(config: Config) -> Iterator[str]:
    """Yield the problems of a run that learns from given answers."""
    kind, micro, data = kind_of_run(config), config.trainer.microbatch, config.data
    longest = kind.rows * (data.max_prompt_tokens + kind.scores)
    if micro.packing and micro.max_tokens < longest:
        yield (
            f"trainer.microbatch.max_tokens={micro.max_tokens} cannot hold the {kind.rows} rows of a pair, of up to "
            f"data.max_prompt_tokens={data.max_prompt_tokens} tokens each; make it at least {longest}"
        )
    if not micro.packing and micro.size < kind.rows:
        yield f"trainer.microbatch.size={micro.size} cannot hold the {kind.rows} rows of a pair; legal: at least 2"
    if kind.reference == "once" and data.stream.rows:
        yield (
            f"algorithm.kind.reference=once with data.stream.rows={data.stream.rows}: all pairs have to be known "
            "before the first step; legal: step"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, n, name = config.algorithm, config.rollout.n, config.algorithm.advantage.name
    if ADVANTAGE.needs(config, "needs_groups") and n < 2:
        yield f"rollout.n={n}: algorithm.advantage={name} compares samples of a prompt; legal: at least 2"
    if name == "pass_at_k" and algorithm.advantage.settings["k"] >= n >= 2:
        yield (
            f"algorithm.advantage.k={algorithm.advantage.settings['k']} with rollout.n={n}: pass_at_k compares sets of "
            f"k samples of a prompt; legal: at most {n - 1}"
        )
    if algorithm.kl.name == "reward" and not ADVANTAGE.needs(config, "takes_kl"):
        yield (
            f"algorithm.kl=reward with algorithm.advantage={name}: it has one reward for a whole response, a KL per "
            "token has no place in it; legal: none, loss, or reward with advantage=gae"
        )
    compares = ADVANTAGE.needs(config, "needs_reference") and reads_reference(config)
    if algorithm.old_logprobs == "rollout" and (
        compares or algorithm.kl.name == "reward" or algorithm.kl.control == "adaptive"
    ):
        yield (
            "algorithm.old_logprobs=rollout: the difference of engine and trainer would count as KL to the reference; "
            "legal: auto or recompute, or no KL but kl=loss with control=fixed"
        )
    if algorithm.kl.reference_interval and config.engine.backend != "fsdp" and config.engine.megatron.ddp.name != "ddp":
        yield (
            f"algorithm.kl.reference_interval={algorithm.kl.reference_interval} needs engine.backend=fsdp or "
            "engine.megatron.ddp=ddp: others leave a rank a share of the actor and the whole reference"
        )


def _teacher(config: Config) -> Iterator[str]:
    """Yield a teacher that is missing, or what reads nothing of the advantages that it makes."""
    algorithm = config.algorithm
    loss, distils = algorithm.loss.name, algorithm.advantage.name == "distillation"
    if (distils or LOSS.needs(config, "needs_teacher")) and not config.model.ref_path:
        key = "algorithm.advantage" if distils else "algorithm.loss"
        yield f"{key}=distillation needs model.ref_path, the teacher: the student's own start teaches nothing"
    if loss == "distillation" and not distils:
        yield (
            f"algorithm.advantage={algorithm.advantage} has no effect with algorithm.loss=distillation, which reads no "
            "advantages; set algorithm.advantage=distillation, or another loss"
        )
    if loss == "distillation" and chosen(config, CORRECTION) != "none":
        yield (
            f"algorithm.correction={algorithm.correction} with algorithm.loss=distillation: the ratio of a sampled "
            "token is not a weight of a divergence over all tokens; legal: none"
        )


def _loss(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if LOSS.needs(config, "needs_response_mean") and algorithm.loss_aggregation != "seq-mean-token-mean":
        yield (
            f"algorithm.loss_aggregation={algorithm.loss_aggregation} with algorithm.loss={algorithm.loss}: the loss "
            "has one number for a response, which this would weigh by the response's length; legal: seq-mean-token-mean"
        )
    of_tokens = needs_critic(config) or algorithm.advantage.name == "distillation" or algorithm.kl.name == "reward"
    if LOSS.needs(config, "needs_response_advantages") and of_tokens:
        yield (
            f"algorithm.loss={algorithm.loss} reads one advantage for a response, so what a critic, a teacher or "
            "algorithm.kl=reward says of single tokens is lost; set algorithm.loss=gspo, or an estimator with one "
            "number for a response and algorithm.kl=loss"
        )
    at_old_policy = updates_of_a_batch(config) == 1 and algorithm.old_logprobs != "rollout"
    if LOSS.needs(config, "needs_updates") and at_old_policy:
        yield (
            f"algorithm.loss={algorithm.loss} has no effect with one optimizer step for each batch, in which the "
            "policy is still the one before the update; lower trainer.minibatch_size, raise algorithm.epochs, or set "
            "algorithm.old_logprobs=rollout"
        )


def _reward(config: Config) -> Iterator[str]:
    reward, name = config.reward, config.algorithm.advantage.name
    if reward.source.name == "model" and not reward.model_path:
        yield "reward.source=model needs reward.source.path: name a sequence-classification checkpoint directory"
    if reward.source.name == "environment" and config.rollout.source.name == "single_turn":
        yield "reward.source=environment needs an environment that scores; set rollout.source=path/to/file.py:class"
    limit, buffer = config.rollout.max_new_tokens, reward.overlong.buffer_tokens
    if buffer >= limit:
        yield (
            f"reward.overlong.buffer_tokens={buffer} leaves no length without a punishment: responses have at most "
            f"rollout.max_new_tokens={limit} tokens; make it smaller"
        )
    if ADVANTAGE.needs(config, "needs_parts") and not may_have_parts(config):
        source = f"function={reward.function}" if reward.source.name == "function" else f"source={reward.source}"
        yield (
            f"algorithm.advantage={name} with reward.{source}: it reads named parts of the reward, but this gives one "
            "number; return a mapping from a function of your own, or take algorithm.advantage=grpo"
        )
    for key, service in {"reward.source.url": reward.source, "reward.sandbox.url": reward.sandbox}.items():
        if not getattr(service, "url", "http://").startswith(("http://", "https://")):
            yield f"{key} needs an address that begins with http:// or https://"
    without = ADVANTAGE.needs(config, "needs_no_rewards") and not ADVANTAGE.needs(config, "needs_greedy")
    if reward.source.name == "none" and not without:
        yield (
            f"reward.source=none with algorithm.advantage={name}: it makes advantages of rewards; name who scores, as "
            "reward.source=function, or take algorithm.advantage=distillation, which learns from a teacher alone"
        )


def _functions(config: Config) -> Iterator[str]:
    """Yield the problems between reward.functions, reward.sources, reward.weights and the sandbox."""
    reward, own, pool = config.reward, config.reward.sandbox, config.reward.calls
    if runs_code(reward) and pool.workers and own.total_s >= pool.timeout_s:
        yield (
            f"reward.sandbox.total_s={own.total_s:g} must be below reward.source.timeout_s={pool.timeout_s:g}, or a "
            "slow program costs its worker; make the latter longer"
        )
    if reward.source.name != "function" or not reward.functions:
        return
    legal = ", ".join(reward.functions)
    for source, names in reward.sources.items():
        if not names or not set(names) <= set(reward.functions):
            yield f"reward.sources.{source}={names}: must name some of reward.functions; legal: {legal}"
    used = {name for names in reward.sources.values() for name in names}
    for name in reward.functions:
        if reward.sources and name not in used:
            yield f"reward.functions.{name} scores nothing: no entry of reward.sources names it; leave it out"
    for part in reward.weights:
        if not any(part == name or part.startswith(f"{name}_") for name in reward.functions):
            yield (
                f"reward.weights.{part} has no effect: no function of that name is in reward.functions; legal: "
                f"{legal}, or NAME_PART of a function that returns named parts"
            )


def advice(config: Config) -> Iterator[str]:
    """Yield a line per doubtful combination of settings: values, effect on the run, and fix."""
    algorithm, rollout, updates = config.algorithm, config.rollout, updates_of_a_batch(config)
    if updates > 1 and algorithm.loss.settings.get("dual_clip") == 0:
        yield (
            f"algorithm.loss.dual_clip=0 with {updates} optimizer steps for each batch: where the advantage "
            "is negative the gradient of a token grows with its ratio, up to e^20, and is lost beyond; set "
            "algorithm.loss.dual_clip=3"
        )
    decay = algorithm.advantage.settings if algorithm.advantage.name == "gae" else {}
    gae_lambda, own = float(str(decay.get("gae_lambda", 1))), decay.get("policy_lambda") or decay.get("length_alpha")
    if gae_lambda < 1 and not own and rollout.max_new_tokens * (1 - gae_lambda) > 5:
        yield (
            f"algorithm.advantage.gae_lambda={gae_lambda:g} with rollout.max_new_tokens="
            f"{rollout.max_new_tokens}: the score at the end of a response hardly moves tokens more than "
            f"{5 / (1 - gae_lambda):.0f} before it; set gae_lambda=1 with policy_lambda=0.95 or length_alpha=0.05"
        )
    if config.trainer.steps > 60 and not (config.checkpoint.save_interval or config.checkpoint.memory.interval):
        yield (
            f"checkpoint.save_interval=0 with trainer.steps={config.trainer.steps}: a run that is killed loses "
            "every step; set checkpoint.save_interval=20"
        )
    cut = [f"rollout.top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    if cut:
        yield (
            f"{' and '.join(cut)}: training does not see what sampling cuts off. Log-probs on both sides are those of "
            "the whole distribution, so ratios, algorithm.correction and rollout.mismatch leave it out, and tokens "
            "that are never sampled may lose their probability; set rollout.top_p=1 and rollout.top_k=0, and lower "
            "rollout.temperature for fewer unlikely tokens"
        )
