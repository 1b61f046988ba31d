from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mega_rl.config.facts import ModelFacts, leave_out
from mega_rl.config.keys import FIELDS, flat, value_of
from mega_rl.config.loader import load
from mega_rl.config.needs import models_take_turns
from mega_rl.config.rules import check
from mega_rl.config.schema import Config

FACTS = ModelFacts(
    num_layers=12,
    num_heads=16,
    num_kv_heads=8,
    ffn_hidden_size=96,
    vocab_size=1000,
    max_position_embeddings=4096,
)


def broken(*overrides: str, world_size: int = 1, facts: ModelFacts = FACTS) -> list[str]:
    return check(load(None, overrides), world_size=world_size, models={"model.path": facts})


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ()),
        (8, ("engine.megatron.tp=4", "engine.megatron.sequence_parallel=true")),
        (8, ("engine.megatron.pp=4",)),
        (4, ("engine.megatron.pp=4", "engine.megatron.vpp=3")),
        (2, ("engine.megatron.pp=2", "engine.megatron.vpp=2", "engine.megatron.overlap_p2p=true")),
        (2, ("engine.megatron.cp=2",)),
        (5, ("engine.megatron.pp=5", "engine.megatron.pipeline=Ett|tttt|tt|tt|ttL", "trainer.prompts_per_step=64")),
        (
            8,
            (
                "engine.megatron.ddp.overlap_grad_reduce=true",
                "engine.megatron.ddp.overlap_param_gather=true",
                "engine.megatron.ddp.bucket_size=1000",
            ),
        ),
        (8, ("engine.megatron.ddp.optimizer_instances=4",)),
        (
            8,
            (
                "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true",
                "engine.megatron.ddp.grad_reduce_in_fp32=false",
            ),
        ),
        (1, ("model.recompute=selective", "model.recompute_modules=[mlp,layernorm]")),
        (1, ("model.recompute=full", "model.recompute_layers=2")),
        (16, ("engine.megatron.tp=16",)),  # more ranks than key-value heads: each is held twice
        (64, ()),
        (64, ("trainer.minibatch_size=16", "rollout.n=4")),  # one sequence for each rank
        (1, ("algorithm.advantage=grpo", "rollout.n=2", "algorithm.kl=loss", "algorithm.kl.coef=0.1")),
        (
            1,
            (
                "algorithm.advantage=gae",
                "algorithm.kl=reward",
                "algorithm.kl.control=adaptive",
                "algorithm.kl.target=0.2",
            ),
        ),
        (1, ("algorithm.loss.dual_clip=4",)),
        (1, ("optim.schedule=cosine", "optim.min_lr_ratio=0.1", "optim.warmup_steps=99")),
        (1, ("algorithm.advantage=gae", "optim.warmup_steps=59", "algorithm.critic_warmup_steps=40")),
        (1, ("trainer.microbatch.packing=false", "trainer.microbatch.size=2")),
        (1, ("trainer.val_interval=5", "data.val_size=8")),
        (1, ("rollout.stop_token_ids=[0,999]",)),
        (1, ("trainer.microbatch.max_tokens=1280",)),
        (1, ("data.max_prompt_tokens=3840",)),
    ],
)
def test_configs_that_can_run(world_size: int, overrides: tuple[str, ...]) -> None:
    assert broken(*overrides, world_size=world_size) == []


