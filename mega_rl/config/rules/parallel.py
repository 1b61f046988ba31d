"""Rules of the parallel layout: among its sizes, with the model, and of how data parallelism adds gradients up.

As in `mega_rl.config.rules`, each line names the values, the rule and what is legal; nothing is raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mega_rl.config.facts import ModelFacts, divisors, leave_out, listed
from mega_rl.config.schema import Config, MegatronConfig

ACTOR = "engine.megatron"  # section of the sizes that all models have, unless they have their own
_DDP, _MOE, _OPTIMIZER = "engine.megatron.ddp", "engine.megatron.moe", "engine.megatron.optimizer"
RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")


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
    if section == ACTOR and par.vpp > 1 and par.pp == 2 and not par.overlap_p2p:
        # Megatron-Core checks this in its training arguments only; its schedule runs and gives wrong gradients.
        yield (
            f"engine.megatron.vpp={par.vpp} with pp=2 needs engine.megatron.overlap_p2p=true; without it gradients are "
            "wrong"
        )


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
    if par.tp > 1 and not par.sequence_parallel and (facts.multi_latent_attention or facts.num_experts):
        # Without it Megatron-Core sums the gradient of the latent norms over tp once too often, and experts that are
        # not cut as the rest is see some tokens twice.
        has = "multi-latent attention" if facts.multi_latent_attention else "experts"
        yield f"{key} has {has}: {section}.tp={par.tp} needs {section}.sequence_parallel=true"
    yield from _fits_experts(par, key, facts, section)


def _fits_experts(par: MegatronConfig, key: str, facts: ModelFacts, section: str) -> Iterator[str]:
    etp = par.etp or par.tp
    if not facts.num_experts:
        for name in ("ep", "etp"):
            if getattr(par, name) > 1:
                size = f"{section}.{name}"
                fix = leave_out(size) if section == ACTOR else f"set {size}=1"
                yield f"{size}={getattr(par, name)}: {key} has no experts; {fix}"
        for entry in dataclasses.fields(par.moe):
            # Of the actor: a dense reference or reward model beside a mixture has nothing to do with them.
            if (section, key) == (ACTOR, "model.path") and getattr(par.moe, entry.name) != entry.default:
                setting = f"engine.megatron.moe.{entry.name}"
                yield f"{setting} has no effect: {key} has no experts; {leave_out(setting)}"
        return
    if (section, key) == (ACTOR, "model.path") and par.moe.shared_expert_overlap and not facts.shared_experts:
        setting = "engine.megatron.moe.shared_expert_overlap"
        yield f"{setting} has no effect: {key} has no shared experts; {leave_out(setting)}"
    if facts.num_experts % par.ep:
        yield (
            f"{section}.ep={par.ep} does not divide the {facts.num_experts} experts of {key}; "
            f"legal: {listed(divisors(facts.num_experts))}"
        )
    if facts.expert_ffn_hidden_size % etp:
        yield (
            f"{section}.etp={etp} does not divide the feed-forward size {facts.expert_ffn_hidden_size} of an "
            f"expert of {key}; legal: {listed(divisors(facts.expert_ffn_hidden_size))}"
        )
    if facts.expert_biases and etp > 1:
        yield (
            f"{section}.etp={etp}: the experts of {key} have biases, which Megatron-Core does not cut; "
            f"set {section}.etp=1"
        )


def _cut_problems(tp: int, facts: ModelFacts) -> list[str]:
    problems = []
    if facts.num_heads % tp:
        problems.append(f"does not divide the {facts.num_heads} attention heads")
    if facts.num_kv_heads % tp and tp % facts.num_kv_heads:
        problems.append(f"neither divides nor is a multiple of the {facts.num_kv_heads} key-value heads")
    if facts.ffn_hidden_size % tp:
        problems.append(f"does not divide the feed-forward size {facts.ffn_hidden_size}")
    return problems


def experts(config: Config) -> Iterator[str]:
    """Settings of mixtures that do not go together."""
    par, model = config.engine.megatron, config.model
    moe = par.moe
    if moe.dispatcher == "deepep" and par.ep * (par.etp or par.tp) == 1:
        yield (
            f"{_MOE}.dispatcher=deepep with ep*etp=1: every rank has all experts whole, and no token travels; set "
            "engine.megatron.ep above 1 or dispatcher=alltoall"
        )
    if moe.shared_expert_overlap and moe.dispatcher != "alltoall":
        yield (
            f"{_MOE}.shared_expert_overlap=true with dispatcher={moe.dispatcher}: shared experts run between the "
            "messages of alltoall alone; set dispatcher=alltoall or shared_expert_overlap=false"
        )
    if moe.shared_expert_overlap and model.recompute == "selective" and "shared_experts" in model.recompute_modules:
        yield (
            f"{_MOE}.shared_expert_overlap=true with model.recompute_modules=shared_experts: what runs in pieces "
            "cannot be run again as one; change one of them"
        )
    for setting, reason in {
        "engine.megatron.moe.routing_replay": moe.routing_replay and "the kernel records and takes no choices",
        "trainer.deterministic": config.trainer.deterministic and "the kernel is not known to repeat its bits",
    }.items():
        if moe.router_fusion and reason:
            yield f"{_MOE}.router_fusion=true with {setting}=true: {reason}; set one of them to false"


def recompute(config: Config) -> Iterator[str]:
    """Modules that selective recompute does not know."""
    unknown = [name for name in config.model.recompute_modules if name not in RECOMPUTABLE]
    if unknown:
        yield f"model.recompute_modules={unknown}: legal: {', '.join(RECOMPUTABLE)}"


def fsdp(config: Config, world_size: int) -> Iterator[str]:
    """List what fully sharded data parallelism of Megatron-Core 0.16.1 is not combined with."""
    par = config.engine.megatron
    ddp, optimizer = par.ddp, par.optimizer
    name = f"{_DDP}={ddp}"
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
        yield f"{name} with {setting}: not supported; change that, or set {_DDP}=ddp"


def data_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Ways of adding gradients up that do not go together."""
    yield from fsdp(config, world_size)
    par = config.engine.megatron
    ddp, optimizer = par.ddp, par.optimizer
    if optimizer.precision_aware and not optimizer.distributed:
        yield f"{_OPTIMIZER}.precision_aware=true needs {_OPTIMIZER}.distributed=true"
    if optimizer.precision_aware and optimizer.cpu_offload:
        yield (
            f"{_OPTIMIZER}.cpu_offload={optimizer.cpu_offload:g} with precision_aware=true: the host's Adam has FP32 "
            "moments; use one of the two"
        )
    if ddp.reduce_scatter_fp32_accumulation and (ddp.grad_reduce_in_fp32 or config.model.dtype != "bf16"):
        in_fp32 = str(ddp.grad_reduce_in_fp32).lower()
        yield (
            f"{_DDP}.reduce_scatter_fp32_accumulation=true with grad_reduce_in_fp32={in_fp32} and "
            f"model.dtype={config.model.dtype}: it sends bf16 gradients; set grad_reduce_in_fp32=false, dtype=bf16"
        )
    if ddp.reduce_scatter_fp32_accumulation and not optimizer.distributed:
        yield (
            f"{_DDP}.reduce_scatter_fp32_accumulation=true needs {_OPTIMIZER}.distributed=true: nothing is scattered"
        )
    replicas = world_size // (par.tp * par.pp)
    if ddp.optimizer_instances > 1 and replicas % ddp.optimizer_instances:
        yield (
            f"{_DDP}.optimizer_instances={ddp.optimizer_instances} does not divide the {replicas} ranks that hold the "
            f"same part of the model (dp*cp); legal: {listed(divisors(replicas))}"
        )


def fsdp_engine(config: Config, world_size: int) -> Iterator[str]:
    """List the settings that engine.backend=fsdp cannot follow."""
    if config.engine.backend != "fsdp":
        return
    ranks = config.engine.fsdp.shard_ranks
    if ranks and world_size % ranks:
        legal = listed(divisors(world_size))
        yield f"engine.fsdp.shard_ranks={ranks} does not divide the world size {world_size}; legal: {legal}"
    if config.model.recompute == "selective":
        yield "model.recompute=selective needs engine.backend=megatron; with engine.backend=fsdp legal: none, full"
