"""Rules of the parallel layout: among its sizes, with the model, and for data-parallel gradient sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mega_rl.config.choices import has_reference, reads_reference
from mega_rl.config.schema import Config, MegatronConfig
from mega_rl.config.values import ModelFacts, divisors, leave_out, listed

ACTOR = "engine.megatron"  # section of the sizes that all models have, unless they have their own
REFERENCE = "engine.megatron.reference"
_DDP, _MOE, _OPTIMIZER = "engine.megatron.ddp", "engine.megatron.moe", "engine.megatron.optimizer"


def has_own_layout(config: Config) -> bool:
    """Return whether the reference of a run is cut differently from the other models."""
    par = config.engine.megatron
    return config.engine.backend == "megatron" and has_reference(config) and par.of_reference != par


def layout(par: MegatronConfig, world_size: int, *, section: str = ACTOR) -> Iterator[str]:
    """Sizes that do not go together on `world_size` ranks; `section` has them."""
    size = par.tp * par.pp * par.cp
    if world_size % size:
        yield (
            f"world size {world_size} is not a multiple of {section}.tp*pp*cp={par.tp}*{par.pp}*{par.cp}="
            f"{size}; start a multiple of {size} ranks (--nproc-per-node {size}), or choose sizes whose product "
            f"divides {world_size}"
        )
    etp = par.etp or par.tp
    stage = world_size // par.pp
    if par.ep * etp > 1 and world_size % size == 0 and stage % (par.ep * etp):
        yield (
            f"{section}.ep*etp={par.ep}*{etp}={par.ep * etp} does not divide the {stage} ranks of a pipeline "
            f"stage (world size {world_size} / pp {par.pp}); legal products: {listed(divisors(stage))}"
        )


def fits_models(config: Config, world_size: int, models: Mapping[str, ModelFacts]) -> Iterator[str]:
    """List the settings that exceed a model's positions or cannot cut it; `models` is by key."""
    prompt, val = config.data.max_prompt_tokens, config.validation.max_new_tokens
    par, sglang = config.engine.megatron, config.rollout.backend == "sglang"
    for key, facts in models.items():
        if not (key == "model.ref_path" and has_own_layout(config)):
            yield from fits_model(par, key, facts)
        yield from facts.too_long(
            key, "data.max_prompt_tokens+rollout.max_new_tokens", prompt + config.rollout.max_new_tokens, sglang=sglang
        )
        if val and key in ("model.path", "reward.source.path"):
            yield from facts.too_long(
                key, "data.max_prompt_tokens+validation.max_new_tokens", prompt + val, sglang=sglang
            )
        tp = config.rollout.sglang.server.tp
        if sglang and key == "model.path" and facts.num_heads % tp:
            yield f"rollout.sglang.server.tp={tp} does not divide the {facts.num_heads} attention heads of {key}"
    key = "model.ref_path" if config.model.ref_path else "model.path"
    if has_own_layout(config):
        yield from layout(par.of_reference, world_size, section=REFERENCE)
        if key in models:
            yield from fits_model(par.of_reference, key, models[key], section=REFERENCE)