RULES = [
    (
        3,
        "engine.megatron.tp=2",
        "world size 3 is not a multiple of engine.megatron.tp*pp*cp=2*1*1=2; "
        "start a multiple of 2 ranks (--nproc-per-node 2), or choose sizes whose product divides 3",
    ),
    (
        1,
        "engine.megatron.sequence_parallel=true",
        "engine.megatron.sequence_parallel=true has no effect: it needs engine.megatron.tp above 1; set that or leave "
        "it out (on a command line: engine.megatron.sequence_parallel=null)",
    ),
    (
        1,
        "engine.megatron.vpp=2",
        "engine.megatron.vpp=2 has no effect: it needs engine.megatron.pp above 1; set that or leave it out (on a "
        "command line: engine.megatron.vpp=null)",
    ),
    (
        2,
        "engine.megatron.pp=2 engine.megatron.vpp=3",
        "engine.megatron.vpp=3 with pp=2 needs engine.megatron.overlap_p2p=true; without it gradients are wrong",
    ),
    (
        4,
        "engine.megatron.pp=4 engine.megatron.overlap_p2p=true",
        "engine.megatron.overlap_p2p=true has no effect: it needs engine.megatron.vpp above 1; set that or leave it "
        "out (on a command line: engine.megatron.overlap_p2p=null)",
    ),
    (
        1,
        "trainer.minibatch_size=24",
        "trainer.minibatch_size=24 does not divide trainer.prompts_per_step=64; legal: 1, 2, 4, 8, 16, 32, 64",
    ),
    (
        6,
        "",
        "trainer.prompts_per_step=64 is not a multiple of the data-parallel size 6 (world size 6 / tp*pp*cp 1); "
        "legal: multiples of 6",
    ),
    (
        64,
        "trainer.minibatch_size=16 rollout.n=2",
        "trainer.minibatch_size*rollout.n=16*2=32 leaves some of the 64 data-parallel ranks without a sequence; "
        "make it at least 64",
    ),
    (
        1,
        "trainer.microbatch.max_tokens=1279",
        "trainer.microbatch.max_tokens=1279 cannot hold one sequence of "
        "data.max_prompt_tokens+rollout.max_new_tokens=1280; make it at least 1280",
    ),
    (
        1,
        "model.recompute=selective model.recompute_modules=[mlp,attention]",
        "model.recompute_modules=['attention']: legal: core_attn, layernorm, mlp, moe, moe_act, mla_up_proj, "
        "shared_experts",
    ),
    (
        2,
        "engine.megatron.ddp.overlap_param_gather=true",
        "engine.megatron.ddp.overlap_param_gather=true cannot work: it needs "
        "engine.megatron.ddp.overlap_grad_reduce=true and engine.megatron.optimizer.distributed=true, whose updates "
        "are gathered; set that or leave it out (on a command line: engine.megatron.ddp.overlap_param_gather=null)",
    ),
    (
        2,
        "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true",
        "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true with grad_reduce_in_fp32=true "
        "and model.dtype=bf16: it sends bf16 gradients; set grad_reduce_in_fp32=false, dtype=bf16",
    ),
    (
        2,
        (
            "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true engine.megatron.ddp.grad_reduce_in_fp32=false "
            "engine.megatron.optimizer.distributed=false"
        ),
        (
            "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true needs "
            "engine.megatron.optimizer.distributed=true: nothing is scattered"
        ),
    ),
    (
        8,
        "engine.megatron.ddp.optimizer_instances=3",
        "engine.megatron.ddp.optimizer_instances=3 does not divide the 8 ranks that hold the same part of the model "
        "(dp*cp); legal: 1, 2, 4, 8",
    ),
    (
        2,
        "engine.megatron.cp=2 rollout.max_new_tokens=255 trainer.microbatch.max_tokens=1279",
        "trainer.microbatch.max_tokens=1279 cannot hold one sequence of "
        "data.max_prompt_tokens+rollout.max_new_tokens=1279, rounded up to a multiple of 2*cp=4; make it at least 1280",
    ),
    (
        1,
        "engine.megatron.optimizer.precision_aware=true engine.megatron.optimizer.distributed=false",
        "engine.megatron.optimizer.precision_aware=true needs engine.megatron.optimizer.distributed=true",
    ),
    (
        1,
        "engine.megatron.optimizer.precision_aware=true engine.megatron.optimizer.cpu_offload=1",
        (
            "engine.megatron.optimizer.cpu_offload=1 with precision_aware=true: the host's "
            "Adam has FP32 moments; use one of the two"
        ),
    ),
    (
        1,
        "optim.warmup_steps=100",
        "optim.warmup_steps=100 does not end within the run: it needs trainer.steps above it; set that or leave it "
        "out (on a command line: optim.warmup_steps=null)",
    ),
    (
        1,
        "algorithm.advantage=gae algorithm.critic_warmup_steps=100",
        "algorithm.critic_warmup_steps=100 does not end within the run: it needs trainer.steps above it, or the actor "
        "never trains; set that or leave it out (on a command line: algorithm.critic_warmup_steps=null)",
    ),
    (
        1,
        "algorithm.advantage=gae optim.warmup_steps=60 algorithm.critic_warmup_steps=40",
        "optim.warmup_steps=60 does not end within the run: it needs trainer.steps above its sum with "
        "algorithm.critic_warmup_steps, which the actor's warm-up begins after; set that or leave it out (on a command "
        "line: optim.warmup_steps=null)",
    ),
    (
        1,
        "trainer.val_interval=5",
        "trainer.val_interval=5 has no prompts to validate on: it needs data.val_files, data.val_size, "
        "validation.sets, or a data.source with has_validation = True; set that or "
        "leave it out (on a command line: trainer.val_interval=null)",
    ),
    (
        1,
        "rollout.n=1",
        "rollout.n=1: algorithm.advantage=grpo compares samples of a prompt; legal: at least 2",
    ),
    (
        1,
        "algorithm.advantage=grpo rollout.n=4 algorithm.kl=reward",
        "algorithm.kl=reward with advantage=grpo: it has one reward for a whole response, a KL per token "
        "has no place in it; legal: none, loss, or reward with advantage=gae",
    ),
    (
        1,
        "algorithm.advantage=gae algorithm.old_logprobs=rollout algorithm.kl=reward",
        "algorithm.kl=reward with algorithm.old_logprobs=rollout: the difference of engine and trainer would "
        "count as KL; legal: kl=loss with control=fixed, or old_logprobs=auto or recompute",
    ),
    (
        1,
        "algorithm.old_logprobs=rollout algorithm.correction=tis",
        "algorithm.correction=tis has no effect: it needs algorithm.old_logprobs=auto or recompute: with rollout the "
        "ratio itself is to what sampled; set that or leave it out (on a command line: algorithm.correction=null)",
    ),
    (1, "algorithm.loss.dual_clip=1", "algorithm.loss.dual_clip=1: legal: 0 (off) or above 1"),
    (
        1,
        "algorithm.loss=clip_cov algorithm.loss.dual_clip=0.5",
        "algorithm.loss.dual_clip=0.5: legal: 0 (off) or above 1",
    ),
    (
        1,
        "algorithm.loss=gspo",
        "algorithm.loss_aggregation=token-mean with algorithm.loss=gspo: the loss has one number for a response, which "
        "this would weigh by the response's length; legal: seq-mean-token-mean",
    ),
    (
        1,
        "algorithm.advantage=gae algorithm.loss=gmpo algorithm.loss_aggregation=seq-mean-token-mean",
        "algorithm.loss=gmpo with algorithm.advantage=gae: the loss reads one advantage for a response, so what a "
        "critic or a teacher says of single tokens is lost; set algorithm.loss=gspo, or an estimator with one number "
        "for a response",
    ),
    (
        1,
        "algorithm.advantage=gae trainer.microbatch.skip_zero_advantages=true",
        "trainer.microbatch.skip_zero_advantages=true has no effect with algorithm.advantage=gae, which does "
        "not compare rewards of one prompt; set it to false",
    ),
    *(
        (
            1,
            f"algorithm.advantage=grpo rollout.n=4 trainer.microbatch.skip_zero_advantages=true {setting}",
            f"trainer.microbatch.skip_zero_advantages=true with {setting.split()[0]}: responses whose advantages are "
            "0 would give a gradient still; set it to false",
        )
        for setting in (
            "algorithm.loss=kl_cov algorithm.epochs=2",
            "algorithm.entropy_coef=0.01",
            "algorithm.loss.drift_coef=0.5 algorithm.loss=cispo",
            "algorithm.kl=loss",
        )
    ),
    (
        1,
        "algorithm.loss=kl_cov",
        "algorithm.loss=kl_cov has no effect with one optimizer step for each batch, in which the policy is still the "
        "one before the update; lower trainer.minibatch_size, raise algorithm.epochs, or set "
        "algorithm.old_logprobs=rollout",
    ),
    (
        3,
        "engine.megatron.tp=3 trainer.prompts_per_step=66 trainer.minibatch_size=66",
        "engine.megatron.tp=3 does not divide the 16 attention heads of model.path; legal: 1, 2, 4, 8, 16",
    ),
    (
        5,
        "engine.megatron.pp=5",
        "engine.megatron.pp*vpp=5*1=5 does not divide the 12 layers of model.path; legal products: 1, 2, 3, 4, 6, 12, "
        "or uneven stages: engine.megatron.pipeline",
    ),
    (
        1,
        "data.max_prompt_tokens=3841",
        "data.max_prompt_tokens+rollout.max_new_tokens=4097 is above the 4096 positions of model.path; "
        "make them shorter",
    ),
    (
        1,
        "rollout.backend=sglang data.max_prompt_tokens=3840",
        "data.max_prompt_tokens+rollout.max_new_tokens=4096 is above the 4095 positions of model.path but the one that "
        "SGLang keeps free; make them shorter",
    ),
    (
        1,
        "rollout.backend=sglang data.max_prompt_tokens=8 trainer.val_interval=1 data.val_files=[v] "
        "validation.max_new_tokens=4088",
        "data.max_prompt_tokens+validation.max_new_tokens=4096 is above the 4095 positions of model.path but the one "
        "that SGLang keeps free; make them shorter",
    ),
    (
        1,
        "rollout.stop_token_ids=[1000,3,-1]",
        "rollout.stop_token_ids=[1000, -1]: legal: 0 to 999, the vocabulary of model.path",
    ),
]


