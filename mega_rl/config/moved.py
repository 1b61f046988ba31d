"""Earlier names of settings, and where they are now: an earlier name is an error that says the new one."""

from __future__ import annotations

from mega_rl.config.keys import is_mapping, keys_in

# section before -> section now, of which the keys have kept their names unless KEYS has them
SECTIONS = {
    "parallel": "engine.megatron",
    "ddp": "engine.megatron.ddp",
    "moe": "engine.megatron.moe",
    "fsdp": "engine.fsdp",
    "sglang": "rollout.sglang",
}
KEYS = {
    "engine": "engine.backend",
    "model.transformer_impl": "engine.megatron.transformer_impl",
    "optim.distributed_optimizer": "engine.megatron.optimizer.distributed",
    "optim.cpu_offload": "engine.megatron.optimizer.cpu_offload",
    "optim.precision_aware": "engine.megatron.optimizer.precision_aware",
    "optim.moment_dtype": "engine.megatron.optimizer.moment_dtype",
    "algorithm.gamma": "algorithm.advantage_settings.gamma",
    "algorithm.gae_lambda": "algorithm.advantage_settings.gae_lambda",
    "algorithm.whiten_advantages": "algorithm.advantage_settings.whiten",
    "algorithm.clip_low": "algorithm.loss_settings.clip_low",
    "algorithm.clip_high": "algorithm.loss_settings.clip_high",
    "algorithm.dual_clip": "algorithm.loss_settings.dual_clip",
    "algorithm.clip.low": "algorithm.loss_settings.clip_low",
    "algorithm.clip.high": "algorithm.loss_settings.clip_high",
    "algorithm.clip.dual": "algorithm.loss_settings.dual_clip",
    "algorithm.clip.value": "algorithm.value_clip",
    "algorithm.kl_placement": "algorithm.kl.placement",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
    "algorithm.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_control": "algorithm.kl.control",
    "algorithm.kl_target": "algorithm.kl.target",
    "algorithm.kl_horizon": "algorithm.kl.horizon",
    "data.chat_template": "data.chat.template",
    "data.chat_template_kwargs": "data.chat.template_kwargs",
    "data.system_prompt": "data.chat.system_prompt",
    "rollout.batch_size": "rollout.hf.batch_size",
    "sglang.servers": "rollout.sglang.server.count",
    "sglang.tp": "rollout.sglang.server.tp",
    "sglang.host": "rollout.sglang.server.host",
    "sglang.max_total_tokens": "rollout.sglang.server.max_total_tokens",
    "sglang.mem_fraction": "rollout.sglang.server.mem_fraction",
    "sglang.transport": "rollout.sglang.sync.transport",
    "sglang.sync_timeout_s": "rollout.sglang.sync.timeout_s",
    "sglang.probe_tokens": "rollout.sglang.sync.probe_tokens",
    "sglang.probe_limit": "rollout.sglang.sync.probe_max_limit",
    "rollout.sglang.sync.probe_limit": "rollout.sglang.sync.probe_max_limit",
    "rollout.logprob_diff_limit": "rollout.mismatch.max_limit",
    "reward.model_path": "reward.model.path",
    "reward.attn_implementation": "reward.model.attn_implementation",
    "reward.url": "reward.http.url",
    "reward.key_file": "reward.http.key_file",
    "reward.batch_size": "reward.http.batch_size",
    "reward.concurrency": "reward.http.concurrency",
    "reward.timeout_s": "reward.http.timeout_s",
    "reward.retries": "reward.http.retries",
    "trainer.packing": "trainer.microbatch.packing",
    "trainer.max_tokens_per_microbatch": "trainer.microbatch.max_tokens",
    "trainer.micro_batch_size": "trainer.microbatch.size",
}
REMOVED = {
    "algorithm.clip": "low, high and dual are clip_low, clip_high and dual_clip of algorithm.loss_settings, value is "
    "algorithm.value_clip",
    "algorithm.grpo_std_normalization": "write algorithm.advantage_settings.std=none for false, group for true",
    "algorithm.tis_cap": "write algorithm.correction=tis and algorithm.correction_settings.cap",
    "parallel.first_stage_layers": "write the layers of every stage into engine.megatron.pipeline, as Et|ttt|tttL",
    "parallel.last_stage_layers": "write the layers of every stage into engine.megatron.pipeline, as Ettt|ttt|tL",
}


# every earlier name -> the key now
EARLIER = {f"{before}.{key.rpartition('.')[2]}": key for before, now in SECTIONS.items() for key in keys_in(now)} | KEYS


def moved(key: str) -> str | None:
    """Return what became of an earlier setting or section, or None if `key` never was one."""
    if key in SECTIONS:
        return f"this section is now {SECTIONS[key]}"
    if key in REMOVED:
        return f"this setting is gone; {REMOVED[key]}"
    if key in EARLIER:
        return f"this setting is now {EARLIER[key]}"
    mapping, _, name = key.rpartition(".")
    if mapping in EARLIER and is_mapping(EARLIER[mapping]):
        return f"this setting is now {EARLIER[mapping]}.{name}"
    return None
