"""Rules between fields, and between fields and the model: what is found wrong is listed, nothing is raised.

Each line names the values, the rule and what is legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mega_rl.config.choices import ADVANTAGE, CHOICES, LOSS, corrects, needs_critic, reads_reference
from mega_rl.config.facts import ModelFacts, divisors, leave_out, listed
from mega_rl.config.keys import open_ended, value_of
from mega_rl.config.needs import may_have_parts, unmet, updates_of_a_batch
from mega_rl.config.rules import mixture as mixture_rules
from mega_rl.config.rules import parallel as parallel_rules
from mega_rl.config.rules import reference as reference_rules
from mega_rl.config.rules import rewards as reward_rules
from mega_rl.config.rules import rollout as rollout_rules
from mega_rl.config.rules import stream as stream_rules
from mega_rl.config.rules import validation as validation_rules
from mega_rl.config.schema import Config, RewardHttpConfig


def check(config: Config, *, world_size: int, models: Mapping[str, ModelFacts] | None = None) -> list[str]:
    """Every broken rule, one line each; an empty list for a config that can run on `world_size` ranks.

    `models` maps the config key that names a checkpoint ("model.path", "model.critic_path", ...) to its facts; rules
    that need the facts of a model not given are left out.
    """
    given, config = config, open_ended(config)
    problems = [*parallel_rules.layout(config.engine.megatron, world_size), *_batches(config, world_size)]
    problems += [*_algorithm(config), *parallel_rules.recompute(config), *parallel_rules.experts(config)]
    problems += [*parallel_rules.data_parallel(config, world_size), *parallel_rules.fsdp_engine(config, world_size)]
    problems += [*rollout_rules.rollouts(config), *_reward(config), *_without_rewards(config)]
    problems += [*reward_rules.functions(config), *reward_rules.sandbox(config)]
    problems += validation_rules.validation(config)
    problems += [*_profile(config, world_size), *mixture_rules.mixture(config.data), *mixture_rules.curriculum(config)]
    problems += stream_rules.stream(config)
    for key, facts in (models or {}).items():
        if not (key == "model.ref_path" and reference_rules.has_own_layout(config)):
            problems += parallel_rules.fits_model(config.engine.megatron, key, facts)
        problems += [*_fits_model(config, key, facts), *rollout_rules.fits_model(config, key, facts)]
        problems += validation_rules.fits_model(config, key, facts)
    problems += reference_rules.own_layout(config, world_size, models or {})
    return [*problems, *_without_effect(given)]


def _batches(config: Config, world_size: int) -> Iterator[str]:
    trainer, rollout, par = config.trainer, config.rollout, config.engine.megatron
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
    if trainer.microbatch.packing and trainer.microbatch.max_tokens < rounded:
        padded = "" if rounded == longest else f", rounded up to a multiple of 2*cp={pieces}"
        yield (
            f"trainer.microbatch.max_tokens={trainer.microbatch.max_tokens} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest}{padded}; make it at least {rounded}"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if ADVANTAGE.needs(config, "needs_groups") and config.rollout.n < 2:
        yield (
            f"rollout.n={config.rollout.n}: algorithm.advantage={algorithm.advantage} compares samples of a prompt; "
            "legal: at least 2"
        )
    sets = algorithm.advantage.settings.get("k") if algorithm.advantage.name == "pass_at_k" else None
    if isinstance(sets, int) and sets >= config.rollout.n >= 2:
        yield (
            f"algorithm.advantage.k={sets} with rollout.n={config.rollout.n}: pass_at_k compares sets of k "
            f"samples of a prompt, of which there must be several; legal: at most {config.rollout.n - 1}"
        )
    yield from _teacher(config)
    if algorithm.kl.name == "reward" and not ADVANTAGE.needs(config, "takes_kl"):
        yield (
            f"algorithm.kl=reward with advantage={algorithm.advantage}: it has one reward for a whole "
            "response, a KL per token has no place in it; legal: none, loss, or reward with advantage=gae"
        )
    in_reward, adaptive = algorithm.kl.name == "reward", algorithm.kl.control == "adaptive"
    if algorithm.old_logprobs == "rollout" and algorithm.kl.name != "none" and (in_reward or adaptive):
        setting = "kl=reward" if in_reward else "kl.control=adaptive"
        yield (
            f"algorithm.{setting} with algorithm.old_logprobs=rollout: the difference of engine and trainer would "
            "count as KL; legal: kl=loss with control=fixed, or old_logprobs=auto or recompute"
        )
    yield from _loss(config)
    yield from _zero_advantages(config)
    for key in CHOICES:
        yield from (f"{key}.{line}" for line in value_of(config, key).problems())


def _teacher(config: Config) -> Iterator[str]:
    """Yield what keeps an estimator from the log-probs of a reference that it reads, or makes nothing of them."""
    algorithm, name = config.algorithm, config.algorithm.advantage.name
    compares = ADVANTAGE.needs(config, "needs_reference") and reads_reference(config)
    if compares and algorithm.old_logprobs == "rollout":
        yield (
            f"algorithm.old_logprobs=rollout with algorithm.advantage={name}: the difference of engine and trainer "
            "would count as one to the reference; legal: auto, recompute"
        )
    if name != "distillation":
        return
    weight = algorithm.advantage.settings.get("reward_weight")
    if weight and config.rollout.n < 2:
        yield (
            f"algorithm.advantage.reward_weight={weight} with rollout.n={config.rollout.n}: a reward is "
            "compared with those of the prompt's other samples; set rollout.n to 2 or more, or the weight to 0"
        )
    if not config.model.ref_path:
        yield (
            "algorithm.advantage=distillation needs model.ref_path, the teacher: the student's own start teaches it "
            "nothing"
        )
    if algorithm.kl.reference_interval:
        yield (
            f"algorithm.kl.reference_interval={algorithm.kl.reference_interval} with algorithm.advantage=distillation: "
            "the teacher would become its student; set it to 0"
        )


def _whole_vocabulary(config: Config) -> Iterator[str]:
    """Yield the settings that a divergence over the whole vocabulary leaves without effect or meaning."""
    algorithm = config.algorithm
    if LOSS.needs(config, "needs_teacher") and algorithm.kl.name != "none":
        yield (
            f"algorithm.kl={algorithm.kl} with algorithm.loss={algorithm.loss}: the teacher is the "
            "reference, and the loss is a divergence from it already; legal: none"
        )
    if LOSS.needs(config, "needs_teacher") and algorithm.advantage.name != "distillation" and not config.model.ref_path:
        yield f"algorithm.loss={algorithm.loss} needs model.ref_path, the teacher"
    if algorithm.loss.name != "distillation":
        return
    if algorithm.advantage.name != "distillation":
        yield (
            f"algorithm.advantage={algorithm.advantage} has no effect with algorithm.loss=distillation, which reads no "
            "advantages; set algorithm.advantage=distillation, or keep the advantages and another loss"
        )
    settings = algorithm.advantage.settings if algorithm.advantage.name == "distillation" else {}
    for name in (name for name, value in settings.items() if value):
        yield (
            f"algorithm.advantage.{name}={settings[name]} has no effect with algorithm.loss=distillation, "
            "which reads no advantages; set it to 0, or algorithm.loss=ppo, which learns from the sampled tokens"
        )
    if corrects(config):
        yield (
            f"algorithm.correction={algorithm.correction} with algorithm.loss=distillation: the ratio of a sampled "
            "token is no weight of a divergence over all tokens; legal: none"
        )


def _loss(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _whole_vocabulary(config)
    if LOSS.needs(config, "needs_response_mean") and algorithm.loss_aggregation != "seq-mean-token-mean":
        yield (
            f"algorithm.loss_aggregation={algorithm.loss_aggregation} with algorithm.loss={algorithm.loss}: the loss "
            "has one number for a response, which this would weigh by the response's length; legal: seq-mean-token-mean"
        )
    of_tokens = needs_critic(config) or algorithm.advantage.name == "distillation"
    if LOSS.needs(config, "needs_response_advantages") and of_tokens:
        yield (
            f"algorithm.loss={algorithm.loss} with algorithm.advantage={algorithm.advantage}: the loss reads one "
            "advantage for a response, so what a critic or a teacher says of single tokens is lost; set "
            "algorithm.loss=gspo, or an estimator with one number for a response"
        )
    elif LOSS.needs(config, "needs_response_advantages") and algorithm.kl.name == "reward":
        yield (
            f"algorithm.loss={algorithm.loss} with algorithm.kl=reward: the loss reads one advantage for a "
            "response, so the KL of single tokens is lost; set algorithm.kl=loss"
        )
    at_old_policy = updates_of_a_batch(config) == 1 and algorithm.old_logprobs != "rollout"
    if LOSS.needs(config, "needs_updates") and at_old_policy:
        yield (
            f"algorithm.loss={algorithm.loss} has no effect with one optimizer step for each batch, in which the "
            "policy is still the one before the update; lower trainer.minibatch_size, raise algorithm.epochs, or set "
            "algorithm.old_logprobs=rollout"
        )


def _zero_advantages(config: Config) -> Iterator[str]:
    """Yield what responses without an advantage would still teach, or that there are none."""
    algorithm, moe = config.algorithm, config.engine.megatron.moe
    drift = algorithm.loss.settings.get("drift_coef")
    if not config.trainer.microbatch.skip_zero_advantages:
        return
    key = "trainer.microbatch.skip_zero_advantages=true"
    if not (ADVANTAGE.needs(config, "needs_groups") or ADVANTAGE.needs(config, "needs_greedy")):
        yield (
            f"{key} has no effect with algorithm.advantage={algorithm.advantage}, which "
            "does not compare rewards of one prompt; set it to false"
        )
    teaching = {
        f"algorithm.loss={algorithm.loss}": not LOSS.needs(config, "scales_with_advantage"),
        f"algorithm.entropy_coef={algorithm.entropy_coef:g}": algorithm.entropy_coef > 0.0,
        f"algorithm.loss.drift_coef={drift}": bool(drift),
        "algorithm.kl=loss": algorithm.kl.name == "loss",
        f"engine.megatron.moe.aux_loss_coef={moe.aux_loss_coef:g}": moe.aux_loss_coef > 0.0,
        f"engine.megatron.moe.expert_bias_update_rate={moe.expert_bias_update_rate:g}": moe.expert_bias_update_rate > 0,
    }
    for setting in (setting for setting, teaches in teaching.items() if teaches):
        yield (f"{key} with {setting}: responses whose advantages are 0 would give a gradient still; set it to false")


def _profile(config: Config, world_size: int) -> Iterator[str]:
    trainer = config.trainer
    outside = [step for step in trainer.profile.steps if not 1 <= step <= trainer.steps]
    if outside:
        yield f"trainer.profile.steps={outside}: legal: 1 to trainer.steps={trainer.steps}"
    absent = [rank for rank in trainer.profile.ranks if not 0 <= rank < world_size]
    if absent and trainer.profile.steps:
        yield f"trainer.profile.ranks={absent}: legal: 0 to {world_size - 1}, the ranks of the run"
    if trainer.profile.memory and trainer.profile.steps and trainer.device == "cpu":
        yield "trainer.profile.memory=true with trainer.device=cpu: the history is a GPU's; set it to false"


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.source.name == "model" and not reward.model_path:
        yield "reward.source=model needs reward.source.path: name a sequence-classification checkpoint directory"
    limit, buffer = config.rollout.max_new_tokens, reward.overlong.buffer_tokens
    if buffer >= limit:
        yield (
            f"reward.overlong.buffer_tokens={buffer} leaves no length without a punishment: responses have at most "
            f"rollout.max_new_tokens={limit} tokens; make it smaller"
        )
    if ADVANTAGE.needs(config, "needs_parts") and not may_have_parts(config):
        source = f"function={reward.function}" if reward.source.name == "function" else f"source={reward.source}"
        yield (
            f"algorithm.advantage={config.algorithm.advantage} with reward.{source}: it reads named parts of the "
            "reward, but this gives one number; return a mapping from a function of your own, or take "
            "algorithm.advantage=grpo"
        )
    if isinstance(reward.source, RewardHttpConfig) and not reward.source.url.startswith(("http://", "https://")):
        yield (
            f"reward.source.url={reward.source.url!r}: reward.source=http needs an address that begins with http:// or "
            "https://"
        )


def _without_rewards(config: Config) -> Iterator[str]:
    """Yield what reads the rewards that reward.source=none leaves out, but for settings of `needs`."""
    algorithm, best = config.algorithm, config.checkpoint.keep_best
    if config.reward.source.name != "none":
        return
    fix = "name who scores, as reward.source=function"
    if not ADVANTAGE.needs(config, "needs_no_rewards") or ADVANTAGE.needs(config, "needs_greedy"):
        yield (
            f"reward.source=none with algorithm.advantage={algorithm.advantage}: it makes advantages of rewards; "
            f"{fix}, or take algorithm.advantage=distillation, which learns from a teacher alone"
        )
    weight = algorithm.advantage.settings.get("reward_weight") if algorithm.advantage.name == "distillation" else 0
    if weight:
        yield (
            f"algorithm.advantage.reward_weight={weight} with reward.source=none: there is no reward to "
            f"weigh; {fix}, or set the weight to 0"
        )
    if best.startswith(("reward/", "val/reward_")):
        yield (
            f"checkpoint.keep_best={best} with reward.source=none: the run has no such metric; name another, as "
            f"val/response_tokens_mean, or {fix}"
        )


def _fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    yield from facts.too_long(key, "data.max_prompt_tokens+rollout.max_new_tokens", longest, config.rollout.backend)
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < facts.vocab_size]
    if outside and key == "model.path":
        yield f"rollout.stop_token_ids={outside}: legal: 0 to {facts.vocab_size - 1}, the vocabulary of {key}"


def _without_effect(config: Config) -> Iterator[str]:
    for entry in unmet(config):
        yield f"{entry.setting} {entry.need.fault}: it needs {entry.need.condition}; set that or {leave_out(entry.key)}"