@pytest.mark.parametrize(("world_size", "overrides", "line"), RULES)
def test_broken_rules(world_size: int, overrides: str, line: str) -> None:
    assert line in broken(*overrides.split(), world_size=world_size)


def test_each_broken_rule_is_the_only_line_unless_it_drags_another_along() -> None:
    more = {index for index, (world, text, _) in enumerate(RULES) if len(broken(*text.split(), world_size=world)) > 1}
    assert more == {35}  # tp=3 breaks two rules of the heads


@pytest.mark.parametrize(
    ("overrides", "key", "needs"),
    [
        ("algorithm.advantage=grpo rollout.n=2 optim.critic_lr=1", "optim.critic_lr", "algorithm.advantage=gae"),
        (
            "algorithm.advantage=grpo rollout.n=2 algorithm.critic_warmup_steps=3",
            "algorithm.critic_warmup_steps",
            "algorithm.advantage=gae",
        ),
        (
            "algorithm.advantage=grpo rollout.n=2 algorithm.value_clip=0",
            "algorithm.value_clip",
            "algorithm.advantage=gae",
        ),
        (
            "model.ref_path=x",
            "model.ref_path",
            "a reference: algorithm.kl=reward or loss, or algorithm.advantage=distillation",
        ),
        ("algorithm.kl=loss algorithm.kl.horizon=5", "algorithm.kl.horizon", "algorithm.kl.control=adaptive"),
        ("optim.min_lr_ratio=0.5", "optim.min_lr_ratio", "optim.schedule=linear or cosine"),
        ("trainer.microbatch.size=1", "trainer.microbatch.size", "trainer.microbatch.packing=false"),
        (
            "trainer.microbatch.packing=false trainer.microbatch.max_tokens=64",
            "trainer.microbatch.max_tokens",
            "trainer.microbatch.packing=true",
        ),
        ("data.val_size=4", "data.val_size", "trainer.val_interval above 0"),
        ("engine.megatron.pipeline=EttL", "engine.megatron.pipeline", "engine.megatron.pp above 1"),
        ("model.recompute_layers=2", "model.recompute_layers", "model.recompute=full"),
        ("model.fp32_head=true model.dtype=fp32", "model.fp32_head", "model.dtype=bf16"),
        (
            "engine.megatron.ddp.bucket_size=9",
            "engine.megatron.ddp.bucket_size",
            "engine.megatron.ddp.overlap_grad_reduce=true",
        ),
        (
            "engine.megatron.optimizer.moment_dtype=bf16",
            "engine.megatron.optimizer.moment_dtype",
            "engine.megatron.optimizer.precision_aware=true",
        ),
        ("trainer.val_interval=1 data.val_files=[a] data.val_size=4", "data.val_size", "no data.val_files"),
        (
            "engine.resident_roles=one algorithm.advantage=grpo rollout.n=2",
            "engine.resident_roles",
            "a second model: algorithm.advantage=gae or algorithm.advantage=distillation, "
            "algorithm.kl=reward or loss, or reward.source=model",
        ),
        (
            "algorithm.advantage=gae engine.resident_roles=one engine.backend=fsdp engine.fsdp.cpu_offload=true",
            "engine.resident_roles",
            "engine.fsdp.cpu_offload=false: with it every model's state is on the host already",
        ),
        (
            "reward.source=model reward.source.path=m reward.skip_special_tokens=false",
            "reward.skip_special_tokens",
            "reward.source=function or http: a reward model reads tokens, or a conversation without them",
        ),
    ],
)
def test_settings_that_nothing_reads(overrides: str, key: str, needs: str) -> None:
    config = load(None, overrides.split())
    (line,) = broken(*overrides.split())
    value = str(value_of(config, key))
    value = {"True": "true", "False": "false"}.get(value, value)
    assert line == f"{key}={value} has no effect: it needs {needs}; set that or {leave_out(key)}"