def fits_model(par: MegatronConfig, key: str, facts: ModelFacts, *, section: str = ACTOR) -> Iterator[str]:
    """List the sizes of the layout that a model cannot be cut by.

    key: the setting that names its checkpoint. section: that of the sizes.
    """
    legal = listed([tp for tp in divisors(facts.num_heads) if not _cut_problems(tp, facts)])
    for problem in _cut_problems(par.tp, facts):
        yield f"{section}.tp={par.tp} {problem} of {key}; legal: {legal}"
    stages = par.pp * par.vpp
    if not par.pipeline and facts.num_layers % stages:
        yield (
            f"{section}.pp*vpp={par.pp}*{par.vpp}={stages} does not divide the {facts.num_layers} layers of "
            f"{key}; legal products: {listed(divisors(facts.num_layers))}, or uneven stages: {section}.pipeline"
        )
    latent, delta = facts.multi_latent_attention, facts.delta_key_heads
    if par.tp > 1 and not par.sequence_parallel and (latent or delta or facts.num_experts):
        # Without it Megatron-Core sums the gradient of the latent norms over tp once too often, that of the norms in
        # delta nets never, and experts that are not cut as the rest is see some tokens twice.
        has = "multi-latent attention" if latent else "gated delta nets" if delta else "experts"
        yield f"{key} has {has}: {section}.tp={par.tp} needs {section}.sequence_parallel=true"
    if par.cp > 1 and facts.uncut:
        yield f"{section}.cp={par.cp}: context parallelism does not cut the {facts.uncut} of {key} yet; set it to 1"
    if par.cp > 1 and delta % (par.tp * par.cp):
        yield (
            f"{section}.tp*cp={par.tp}*{par.cp}={par.tp * par.cp} does not divide the {delta} key heads of the delta "
            f"nets of {key}; legal products: {listed(divisors(delta))}"
        )
    yield from _fits_experts(par, key, facts, section)


def _fits_experts(par: MegatronConfig, key: str, facts: ModelFacts, section: str) -> Iterator[str]:
    etp = par.etp or par.tp
    if not facts.num_experts:
        idle = [f"{section}.{name}" for name in ("ep", "etp") if getattr(par, name) > 1]
        if (section, key) == (ACTOR, "model.path"):  # a dense reference of a mixture has nothing to do with them
            changed = (field for field in dataclasses.fields(par.moe) if getattr(par.moe, field.name) != field.default)
            idle += [f"{_MOE}.{field.name}" for field in changed]
        for setting in idle:
            yield f"{setting} has no effect: {key} has no experts; {leave_out(setting)}"
        return
    if facts.num_experts % par.ep:
        yield f"{section}.ep={par.ep} does not divide the {facts.num_experts} experts of {key}"
    if facts.expert_ffn_hidden_size % etp:
        yield (
            f"{section}.etp={etp} does not divide the feed-forward size {facts.expert_ffn_hidden_size} of an "
            f"expert of {key}; legal: {listed(divisors(facts.expert_ffn_hidden_size))}"
        )
    if facts.expert_biases and etp > 1:
        yield f"{section}.etp={etp}: Megatron-Core does not cut the biases of {key}'s experts; set {section}.etp=1"


def _cut_problems(tp: int, facts: ModelFacts) -> list[str]:
    problems = []
    if facts.num_heads % tp:
        problems.append(f"does not divide the {facts.num_heads} attention heads")
    if facts.num_kv_heads % tp and tp % facts.num_kv_heads:
        problems.append(f"neither divides nor is a multiple of the {facts.num_kv_heads} key-value heads")
    if facts.ffn_hidden_size % tp:
        problems.append(f"does not divide the feed-forward size {facts.ffn_hidden_size}")
    if facts.delta_key_heads % tp:
        problems.append(f"does not divide the {facts.delta_key_heads} key heads of the delta nets")
    return problems


def engine(config: Config, world_size: int) -> Iterator[str]:
    """List settings of an engine that do not go together."""
    par, ranks = config.engine.megatron, config.engine.fsdp.shard_ranks
    ddp, optimizer = par.ddp, par.optimizer
    if ranks and world_size % ranks:
        legal = listed(divisors(world_size))
        yield f"engine.fsdp.shard_ranks={ranks} does not divide the world size {world_size}; legal: {legal}"
    if config.engine.backend == "fsdp" and config.model.recompute == "selective":
        yield "model.recompute=selective needs engine.backend=megatron; with engine.backend=fsdp legal: none, full"
    if optimizer.precision_aware and optimizer.cpu_offload:
        yield f"{_OPTIMIZER}.cpu_offload with precision_aware=true: the host's Adam has FP32 moments; use one of them"
    if ddp.reduce_scatter_fp32_accumulation and (ddp.grad_reduce_in_fp32 or config.model.dtype != "bf16"):
        yield f"{_DDP}.reduce_scatter_fp32_accumulation=true needs grad_reduce_in_fp32=false and model.dtype=bf16"
    of_adam = optimizer.precision_aware or optimizer.cpu_offload or ddp.name == "megatron_fsdp"
    if of_adam and config.optim.name == "muon":
        what = f"{_OPTIMIZER}.precision_aware, {_OPTIMIZER}.cpu_offload and {_DDP}=megatron_fsdp"
        yield f"optim.name=muon: only Adam steps the state of {what}; leave them out, or set optim.name=adam"
    interval = config.algorithm.kl.reference_interval
    if interval and has_own_layout(config):
        yield (
            f"algorithm.kl.reference_interval={interval} with {REFERENCE}: the reference takes in the policy's weights "
            "rank by rank, which needs equal shards; set it to 0, or leave the reference on the actor's layout"
        )
    yield from _adapter(config)
    yield from _fsdp(config, world_size)


