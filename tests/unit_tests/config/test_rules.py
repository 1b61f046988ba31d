"""Rules between settings: one line for each, in a table; configs that break none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.needs import is_on_policy, models_take_turns, requested_models
from mega_rl.config.rules import check
from mega_rl.config.values import ModelFacts

FACTS = ModelFacts(
    num_layers=12,
    num_heads=16,
    num_kv_heads=8,
    ffn_hidden_size=96,
    max_position_embeddings=4096,
)
EXPERTS = dataclasses.replace(FACTS, num_experts=8, expert_ffn_hidden_size=48)
# Sections as the tables write them.
SECTIONS = {"M.": "engine.megatron.", "S.": "rollout.sglang.", "A.": "algorithm.", "T.": "trainer.", "R.": "reward."}
SECTIONS |= {"V.": "validation.", "D.": "data.", "SGLANG": "rollout.backend=sglang"}


def whole(text: str) -> str:
    return re.sub(r"\b([MSATRVD]\.|SGLANG)", lambda match: SECTIONS[match[0]], text)


def broken(*overrides: str, world_size: int = 1, facts: ModelFacts = FACTS) -> list[str]:
    return check(load(None, whole(" ".join(overrides)).split()), world_size=world_size, models={"model.path": facts})


# Ranks, settings, and the beginning of the line that they get.
RULES = [
    # layout
    (3, "M.tp=2", "world size 3 is not a multiple of M.tp*pp*cp=2*1*1=2; start a multiple of 2 ranks"),
    (1, "M.sequence_parallel=true", "M.sequence_parallel=true has no effect: it needs M.tp above 1"),
    (1, "M.vpp=2", "M.vpp=2 has no effect: it needs M.pp above 1"),
    (1, "T.minibatch_size=24", "T.minibatch_size=24 does not divide T.prompts_per_step=64; legal: 1, 2, 4, 8, 16,"),
    (6, "", "T.prompts_per_step=64 is not a multiple of the data-parallel size 6 (world size 6 / tp*pp*cp 1);"),
    (64, "T.minibatch_size=16 rollout.n=2", "T.minibatch_size*rollout.n=32: needs a sequence"),
    (1, "T.microbatch.max_tokens=1279", "T.microbatch.max_tokens=1279 cannot hold one sequence of"),
    (2, "M.ddp.overlap_param_gather=true", "M.ddp.overlap_param_gather=true has no effect: it needs"),
    (2, "M.ddp.reduce_scatter_fp32_accumulation=true", "M.ddp.reduce_scatter_fp32_accumulation=true needs"),
    (
        2,
        "M.ddp.reduce_scatter_fp32_accumulation=true M.ddp.grad_reduce_in_fp32=false M.optimizer.distributed=false",
        "M.ddp.reduce_scatter_fp32_accumulation=true",
    ),
    (
        2,
        "M.cp=2 rollout.max_new_tokens=255 T.microbatch.max_tokens=1279",
        "T.microbatch.max_tokens=1279 cannot hold one",
    ),
    (1, "M.optimizer.precision_aware=true M.optimizer.distributed=false", "M.optimizer.precision_aware=true has no"),
    (1, "M.optimizer.precision_aware=true M.optimizer.cpu_offload=1", "M.optimizer.cpu_offload with"),
    (1, "M.optimizer.precision_aware=true optim.name=muon", "optim.name=muon: only Adam steps the state of"),
    (1, "M.optimizer.cpu_offload=0.5 optim.name=muon", "optim.name=muon: only Adam steps the state of"),
    (1, "optim.warmup_steps=100", "optim.warmup_steps=100 has no effect: it needs T.steps above its sum with"),
    (1, "A.advantage=gae A.critic_warmup_steps=100", "A.critic_warmup_steps=100 has no effect: it needs T.steps"),
    (1, "A.advantage=gae optim.warmup_steps=60 A.critic_warmup_steps=40", "optim.warmup_steps=60 has no effect: it"),
    (1, "T.val_interval=5", "T.val_interval=5 has no effect: it needs D.val_files, D.val_size, V.sets, or a"),
    (1, "rollout.n=1", "rollout.n=1: A.advantage=grpo compares samples of a prompt; legal: at least 2"),
    (1, "A.advantage=grpo rollout.n=4 A.kl=reward", "A.kl=reward with A.advantage=grpo: it has one reward for a"),
    (1, "A.advantage=gae A.old_logprobs=rollout A.kl=reward", "A.old_logprobs=rollout: the difference of engine"),
    (1, "A.old_logprobs=rollout A.correction=tis", "A.correction=tis has no effect: it needs A.old_logprobs=auto"),
    (1, "A.loss.dual_clip=1", "A.loss.dual_clip=1: legal: 0 (off) or above 1"),
    (1, "A.loss=clip_cov A.loss.dual_clip=0.5", "A.loss.dual_clip=0.5: legal: 0 (off) or above 1"),
    (1, "A.loss=gspo", "A.loss_aggregation=token-mean with A.loss=gspo: the loss has one number for a response,"),
    (1, "A.advantage=gae A.loss=gmpo A.loss_aggregation=seq-mean-token-mean", "A.loss=gmpo reads one advantage for a"),
    (1, "A.loss=kl_cov", "A.loss=kl_cov has no effect with one optimizer step for each batch, in which the policy"),
    (3, "M.tp=3 T.prompts_per_step=66 T.minibatch_size=66", "M.tp=3 does not divide the 16 attention heads of"),
    (5, "M.pp=5", "M.pp*vpp=5*1=5 does not divide the 12 layers of model.path; legal products: 1, 2, 3, 4, 6, 12,"),
    (1, "D.max_prompt_tokens=3841", "D.max_prompt_tokens+rollout.max_new_tokens=4097 is above the 4096 positions"),
    (1, "SGLANG D.max_prompt_tokens=3840", "D.max_prompt_tokens+rollout.max_new_tokens=4096 is above the 4095"),
    (
        1,
        "SGLANG D.max_prompt_tokens=8 T.val_interval=1 D.val_files=[v] V.max_new_tokens=4088",
        "D.max_prompt_tokens+V.max_new_tokens=4096 is",
    ),
    # needs
    (1, "A.advantage=grpo rollout.n=2 optim.critic_lr=1", "optim.critic_lr=1.0 has no effect: it needs"),
    (1, "A.advantage=grpo rollout.n=2 A.critic_warmup_steps=3", "A.critic_warmup_steps=3 has no effect: it needs"),
    (1, "A.advantage=grpo rollout.n=2 A.value_clip=0", "A.value_clip=0.0 has no effect: it needs A.advantage=gae"),
    (1, "model.ref_path=x", "model.ref_path=x has no effect: it needs a reference: A.kl=reward or loss, or"),
    (1, "A.kl=loss A.kl.horizon=5", "A.kl.horizon=5 has no effect: it needs A.kl.control=adaptive"),
    (1, "optim.min_lr_ratio=0.5", "optim.min_lr_ratio=0.5 has no effect: it needs optim.schedule=linear or cosine"),
    (1, "T.microbatch.size=1", "T.microbatch.size=1 has no effect: it needs T.microbatch.packing=false"),
    (1, "T.microbatch.packing=false T.microbatch.max_tokens=64", "T.microbatch.max_tokens=64 has no effect: it"),
    (1, "D.val_size=4", "D.val_size=4 has no effect: it needs T.val_interval"),
    (1, "M.pipeline=EttL", "M.pipeline=EttL has no effect: it needs M.pp above 1"),
    (1, "model.recompute_layers=2", "model.recompute_layers=2 has no effect: it needs model.recompute=full"),
    (1, "M.ddp.bucket_size=9", "M.ddp.bucket_size=9 has no effect: it needs M.ddp.overlap_grad_reduce=true"),
    (1, "M.optimizer.moment_dtype=bf16", "M.optimizer.moment_dtype=bf16 has no effect: it needs"),
    (1, "T.val_interval=1 D.val_files=[a] D.val_size=4", "D.val_size=4 has no effect: it needs no D.val_files"),
    # fsdp
    (4, "M.ddp=megatron_fsdp M.optimizer.cpu_offload=0.5", "M.ddp=megatron_fsdp with M.optimizer.cpu_offload=0.5:"),
    (4, "M.ddp=megatron_fsdp M.pp=2", "M.ddp=megatron_fsdp with M.pp=2: not supported; change that, or set"),
    (4, "M.ddp=megatron_fsdp model.frozen=[embedding.*]", "M.ddp=megatron_fsdp with model.frozen: not supported;"),
    (2, "M.ddp=megatron_fsdp M.tp=2", "M.ddp=megatron_fsdp with one data-parallel rank (dp*cp=1): not supported;"),
    (4, "M.ddp=megatron_fsdp M.ddp.fsdp_sharding=optim M.ddp.overlap_grad_reduce=true", "M.ddp=megatron_fsdp with"),
    (4, "M.ddp=megatron_fsdp M.ddp.fsdp_sharding=optim M.ddp.optimizer_instances=2", "M.ddp=megatron_fsdp with"),
    # rollout
    (1, "S.server.tp=2", "S.server.tp=2 has no effect: it needs SGLANG"),
    (1, "SGLANG rollout.hf.batch_size=8", "rollout.hf.batch_size=8 has no effect: it needs rollout.backend=hf"),
    (1, "rollout.backend=none T.async_steps=1 A.correction=tis", "T.async_steps=1 has no effect: it needs rollout."),
    (1, "T.async_steps=1 A.correction=tis S.arrival=free", "S.arrival=free has no effect: it needs SGLANG"),
    (1, "SGLANG T.async_steps=1 A.correction=none", "T.async_steps=1 with A.correction=none: samples of old"),
    (1, "SGLANG S.server.tp=5", "S.server.tp=5 does not divide the 16 attention heads of model.path"),
    (1, "SGLANG S.urls=[http://a:1]", "S.keys_file is empty with S.urls: a server without keys takes weights from"),
    (1, "SGLANG S.keys_file=k", "S.keys_file=k has no effect: it needs S.urls"),
    (
        1,
        "SGLANG S.urls=[http://127.0.0.1:30000] S.keys_file=keys.json S.server.tp=2",
        "S.server.tp=2 has no effect: it needs",
    ),
    (
        1,
        "SGLANG S.urls=[http://127.0.0.1:30000] S.keys_file=keys.json S.placement=colocated",
        "S.placement=colocated with S.urls: joined servers have their own devices;",
    ),
    (
        1,
        "SGLANG S.placement=colocated T.async_steps=1 A.correction=tis S.arrival=free S.sync.in_flight=keep",
        "S.placement=colocated with S.sync.in_flight=keep: servers release their KV cache while the trainer trains;",
    ),
    (
        1,
        "SGLANG S.placement=colocated T.async_steps=1 A.correction=tis S.arrival=free R.source=model R.source.path=r",
        "S.placement=colocated with S.arrival=free and R.source=model: to score a group interrupts all others;",
    ),
    (1, "SGLANG S.sync.timeout_s=600", "S.sync.timeout_s=600 must be below T.timeout_s=600: the other ranks wait"),
    (
        1,
        "SGLANG S.sync.interval=1",
        "S.sync.interval=1 has no effect: it needs T.async_steps and servers with",
    ),
    (
        1,
        "SGLANG T.async_steps=1 A.correction=tis T.minibatch_size=32 S.sync.interval=1 S.placement=colocated",
        "S.sync.interval=1 has no effect: it needs T.async_steps and servers with their own devices",
    ),
    (1, "T.async_steps=1 S.sync.interval=1", "S.sync.interval=1 has no effect: it needs SGLANG"),
    (
        1,
        "SGLANG T.async_steps=1 A.correction=tis T.minibatch_size=32 S.sync.interval=2",
        "S.sync.interval=2 has no effect: it needs more optimizer steps a step than that",
    ),
    (1, "SGLANG S.arrival=free", "S.arrival=free has no effect: it needs T.async_steps"),
    (1, "SGLANG S.urls=127.0.0.1:30000 S.keys_file=k", "S.urls: '127.0.0.1:30000' is not a server's address; legal:"),
    (1, "SGLANG S.urls=http://127.0.0.1 S.keys_file=k", "S.urls: 'http://127.0.0.1' is not a server's address;"),
    (1, "SGLANG S.urls=http://a:70000 S.keys_file=k", "S.urls: 'http://a:70000' is not a server's address; legal:"),
    (1, "SGLANG S.urls=[f.txt,http://a:1] S.keys_file=k", "S.urls: 'f.txt' is a registry, next to other entries;"),
    (1, "SGLANG S.urls=http://8.8.8.8/f S.keys_file=k", "S.urls: 'http://8.8.8.8/f': whoever answers for a registry"),
    (1, "SGLANG S.urls=http://node/f S.keys_file=k", "S.urls: 'http://node/f': whoever answers for a registry gets"),
    (1, "SGLANG S.urls=http://[::1/f S.keys_file=k", "S.urls: 'http://[::1/f' is not a server's address; legal:"),
    (1, "SGLANG S.urls=ftp://a/f S.keys_file=k", "S.urls: 'ftp://a/f' is not a server's address; legal:"),
    (1, "SGLANG S.urls=f.txt", "S.keys_file is empty with S.urls: a server without keys takes weights from"),
    (1, "SGLANG S.urls=f.txt S.keys_file=k S.server.count=2", "S.server.count=2 has no effect: it needs"),
    (1, "SGLANG S.urls=f.txt S.keys_file=k S.placement=colocated", "S.placement=colocated with S.urls: joined"),
    (1, "SGLANG S.server.host=0.0.0.0", "S.server.host='0.0.0.0': a server listens on one interface, not on all;"),
    (1, "SGLANG S.server.host=::", "S.server.host='::': a server listens on one interface, not on all; legal:"),
    # data
    (1, "D.mixture.temperature=2", "D.mixture.temperature=2.0 has no effect: it needs D.mixture.sources"),
    (1, "D.curriculum=success D.shuffle=false", "D.curriculum=success with D.shuffle=false: prompts come in one"),
    (1, "D.curriculum=success R.source=none", "D.curriculum=success needs rewards, which R.source=none does not"),
    (1, "D.stream.rows=8 T.async_steps=2", "D.stream.rows with T.async_steps=2: a checkpoint keeps one place"),
    (
        1,
        "D.stream.rows=8 SGLANG T.async_steps=1 A.correction=tis S.placement=colocated",
        "D.stream.rows with T.async_steps=1: a checkpoint keeps one place",
    ),
    (1, "D.stream.timeout_s=5", "D.stream.timeout_s=5.0 has no effect: it needs D.stream.rows"),
    (1, "D.stream.rows=8 T.epochs=2", "D.stream.rows=8: the number of prompts is not known, so it cannot go with"),
    (1, "D.stream.rows=8 D.val_size=3 T.val_interval=5", "D.stream.rows=8: the number of prompts is not known, so"),
    (1, "D.stream.rows=8 D.curriculum=success", "D.stream.rows=8: the number of prompts is not known, so it"),
    # algorithm
    (1, "A.advantage=pass_at_k A.advantage.k=8 rollout.n=8", "A.advantage.k=8 with rollout.n=8: pass_at_k"),
    (1, "A.advantage=opo rollout.n=1", "rollout.n=1: A.advantage=opo compares samples of a prompt; legal: at"),
    (1, "A.advantage=rloo rollout.n=4 A.kl=reward", "A.kl=reward with A.advantage=rloo: it has one reward for a"),
    (1, "A.advantage=gdpo rollout.n=4", "A.advantage=gdpo with R.function=exact_match: it reads named parts of"),
    (1, "A.advantage=gdpo rollout.n=4 R.source=model R.source.path=r", "A.advantage=gdpo with R.source=model: it"),
    (1, "R.weights.form=0.5", "R.weights={'form': 0.5} has no effect: it needs named parts: R.source=http,"),
    (1, "A.advantage=distillation", "A.advantage=distillation needs model.ref_path, the teacher: the student's"),
    (
        1,
        "A.advantage=distillation model.ref_path=t A.old_logprobs=rollout",
        "A.old_logprobs=rollout: the difference of",
    ),
    (
        1,
        "A.advantage=distillation model.ref_path=t A.loss=gmpo A.loss_aggregation=seq-mean-token-mean",
        "A.loss=gmpo reads one advantage for a",
    ),
    (1, "A.loss=distillation model.ref_path=t", "A.advantage=grpo has no effect with A.loss=distillation, which"),
    (
        1,
        "A.advantage=distillation A.loss=distillation model.ref_path=t A.correction=tis",
        "A.correction=tis with A.loss=distillation:",
    ),
    (1, "R.source=none", "R.source=none with A.advantage=grpo: it makes advantages of rewards; name who scores,"),
    (
        1,
        "R.source=none checkpoint.keep_best=val/reward_mean",
        "checkpoint.keep_best=val/reward_mean:",
    ),
    (
        1,
        "R.source=none A.advantage=distillation model.ref_path=t R.overlong.buffer_tokens=16",
        "R.overlong.buffer_tokens=16 has no effect:",
    ),
    (
        1,
        "R.source=none A.advantage=distillation model.ref_path=t R.function=math_verify",
        "R.function=math_verify has no effect: it",
    ),
    (1, "A.kl=loss A.kl.reference_rate=0.5", "A.kl.reference_rate=0.5 has no effect: it needs"),
    (1, "A.kl=loss A.kl.reference_interval=10 M.ddp=torch_fsdp2", "A.kl.reference_interval=10 needs"),
    (1, "A.advantage=reinforce_plus_plus A.kl=reward A.loss=gmpo", "A.loss=gmpo reads one advantage for a"),
    (
        1,
        "A.advantage=gae A.advantage.policy_lambda=0.95 A.advantage.length_alpha=0.05",
        "A.advantage.policy_lambda=0.95 has no effect",
    ),
    # validation
    (1, "V.n=2", "V.n=2 with V.temperature=0: greedy samples are all the same"),
    (
        1,
        "T.val_interval=1 D.val_files=a.jsonl V.n=4 V.temperature=1 V.sets.Ab=a.jsonl",
        "V.sets: 'Ab' is not the name of a set; legal:",
    ),
    (
        1,
        "T.val_interval=1 D.val_files=a.jsonl V.n=4 V.temperature=1 V.sets.a=3",
        "V.sets.a=3: must be a file, or a list of",
    ),
    (
        1,
        "T.val_interval=1 D.val_files=a.jsonl V.n=4 V.temperature=1 R.source=none",
        "R.source=none with A.advantage=grpo: it",
    ),
    (
        1,
        "T.val_interval=1 D.val_files=a.jsonl V.n=4 V.temperature=1 checkpoint.keep_best=val/pass_at_2",
        "checkpoint.keep_best=val/pass_at_2:",
    ),
    (1, "checkpoint.keep_best=val/reward_mean", "checkpoint.keep_best=val/reward_mean: validations have no such"),
    # adapters
    (1, "model.adapter.alpha=8", "model.adapter.alpha=8.0 has no effect: it needs model.adapter.rank"),
    (1, "model.adapter.rank=4 M.ddp=torch_fsdp2", "model.adapter.rank=4: M.ddp=torch_fsdp2 is not supported; set"),
    (
        1,
        "model.adapter.rank=4 M.transformer_impl=transformer_engine",
        "model.adapter.rank=4: M.transformer_impl=transformer_engine has no adapters; legal: auto, local",
    ),
    (
        1,
        "model.adapter.rank=4 A.kl=loss A.kl.reference_interval=1",
        "model.adapter.rank=4: A.kl.reference_interval=1 copies weights into the reference",
    ),
    (
        1,
        "model.adapter.rank=4 model.adapter.path=sft A.kl=loss",
        "model.adapter.path=sft: the reference would be the model below, not the policy as it starts; merge the two",
    ),
    # args
    (1, "SGLANG S.server.tp=8 S.server.args.tp_size=2", "S.server.args.tp_size: decided by S.server.tp; leave it"),
    (1, "SGLANG S.server.tp=8 S.server.args.mem_fraction_static=0.96", "S.server.args.mem_fraction_static=0.96:"),
    (1, "SGLANG S.server.tp=8 S.server.args.max_total_tokens=many", "S.server.args.max_total_tokens='many' cannot"),
    (1, "SGLANG S.server.tp=8 S.server.args.nnodes=2", "S.server.args.nnodes: decided by S.server.nodes; leave it"),
    (1, "SGLANG S.server.tp=8 S.server.args.dist_init_addr=a:1", "S.server.args.dist_init_addr: decided by"),
    (1, "SGLANG S.server.tp=8 S.server.args.pp_size=2", "S.server.args.pp_size: not supported: weights are sent"),
    (1, "SGLANG S.server.tp=8 S.server.args.quantization=fp8", "S.server.args.quantization: not supported:"),
    (1, "SGLANG S.server.tp=8 S.server.args.speculative_algorithm=EAGLE", "S.server.args.speculative_algorithm: not"),
    (
        1,
        "SGLANG S.server.tp=8 S.server.args.disaggregation_transfer_backend=nixl",
        "S.server.args.disaggregation_transfer_backend",
    ),
    (1, "SGLANG S.server.tp=8 S.server.args.trust_remote_code=true", "S.server.args.trust_remote_code: not"),
    (1, "SGLANG S.server.tp=8 S.server.args.dp_size=2", "S.server.args.dp_size without enable_dp_attention:"),
]


@pytest.mark.parametrize(("world_size", "overrides", "line"), RULES)
def test_a_broken_rule_is_named(world_size: int, overrides: str, line: str) -> None:
    assert any(actual.startswith(whole(line)) for actual in broken(overrides, world_size=world_size))


def test_most_mistakes_get_one_line() -> None:
    assert sum(len(broken(text, world_size=world)) == 1 for world, text, _ in RULES) > 0.9 * len(RULES)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ""),
        (8, "M.tp=4 M.sequence_parallel=true"),
        (4, "M.pp=4 M.vpp=3"),
        (2, "M.pp=2 M.vpp=2"),
        (2, "M.cp=2"),
        (5, "M.pp=5 M.pipeline=Ett|tttt|tt|tt|ttL T.prompts_per_step=64"),
        (8, "M.ddp.overlap_grad_reduce=true M.ddp.overlap_param_gather=true M.ddp.bucket_size=1000"),
        (8, "M.ddp.optimizer_instances=4"),
        (8, "M.ddp.reduce_scatter_fp32_accumulation=true M.ddp.grad_reduce_in_fp32=false"),
        (4, "M.ddp=megatron_fsdp M.ddp.overlap_grad_reduce=true checkpoint.hf_final=true"),
        (4, "M.ddp=torch_fsdp2 M.pp=2 model.frozen=[embedding.*]"),
        (1, "model.recompute=selective model.recompute_modules=[mlp,layernorm]"),
        (1, "model.recompute=full model.recompute_layers=2"),
        (16, "M.tp=16"),  # more ranks than key-value heads: each is held twice
        (64, "T.minibatch_size=16 rollout.n=4"),  # one sequence for each rank
        (1, "A.advantage=grpo rollout.n=2 A.kl=loss A.kl.coef=0.1"),
        (1, "A.advantage=gae A.kl=reward A.kl.control=adaptive A.kl.target=0.2"),
        (1, "optim.schedule=cosine optim.min_lr_ratio=0.1 optim.warmup_steps=99"),
        (1, "A.advantage=gae optim.warmup_steps=59 A.critic_warmup_steps=40"),
        (1, "T.microbatch.packing=false T.microbatch.size=2"),
        (1, "T.val_interval=5 D.val_size=8"),
        (1, "T.microbatch.max_tokens=1280"),
        (1, "D.max_prompt_tokens=3840"),
        (1, "A.loss=gspo A.loss_aggregation=seq-mean-token-mean"),
        (1, "A.loss=kl_cov A.old_logprobs=rollout"),
        (1, "SGLANG S.server.tp=8 S.server.count=2"),
        (1, "SGLANG T.async_steps=8 S.arrival=free A.correction=tis"),
        (1, "SGLANG T.async_steps=1 A.old_logprobs=rollout"),
        (1, "SGLANG T.async_steps=1 A.correction=tis T.minibatch_size=32 S.sync.interval=1"),
        (1, "T.async_steps=4"),
        (1, "SGLANG S.placement=colocated S.max_failed_share=0.5"),
        (1, "SGLANG S.placement=colocated T.async_steps=2 S.arrival=free A.correction=tis"),
        (1, "SGLANG S.urls=[http://node1:30000,https://node2:30000] S.keys_file=keys.json"),
        (1, "SGLANG S.urls=shared/fleet.txt S.keys_file=keys.json"),
        (1, "SGLANG S.urls=https://registry/fleet S.keys_file=keys.json T.async_steps=1 A.correction=tis"),
        (1, "SGLANG S.urls=http://10.0.0.7:8000/fleet S.keys_file=keys.json"),
        (1, "A.correction=tis"),  # the embedded engine's log-probs differ from the trainer's too
        (1, "D.stream.rows=8"),
        (1, "D.curriculum=success"),
        (1, "T.val_interval=1 D.val_files=a V.n=4 V.temperature=1 checkpoint.save_interval=1 "
            "V.sets.math=b checkpoint.keep_best=val/math/pass_at_4_low"),
        (1, "R.source=none A.advantage=distillation model.ref_path=t checkpoint.save_interval=5 "
            "D.val_size=8 T.val_interval=5 checkpoint.keep_best=val/response_tokens_mean R.overlong.filter=true"),
    ],
)  # fmt: skip
def test_configs_that_can_run(world_size: int, overrides: str) -> None:
    assert broken(overrides, world_size=world_size) == []


MLA = dataclasses.replace(FACTS, multi_latent_attention=True)
FEW_HEADS = dataclasses.replace(FACTS, num_heads=24, num_kv_heads=6)


@pytest.mark.parametrize(
    ("facts", "world_size", "overrides", "line"),
    [
        (FEW_HEADS, 12, "M.tp=12", ""),
        (FEW_HEADS, 4, "M.tp=4", "M.tp=4 neither divides nor is a multiple of the 6 key-value heads of model.path;"),
        (dataclasses.replace(FACTS, ffn_hidden_size=100), 8, "M.tp=8", "M.tp=8 does not divide the feed-forward size"),
        (MLA, 2, "M.tp=2", "model.path has multi-latent attention: M.tp=2 needs M.sequence_parallel=true"),
        (MLA, 2, "M.tp=2 M.sequence_parallel=true", ""),
        (EXPERTS, 2, "M.tp=2", "model.path has experts: M.tp=2 needs M.sequence_parallel=true"),
        (EXPERTS, 3, "M.ep=3 T.prompts_per_step=63 T.minibatch_size=63", "M.ep=3 does not divide the 8 experts"),
        (EXPERTS, 4, "M.ep=8", "M.ep*etp=8*1=8 does not divide the 4 ranks of a pipeline stage"),
        (EXPERTS, 32, "M.etp=32", "M.etp=32 does not divide the feed-forward size 48 of an expert of model.path"),
        (EXPERTS, 1, "M.moe.routing_replay=true", "M.moe.routing_replay=true has no effect: it needs a pass that"),
        (EXPERTS, 1, "M.moe.routing_replay=true A.epochs=2", ""),
        (EXPERTS, 1, "M.moe.shared_expert_overlap=true", ""),
        (dataclasses.replace(EXPERTS, expert_biases=True), 2, "M.tp=2 M.sequence_parallel=true", "M.etp=2: Megatron"),
        (FACTS, 2, "M.ep=2", "M.ep has no effect: model.path has no experts"),
        (FACTS, 1, "M.moe.dispatcher=allgather", "M.moe.dispatcher has no effect: model.path has no experts"),
    ],
)
def test_a_model_sets_limits(facts: ModelFacts, world_size: int, overrides: str, line: str) -> None:
    lines = broken(overrides, world_size=world_size, facts=facts)
    assert len(lines) == bool(line), lines
    assert all(actual.startswith(whole(line)) for actual in lines)


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
    config = load(None, settings.split())
    assert models_take_turns(config.engine, len(requested_models(config)) > 1, colocated=colocated) is turns


def test_every_model_is_checked_and_named() -> None:
    critic = ModelFacts(**{**vars(FACTS), "num_layers": 9})
    config = load(None, ["engine.megatron.pp=2"])
    (line,) = check(config, world_size=2, models={"model.path": FACTS, "model.critic_path": critic})
    assert "the 9 layers of model.critic_path" in line


def test_a_loss_of_ones_own_says_what_it_needs(tmp_path: Path) -> None:
    """By class variables, which are read from its text."""
    (tmp_path / "mine.py").write_text("class Mine:\n    needs_response_mean = True\n    needs_updates = True\n")
    lines = broken(f"algorithm.loss={tmp_path}/mine.py:Mine")
    assert [line.partition(" ")[0] for line in lines] == [
        "algorithm.loss_aggregation=token-mean",
        f"algorithm.loss={tmp_path}/mine.py:Mine",
    ]


def test_the_largest_batch_is_answered_at_once() -> None:
    assert (
        "legal: 1, 2, 4, 5, 8, 10" in broken("trainer.prompts_per_step=1000000000000000", "trainer.minibatch_size=7")[0]
    )


def test_off_policy_samples_need_old_logprobs() -> None:
    single = ("trainer.prompts_per_step=8", "trainer.minibatch_size=8", "algorithm.kl=none")
    assert is_on_policy(load(None, single))
    assert not is_on_policy(load(None, [*single, "algorithm.correction=tis"]))
    assert not is_on_policy(load(None, [*single, "rollout.backend=sglang", "trainer.async_steps=1"]))


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
        ((f"{_SIZES}.ep=2",), f"{_SIZES}.ep has no effect: model.path has no experts"),
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