@pytest.mark.parametrize(
    ("settings", "colocated", "turns"),
    [
        ("algorithm.advantage=gae", False, False),
        ("algorithm.advantage=gae", True, True),
        ("algorithm.advantage=gae engine.resident_roles=all", True, False),
        ("algorithm.advantage=gae engine.resident_roles=one", False, True),
        ("algorithm.advantage=gae engine.backend=fsdp", True, True),
        ("algorithm.advantage=gae engine.backend=fsdp engine.fsdp.cpu_offload=true", True, False),
        ("algorithm.advantage=grpo", True, False),
        ("algorithm.advantage=grpo algorithm.kl=loss", True, True),
        ("algorithm.advantage=grpo reward.source=model", True, True),
    ],
)
def test_models_take_turns_where_they_move_anyway(settings: str, colocated: bool, turns: bool) -> None:
    assert models_take_turns(load(None, settings.split()), colocated=colocated) is turns


def test_kv_heads_may_divide_tp_or_the_other_way_round_but_not_neither() -> None:
    facts = ModelFacts(**{**vars(FACTS), "num_heads": 24, "num_kv_heads": 6})
    assert broken("engine.megatron.tp=3", world_size=3, facts=facts)[1:] == []  # only prompts_per_step % dp is left
    assert broken("engine.megatron.tp=12", world_size=12, facts=facts) == []
    assert broken("engine.megatron.tp=4", world_size=4, facts=facts) == [
        "engine.megatron.tp=4 neither divides nor is a multiple of the 6 key-value heads of model.path; "
        "legal: 1, 2, 3, 6, 12, 24"
    ]


