"""Mathematics of PPO and GRPO as pure functions: tensors and numbers in, tensors out.

`advantages` (what an estimator is), `gae`, `grpo`, `policy_loss`, `value_loss`, `kl`, `aggregation` (loss weights),
`importance` and `mismatch` (distance of trainer and rollout engine), `statistics`. Must not import a config, a process
group, Megatron-Core or transformers.
"""