def _adapter(config: Config) -> Iterator[str]:
    """List what low-rank adapters are not combined with."""
    adapter, par, kl = config.model.adapter, config.engine.megatron, config.algorithm.kl
    given = f"model.adapter.rank={adapter.rank}"
    if not adapter.rank:
        return
    if par.transformer_impl == "transformer_engine":
        # Its linear layers norm their input themselves, and hand the normed one to nobody.
        yield f"{given}: engine.megatron.transformer_impl=transformer_engine has no adapters; legal: auto, local"
    if par.ddp.name != "ddp":
        yield f"{given}: {_DDP}={par.ddp} is not supported; set {_DDP}=ddp"
    if kl.reference_interval:
        yield (
            f"{given}: algorithm.kl.reference_interval={kl.reference_interval} copies weights into the reference, and "
            "adapters are none of its weights; set it to 0"
        )
    if rate := par.moe.expert_bias_update_rate:
        yield f"{given}: engine.megatron.moe.expert_bias_update_rate={rate:g} moves frozen routers; set it to 0"
    if adapter.path and reads_reference(config) and not config.model.ref_path:
        yield (
            f"model.adapter.path={adapter.path}: the reference would be the model below, not the policy as it starts; "
            "merge the two by 'mega-rl convert merge' and name the result in model.path, or set model.ref_path"
        )


def _fsdp(config: Config, world_size: int) -> Iterator[str]:
    """List what fully sharded data parallelism of Megatron is not combined with; `mega_rl.ddp.wrap` has the reasons."""
    par = config.engine.megatron
    ddp, optimizer = par.ddp, par.optimizer
    if ddp.name == "ddp":
        return
    # Experts: gradients would be summed over ranks with other experts.
    refused = {
        f"engine.megatron.ep={par.ep}": par.ep > 1,
        f"engine.megatron.etp={par.etp}": par.etp not in (0, par.tp),
        f"{_OPTIMIZER}.cpu_offload={optimizer.cpu_offload:g}": optimizer.cpu_offload > 0,
        f"{_OPTIMIZER}.precision_aware=true": optimizer.precision_aware,
    }
    if ddp.name == "megatron_fsdp":
        plain = ddp.fsdp_sharding == "optim"
        # It waits for a gradient of every parameter, and on one rank adds gradients up wrongly. With "optim" overlap
        # counts a rank's own gradients twice, and instances do not reduce between one another.
        refused[f"engine.megatron.pp={par.pp}"] = par.pp > 1
        refused["model.frozen"] = bool(config.model.frozen)
        refused["one data-parallel rank (dp*cp=1)"] = world_size == par.tp * par.pp
        refused[f"{_DDP}.fsdp_sharding=optim and overlap_grad_reduce=true"] = plain and ddp.overlap_grad_reduce
        refused[f"{_DDP}.fsdp_sharding=optim and optimizer_instances={ddp.optimizer_instances}"] = (
            plain and ddp.optimizer_instances > 1
        )
    for setting in (setting for setting, given in refused.items() if given):
        yield f"{_DDP}={ddp} with {setting}: not supported; change that, or set {_DDP}=ddp"