def test_feed_forward_size_limits_tp() -> None:
    facts = ModelFacts(**{**vars(FACTS), "ffn_hidden_size": 100})
    assert broken("engine.megatron.tp=8", world_size=8, facts=facts) == [
        "engine.megatron.tp=8 does not divide the feed-forward size 100 of model.path; legal: 1, 2, 4"
    ]


def test_latent_attention_with_tp_needs_sequence_parallel() -> None:
    facts = ModelFacts(**{**vars(FACTS), "multi_latent_attention": True})
    assert broken("engine.megatron.tp=2", world_size=2, facts=facts) == [
        "model.path has multi-latent attention: engine.megatron.tp=2 needs engine.megatron.sequence_parallel=true"
    ]
    assert broken("engine.megatron.tp=2", "engine.megatron.sequence_parallel=true", world_size=2, facts=facts) == []
    assert broken(facts=facts) == []


FSDP = "engine.megatron.ddp=megatron_fsdp"


@pytest.mark.parametrize(
    ("world_size", "overrides", "refused"),
    [
        (4, (FSDP, "engine.megatron.optimizer.cpu_offload=0.5"), "engine.megatron.optimizer.cpu_offload=0.5"),
        (4, (FSDP, "engine.megatron.pp=2"), "engine.megatron.pp=2"),
        (4, (FSDP, "model.frozen=[embedding.*]"), "model.frozen"),
        (2, (FSDP, "engine.megatron.tp=2"), "one data-parallel rank (dp*cp=1)"),
        (
            4,
            (FSDP, "engine.megatron.ddp.fsdp_sharding=optim", "engine.megatron.ddp.overlap_grad_reduce=true"),
            "engine.megatron.ddp.fsdp_sharding=optim and overlap_grad_reduce=true",
        ),
        (
            4,
            (FSDP, "engine.megatron.ddp.fsdp_sharding=optim", "engine.megatron.ddp.optimizer_instances=2"),
            "engine.megatron.ddp.fsdp_sharding=optim and optimizer_instances=2",
        ),
    ],
)
def test_what_fsdp_is_not_combined_with(world_size: int, overrides: tuple[str, ...], refused: str) -> None:
    name = overrides[0]
    assert broken(*overrides, world_size=world_size) == [
        f"{name} with {refused}: not supported; change that, or set engine.megatron.ddp=ddp"
    ]


