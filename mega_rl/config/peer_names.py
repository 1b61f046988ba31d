"""Settings of TRL, verl, OpenRLHF and slime, and the settings here that mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_CLIP = "algorithm.loss_settings.clip_low and clip_high"
_STD = "algorithm.advantage_settings.std (none or group)"
_GENERATIONS = "rollout.dynamic_sampling.max_generations"
_TOKENS = "trainer.microbatch.max_tokens"
_MEMORY = "rollout.sglang.server.mem_fraction"
_UPDATES = "trainer.minibatch_size (a step takes trainer.prompts_per_step / trainer.minibatch_size updates)"
_MINIBATCH = "trainer.minibatch_size (prompts of an optimizer step over all ranks, not samples)"

# peer -> its name -> the setting here, with a value or a remark behind it
NAMES: Mapping[str, Mapping[str, str]] = {
    "TRL": {
        "adam_beta2": "optim.beta2",
        "beta": "algorithm.kl.coef (with algorithm.kl.placement=loss)",
        "bf16": "model.dtype=bf16",
        "delta": "algorithm.loss_settings.dual_clip",
        "epsilon": "algorithm.loss_settings.clip_low",
        "epsilon_high": "algorithm.loss_settings.clip_high",
        "eval_steps": "trainer.val_interval",
        "generation_batch_size": "trainer.prompts_per_step (prompts, not samples)",
        "gradient_accumulation_steps": "trainer.minibatch_size (prompts; micro-batches follow from their tokens)",
        "gradient_checkpointing": "model.recompute",
        "importance_sampling_level": "algorithm.loss=gspo (where it is sequence)",
        "learning_rate": "optim.lr",
        "log_completions": "metrics.rollout_interval",
        "loss_type": "algorithm.loss and algorithm.loss_aggregation",
        "lr_scheduler_type": "optim.schedule",
        "mask_truncated_completions": "reward.overlong.filter",
        "max_completion_length": "rollout.max_new_tokens",
        "max_grad_norm": "optim.clip_grad",
        "max_steps": "trainer.steps",
        "model_name_or_path": "model.path",
        "num_generations": "rollout.n",
        "num_generations_eval": "validation.n",
        "num_iterations": "algorithm.epochs",
        "num_train_epochs": "trainer.epochs",
        "output_dir": "trainer.run_dir",
        "per_device_train_batch_size": f"{_TOKENS} (memory) and trainer.minibatch_size (prompts of an optimizer step)",
        "ref_model_sync_steps": "algorithm.kl.reference_interval",
        "report_to": "metrics.trackers",
        "reward_funcs": "reward.functions",
        "reward_weights": "reward.weights",
        "save_steps": "checkpoint.save_interval",
        "scale_rewards": _STD,
        "steps_per_generation": _UPDATES,
        "vllm_gpu_memory_utilization": _MEMORY,
        "vllm_importance_sampling_correction": "algorithm.correction",
        "vllm_server_base_url": "rollout.sglang.urls",
        "vllm_tensor_parallel_size": "rollout.sglang.server.tp",
    },
    "verl": {
        "adv_estimator": "algorithm.advantage",
        "clip_ratio": _CLIP,
        "clip_ratio_c": "algorithm.loss_settings.dual_clip",
        "clip_ratio_high": "algorithm.loss_settings.clip_high",
        "clip_ratio_low": "algorithm.loss_settings.clip_low",
        "cliprange_value": "algorithm.value_clip",
        "critic_warmup": "algorithm.critic_warmup_steps",
        "default_local_dir": "trainer.run_dir",
        "entropy_coeff": "algorithm.entropy_coef",
        "experiment_name": "metrics.run_name",
        "filter_groups": _GENERATIONS,
        "filter_overlong_prompts": "data.overlong_prompts=drop",
        "gpu_memory_utilization": _MEMORY,
        "kl_loss_coef": "algorithm.kl.coef",
        "kl_loss_type": "algorithm.kl.estimator",
        "kl_penalty": "algorithm.kl.estimator",
        "lam": "algorithm.advantage_settings.gae_lambda",
        "log_val_generations": "metrics.rollout_samples",
        "logger": "metrics.trackers",
        "loss_agg_mode": "algorithm.loss_aggregation",
        "max_actor_ckpt_to_keep": "checkpoint.keep",
        "max_num_gen_batches": _GENERATIONS,
        "max_prompt_length": "data.max_prompt_tokens",
        "max_response_length": "rollout.max_new_tokens",
        "norm_adv_by_std_in_grpo": _STD,
        "ppo_epochs": "algorithm.epochs",
        "ppo_max_token_len_per_gpu": _TOKENS,
        "ppo_micro_batch_size_per_gpu": "trainer.microbatch.size",
        "ppo_mini_batch_size": "trainer.minibatch_size (prompts, as there)",
        "project_name": "metrics.project",
        "response_length": "rollout.max_new_tokens",
        "resume_mode": "checkpoint.resume",
        "reward_fn_key": "data.source_key",
        "rollout.tensor_model_parallel_size": "rollout.sglang.server.tp",
        "save_freq": "checkpoint.save_interval",
        "strategy": "engine.backend",
        "test_freq": "trainer.val_interval",
        "total_epochs": "trainer.epochs",
        "total_training_steps": "trainer.steps",
        "train_batch_size": "trainer.prompts_per_step (prompts of a step over all ranks)",
        "use_dynamic_bsz": "trainer.microbatch.packing",
        "use_kl_in_reward": "algorithm.kl.placement=reward",
        "use_kl_loss": "algorithm.kl.placement=loss",
    },
    "OpenRLHF": {
        "actor.model_name_or_path": "model.path",
        "apply_chat_template": "data.chat.template",
        "async_queue_size": "trainer.async_steps",
        "critic.model_name_or_path": "model.critic_path",
        "dynamic_filtering_enable": _GENERATIONS,
        "eps_clip": _CLIP,
        "freezing_steps": "algorithm.critic_warmup_steps",
        "init_coef": "algorithm.kl.coef",
        "input_key": "data.prompt_key",
        "is_correction_enable": "algorithm.correction",
        "label_key": "data.answer_key",
        "lambd": "algorithm.advantage_settings.gae_lambda",
        "max_tokens_per_gpu": _TOKENS,
        "n_samples_per_prompt": "rollout.n",
        "no_std_norm": _STD,
        "num_episodes": "trainer.epochs",
        "overlong_buffer_len": "reward.overlong.buffer_tokens",
        "overlong_penalty_factor": "reward.overlong.penalty",
        "packing_samples": "trainer.microbatch.packing",
        "partial_rollout_enable": "rollout.sglang.partial_rollout",
        "prompt_dataset": "data.train_files",
        "prompt_probs": "data.mixture.sources",
        "remote_url": "reward.http.url",
        "reward.model_name_or_path": "reward.model.path",
        "ring_attn_size": "engine.megatron.cp",
        "rollout.batch_size": "trainer.prompts_per_step",
        "save_steps": "checkpoint.save_interval",
        "train.batch_size": _MINIBATCH,
        "train.max_epochs": "algorithm.epochs",
        "train.micro_batch_size": "trainer.microbatch.size",
    },
    "slime": {
        "advantage_estimator": "algorithm.advantage",
        "apply_chat_template": "data.chat.template",
        "calculate_per_token_loss": "algorithm.loss_aggregation=token-mean",
        "colocate": "rollout.sglang.placement",
        "context_parallel_size": "engine.megatron.cp",
        "custom_rm_path": "reward.function",
        "disable_grpo_std_normalization": "algorithm.advantage_settings.std=none",
        "eps_clip": _CLIP,
        "eps_clip_c": "algorithm.loss_settings.dual_clip",
        "eps_clip_high": "algorithm.loss_settings.clip_high",
        "eval_interval": "trainer.val_interval",
        "eval_max_response_len": "validation.max_new_tokens",
        "expert_model_parallel_size": "engine.megatron.ep",
        "expert_tensor_parallel_size": "engine.megatron.etp",
        "global_batch_size": _MINIBATCH,
        "hf_checkpoint": "model.path",
        "input_key": "data.prompt_key",
        "kl_loss_coef": "algorithm.kl.coef",
        "kl_loss_type": "algorithm.kl.estimator",
        "label_key": "data.answer_key",
        "lambd": "algorithm.advantage_settings.gae_lambda",
        "max_tokens_per_gpu": _TOKENS,
        "n_samples_per_eval_prompt": "validation.n",
        "n_samples_per_prompt": "rollout.n",
        "normalize_advantages": "algorithm.advantage_settings.whiten",
        "num_critic_only_steps": "algorithm.critic_warmup_steps",
        "num_epoch": "trainer.epochs",
        "num_rollout": "trainer.steps",
        "num_steps_per_rollout": _UPDATES,
        "over_sampling_batch_size": "rollout.dynamic_sampling.prompts",
        "pipeline_model_parallel_size": "engine.megatron.pp",
        "prompt_data": "data.train_files",
        "ref_load": "model.ref_path",
        "ref_update_interval": "algorithm.kl.reference_interval",
        "rollout_batch_size": "trainer.prompts_per_step",
        "rollout_max_prompt_len": "data.max_prompt_tokens",
        "rollout_max_response_len": "rollout.max_new_tokens",
        "rollout_num_gpus_per_engine": "rollout.sglang.server.tp",
        "rollout_temperature": "rollout.temperature",
        "sglang_mem_fraction_static": _MEMORY,
        "tensor_model_parallel_size": "engine.megatron.tp",
        "tis_clip": "algorithm.correction_settings.cap",
        "use_dynamic_batch_size": "trainer.microbatch.packing",
        "use_kl_loss": "algorithm.kl.placement=loss",
        "use_rollout_logprobs": "algorithm.old_logprobs=rollout",
        "use_rollout_routing_replay": "rollout.sglang.return_routing",
        "use_tis": "algorithm.correction=tis",
    },
}


def in_peers(key: str) -> str:
    """Return what an unknown key is called here, if a peer has it: "TRL's num_generations is rollout.n here"; else "".

    The longest ending of the key that a peer has decides; dashes count as underscores.
    """
    words = key.replace("-", "_").split(".")
    for start in range(len(words)):
        name = ".".join(words[start:])
        if answers := dict(_answers(name)):
            return "; ".join(f"{' and '.join(peers)} {name} is {setting} here" for setting, peers in answers.items())
    return ""


def _answers(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings that peers' `name` stands for, each with the peers in the genitive."""
    settings = {setting for names in NAMES.values() for own, setting in names.items() if own == name}
    for setting in sorted(settings):
        yield setting, [f"{peer}'s" for peer, names in NAMES.items() if names.get(name) == setting]
