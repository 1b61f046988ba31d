"""The training loop; knows protocols and types, and nothing of Megatron-Core or of any rollout engine."""

from mega_rl.trainer.loop import PPOTrainer, RunSettings

__all__ = ["PPOTrainer", "RunSettings"]