def test_fsdp_that_can_run() -> None:
    assert broken(FSDP, "engine.megatron.ddp.overlap_grad_reduce=true", "checkpoint.hf_final=true", world_size=4) == []
    assert (
        broken(
            "engine.megatron.ddp=torch_fsdp2",
            "engine.megatron.pp=2",
            "model.frozen=[embedding.*]",
            "checkpoint.hf_interval=3",
            world_size=4,
        )
        == []
    )


EXPERTS = ModelFacts(**{**vars(FACTS), "num_experts": 8, "expert_ffn_hidden_size": 48})


@pytest.mark.parametrize(
    ("world_size", "overrides", "line"),
    [
        (
            2,
            "engine.megatron.tp=2",
            "model.path has experts: engine.megatron.tp=2 needs engine.megatron.sequence_parallel=true",
        ),
        (
            3,
            "engine.megatron.ep=3 trainer.prompts_per_step=63 trainer.minibatch_size=63",
            "engine.megatron.ep=3 does not divide the 8 experts of model.path; legal: 1, 2, 4, 8",
        ),
        (
            4,
            "engine.megatron.ep=8",
            "engine.megatron.ep*etp=8*1=8 does not divide the 4 ranks of a pipeline stage (world size 4 / pp 1); "
            "legal products: 1, 2, 4",
        ),
        (
            32,
            "engine.megatron.etp=32",
            "engine.megatron.etp=32 does not divide the feed-forward size 48 of an expert of model.path; "
            "legal: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
        ),
    ],
)
def test_experts_set_limits(world_size: int, overrides: str, line: str) -> None:
    assert broken(*overrides.split(), world_size=world_size, facts=EXPERTS) == [line]


