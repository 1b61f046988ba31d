"""Mathematics of PPO and GRPO as pure functions: tensors and numbers in, tensors out.

`advantages` (estimators), `policy_losses`, `losses`, `corrections` (importance weights), `kl`, `mismatch` (trainer
against rollout engine), `statistics`. They import no process group and, of the config, only dataclasses of settings.
"""
