"""Mathematics of PPO and GRPO as pure functions: tensors and numbers in, tensors out.

`advantages` (estimators), `losses` (policy, critic, weights of tokens), `corrections` (importance weights), `kl`,
`mismatch` (distance of trainer and rollout engine), `statistics`. Must not import a process group, Megatron-Core or
transformers, and of the config nothing but the dataclasses of their own settings.
"""