def test_experts_with_biases_are_not_cut() -> None:
    facts = ModelFacts(**{**vars(EXPERTS), "expert_biases": True})
    cut = ("engine.megatron.tp=2", "engine.megatron.sequence_parallel=true")
    assert broken(*cut, world_size=2, facts=facts) == [
        "engine.megatron.etp=2: the experts of model.path have biases, which Megatron-Core does not cut; set "
        "engine.megatron.etp=1"
    ]
    assert broken(*cut, "engine.megatron.etp=1", world_size=2, facts=facts) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("profile.steps=[0,3,101]", "trainer.profile.steps=[0, 101]: legal: 1 to trainer.steps=100"),
        ("profile.steps=[3] profile.ranks=[0,2]", "trainer.profile.ranks=[2]: legal: 0 to 1, the ranks of the run"),
        (
            "profile.steps=[3] profile.memory=true device=cpu",
            "trainer.profile.memory=true with trainer.device=cpu: the history is a GPU's; set it to false",
        ),
    ],
)
def test_traces_are_of_steps_and_ranks_of_the_run(overrides: str, line: str) -> None:
    assert broken(*(f"trainer.{text}" for text in overrides.split()), world_size=2) == [line]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("shared_expert_overlap=true", ".shared_expert_overlap has no effect: model.path has no shared experts; leave"),
        ("dispatcher=deepep", ".dispatcher=deepep with ep*etp=1: every rank has all experts whole, and no token"),
        (
            "shared_expert_overlap=true dispatcher=allgather",
            ".shared_expert_overlap=true with dispatcher=allgather: shared experts run between the messages of",
        ),
        (
            "shared_expert_overlap=true model.recompute=selective model.recompute_modules=[shared_experts]",
            ".shared_expert_overlap=true with model.recompute_modules=shared_experts: what runs in pieces",
        ),
        (
            "router_fusion=true routing_replay=true algorithm.old_logprobs=recompute",
            ".router_fusion=true with engine.megatron.moe.routing_replay=true: the kernel records and takes no choices",
        ),
        (
            "router_fusion=true trainer.deterministic=true",
            ".router_fusion=true with trainer.deterministic=true: the kernel is not known to repeat its bits; set one",
        ),
    ],
)
def test_fusions_of_mixtures_are_refused_where_they_cannot_work(overrides: str, line: str) -> None:
    given = [text if "." in text.partition("=")[0] else f"engine.megatron.moe.{text}" for text in overrides.split()]
    shared = ModelFacts(**{**vars(EXPERTS), "shared_experts": len(given) > 1})
    (problem,) = broken(*given, facts=shared)
    assert problem.startswith(f"engine.megatron.moe{line}")


def test_fusions_of_mixtures_go_together() -> None:
    given = ("router_fusion=true", "shared_expert_overlap=true", "permute_fusion=false")
    shared = ModelFacts(**{**vars(EXPERTS), "shared_experts": True})
    assert broken(*(f"engine.megatron.moe.{text}" for text in given), facts=shared) == []
    sent = ("engine.megatron.ep=2", "engine.megatron.moe.dispatcher=deepep")
    assert broken(*sent, world_size=2, facts=EXPERTS) == []


def test_settings_of_experts_have_no_effect_on_a_dense_model() -> None:
    assert broken("engine.megatron.ep=2", "engine.megatron.moe.dispatcher=allgather", world_size=2) == [
        "engine.megatron.ep=2: model.path has no experts; leave it out (on a command line: engine.megatron.ep=null)",
        "engine.megatron.moe.dispatcher has no effect: model.path has no experts; leave it out (on a command line: "
        "engine.megatron.moe.dispatcher=null)",
    ]


def test_routing_is_replayed_where_a_pass_before_the_update_records_it() -> None:
    (line,) = broken("engine.megatron.moe.routing_replay=true", facts=EXPERTS)
    assert line.startswith(
        "engine.megatron.moe.routing_replay=true has no effect: it needs a pass that computes old log-probs"
    )
    for recorded in ("algorithm.old_logprobs=recompute", "algorithm.epochs=2", "trainer.minibatch_size=32"):
        assert broken("engine.megatron.moe.routing_replay=true", recorded, facts=EXPERTS) == []


def test_every_model_is_checked_and_named() -> None:
    critic = ModelFacts(**{**vars(FACTS), "num_layers": 9})
    config = load(None, ["engine.megatron.pp=2"])
    (line,) = check(config, world_size=2, models={"model.path": FACTS, "model.critic_path": critic})
    assert "the 9 layers of model.critic_path" in line


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.loss=gspo algorithm.loss_aggregation=seq-mean-token-mean",
        "algorithm.loss=gmpo algorithm.loss_aggregation=seq-mean-token-mean algorithm.advantage=grpo rollout.n=4",
        "algorithm.loss=kl_cov algorithm.epochs=2",
        "algorithm.loss=kl_cov algorithm.old_logprobs=rollout",
        "algorithm.loss=clip_cov",
    ],
)
def test_losses_run_where_something_is_left_of_them(overrides: str) -> None:
    assert broken(*overrides.split()) == []


def test_a_loss_of_ones_own_says_what_it_needs(tmp_path: Path) -> None:
    """By class variables, which are read from its text."""
    (tmp_path / "mine.py").write_text("class Mine:\n    needs_response_mean = True\n    needs_updates = True\n")
    lines = broken(f"algorithm.loss={tmp_path}/mine.py:Mine")
    assert [line.partition(" ")[0] for line in lines] == [
        "algorithm.loss_aggregation=token-mean",
        f"algorithm.loss={tmp_path}/mine.py:Mine",
    ]


def test_rules_without_a_model_and_all_at_once() -> None:
    config = load(
        None,
        ["engine.megatron.tp=3", "algorithm.loss.dual_clip=0.5", "optim.warmup_steps=200", "data.val_size=1"],
    )
    assert len(check(config, world_size=4)) == 4


def test_the_largest_batch_is_answered_at_once() -> None:
    assert (
        "legal: 1, 2, 4, 5, 8, 10" in broken("trainer.prompts_per_step=1000000000000000", "trainer.minibatch_size=7")[0]
    )


def test_flat_lists_every_key_once() -> None:
    values = flat(Config())
    assert values["optim.lr"] == 1e-6
    assert values["engine.backend"] == "megatron"
    assert set(values) == set(FIELDS)


OWN = ("algorithm.kl=loss", "algorithm.kl.coef=0.1")
_SIZES = "engine.megatron.reference"


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{_SIZES}.tp=4",),
        ("engine.megatron.tp=4", f"{_SIZES}.tp=1"),
        (f"{_SIZES}.pp=2", f"{_SIZES}.pipeline=E|t*12L"),
        ("engine.megatron.pp=4", "engine.megatron.vpp=3", f"{_SIZES}.pp=2"),
        (f"{_SIZES}.cp=2", "model.ref_path=x"),
    ],
)
def test_a_layout_of_the_references_own_that_runs(overrides: tuple[str, ...]) -> None:
    config = load(None, [*OWN, *overrides])
    assert check(config, world_size=8, models={"model.path": FACTS, "model.ref_path": FACTS}) == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((f"{_SIZES}.cp=3",), f"world size 8 is not a multiple of {_SIZES}.tp*pp*cp=1*1*3=3"),
        ((f"{_SIZES}.tp=8", f"{_SIZES}.pp=2"), f"{_SIZES}.tp*pp*cp=8*2*1=16"),
        ((f"{_SIZES}.pp=8",), f"{_SIZES}.pp*vpp=8*1=8 does not divide the 12 layers of model.path"),
        ((f"{_SIZES}.tp=8", "model.ref_path=x"), f"{_SIZES}.tp=8 does not divide the 4 attention heads of model.ref_"),
        ((f"{_SIZES}.ep=2",), f"{_SIZES}.ep=2: model.path has no experts; set {_SIZES}.ep=1"),
        ((f"{_SIZES}.tp=1",), f"{_SIZES}.tp=1 has no effect: it is the actor's already"),
        (
            (f"{_SIZES}.tp=2", f"{_SIZES}.pipeline=Ett|L"),
            f"{_SIZES}.pipeline=Ett|L has no effect: it needs {_SIZES}.pp",
        ),
        (
            (f"{_SIZES}.tp=2", "algorithm.kl.reference_interval=5"),
            "algorithm.kl.reference_interval=5 with engine.megatron.reference: the reference takes in",
        ),
        (
            (f"{_SIZES}.cp=8", "trainer.microbatch.max_tokens=1537"),
            "trainer.microbatch.max_tokens=1537 cannot hold one sequence",
        ),
        ((f"{_SIZES}.tp=2", "algorithm.kl=none", "algorithm.kl.coef=null"), "it needs a reference"),
        ((f"{_SIZES}.tp=2", "engine.backend=fsdp"), f"{_SIZES}.tp=2 has no effect: it needs engine.backend=megatron"),
    ],
)
def test_a_layout_of_the_references_own_that_cannot_run(overrides: tuple[str, ...], problem: str) -> None:
    """One line, with thing, value, rule and fix."""
    narrow = dataclasses.replace(FACTS, num_heads=4, num_kv_heads=4)
    longest = ("data.max_prompt_tokens=1024", "rollout.max_new_tokens=513")
    config = load(None, [*OWN, *longest, *overrides])
    (line,) = check(config, world_size=8, models={"model.path": FACTS, "model.ref_path": narrow})
    assert problem in line
